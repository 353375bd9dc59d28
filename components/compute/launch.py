"""Launcher of a module as the processes of one training:

    python -m components.compute.launch --processes N [--port PORT] [--log FILE] -- MODULE [ARGUMENTS]

It uses torchrun, which gives each process its rank and the rendezvous address, and ends all when one dies. On a cluster
of SkyPilot the same command runs on every node; SkyPilot's list of nodes identifies them, N then counts per node, and
the first node is the rendezvous.

Standard input and output are shared by all processes. If one of them dies without reporting an error, the last line on
standard output is `{"error"}`, which names the process and how it ended.
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
    """Return exit code 0, 1 if a process failed, 2 for an invalid list of nodes, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m components.compute.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, help="number on this machine, and on each node")
    parser.add_argument("--port", type=int, default=PORT, help="rendezvous port on the first node")
    parser.add_argument("--log", help="file that receives standard error, for messages")
    parser.add_argument("module", help="module that each process runs, as with python -m")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the module")
    options = parser.parse_args(arguments)
    try:
        rendezvous = rendezvous_options(os.environ, options.port)
    except ResourceError as error:
        _report(error)
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.processes)))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun = [*rendezvous, f"--nproc-per-node={options.processes}", "--module", options.module, *options.rest]
    try:
        run.run(run.get_args_parser().parse_args(torchrun))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == STOPPED:
            return STOPPED
        cause = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        memory = "; the machine may have run out of memory" if failure.signal_name() == "SIGKILL" else ""
        log_hint = f"; its last output is in {options.log}" if options.log else ""
        _report(EspalierError(f"training process {rank} ended {cause}{memory}{log_hint}"))
        return 1
    except SignalException:
        return STOPPED
    return 0


def rendezvous_options(environment: Mapping[str, str], port: int) -> list[str]:
    """Return the options of torchrun for the rendezvous: this machine, or the first of the nodes in SkyPilot's list.
    Raise ResourceError for an invalid list."""
    nodes = environment.get("SKYPILOT_NODE_IPS", "").split()
    number, rank = (environment.get(f"SKYPILOT_{name}") for name in ("NUM_NODES", "NODE_RANK"))
    if len(nodes) < 2 and number in (None, "0", "1"):
        return ["--standalone"]
    if number != str(len(nodes)) or rank not in [str(place) for place in range(len(nodes))]:
        raise ResourceError(
            f"SKYPILOT_NODE_IPS lists {len(nodes)} nodes, SKYPILOT_NUM_NODES is {number}, SKYPILOT_NODE_RANK "
            f"is {rank}: expected as many nodes as listed, and a rank among them, as SkyPilot sets them for a task"
        )
    return [f"--nnodes={number}", f"--node-rank={rank}", f"--master-addr={nodes[0]}", f"--master-port={port}"]


def _report(error: EspalierError) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader was killed
        sys.stdout.write(json.dumps({"error": error_to_json(error)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
