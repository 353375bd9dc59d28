"""Starts a module several times, as the processes of one training:

    python -m components.compute.launch --processes N [--port PORT] [--log FILE] -- MODULE [ARGUMENTS]

torchrun does it: it tells each process its rank and where to meet, and ends all when one dies. On a cluster of
SkyPilot the same command runs on every node; the list of nodes that SkyPilot gives says who they are, N is then for
each node, and the first one is where they meet.

Standard input and output are those of all processes. Where one of them dies without a word, the last line on standard
output is `{"error"}`, which says which one it was and how it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence

from components.compute.runners import error_to_json
from components.errors import EspalierError, ResourceError

PORT = 29500
STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where a process failed, 2 for a list of nodes that makes no sense, 130 where it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m components.compute.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, help="on this machine, and on each node")
    parser.add_argument("--port", type=int, default=PORT, help="of the first node, where those of all nodes meet")
    parser.add_argument("--log", help="where standard error goes, for messages")
    parser.add_argument("module", help="what each process runs, as with python -m")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    try:
        where = meeting(os.environ, options.port)
    except ResourceError as error:
        _say(error)
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.processes)))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun = [*where, f"--nproc-per-node={options.processes}", "--module", options.module, *options.rest]
    try:
        run.run(run.get_args_parser().parse_args(torchrun))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == STOPPED:
            return STOPPED
        how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        memory = "; the machine may have run out of memory" if failure.signal_name() == "SIGKILL" else ""
        words = f"; its last words are in {options.log}" if options.log else ""
        _say(EspalierError(f"process {rank} of those that train together ended {how}{memory}{words}"))
        return 1
    except SignalException:
        return STOPPED
    return 0


def meeting(environment: Mapping[str, str], port: int) -> list[str]:
    """Options of torchrun that say where the processes meet: on this machine, or at the first of the nodes in
    SkyPilot's list. Raises ResourceError for a list that makes no sense."""
    nodes = environment.get("SKYPILOT_NODE_IPS", "").split()
    number, rank = (environment.get(f"SKYPILOT_{name}") for name in ("NUM_NODES", "NODE_RANK"))
    if len(nodes) < 2 and number in (None, "0", "1"):
        return ["--standalone"]
    if number != str(len(nodes)) or rank not in [str(place) for place in range(len(nodes))]:
        raise ResourceError(
            f"SKYPILOT_NODE_IPS names {len(nodes)} nodes, SKYPILOT_NUM_NODES is {number}, SKYPILOT_NODE_RANK "
            f"is {rank}: expected as many nodes as named, and a rank among them, as SkyPilot sets them for a task"
        )
    return [f"--nnodes={number}", f"--node-rank={rank}", f"--master-addr={nodes[0]}", f"--master-port={port}"]


def _say(error: EspalierError) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked has been killed
        sys.stdout.write(json.dumps({"error": error_to_json(error)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
