"""Memory of each process of a policy gradient, by the number of episodes of the round.

    python tests/benchmarks/rank_memory.py [--rows 8000 24000] [--processes 1] [--step 256]
        [--setting order | replay | costs] [--json]

Episodes of four turns with tools, about 350 tokens and their log-probabilities, in groups of 8 (`streaming.episodes`).
The training prepares the whole round and takes its first gradient step, on `--step` episodes, with a tiny random model.
A peak is the most memory of its own (RssAnon) that a process held: mapped files are shared, and the system can drop
them. A setting adds `flow.order`, `replay` of an earlier round of as many episodes, or `algorithm.costs`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Enough(Exception):
    """Raised after the first gradient step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8000, 24000], help="episodes of the round")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--step", type=int, default=256, help="episodes of a gradient step")
    parser.add_argument("--setting", choices=["order", "replay", "costs"])
    parser.add_argument("--json", action="store_true", help="print the result as JSON, nothing else")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(train(options.folder, options.rows[0] // options.step, options.setting)))
        return
    results = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory(prefix="espalier-ranks-") as name:
            subprocess.run([sys.executable, "-c", f"{WRITE}write(Path({name!r}), {rows})"], check=True, cwd=CODE)
            results.append({"rows": rows, "ranks": measured(options, Path(name), rows)})
        if not options.json:
            peaks = ", ".join(f"{rank['peak_mb']} MB in {rank['seconds']} s" for rank in results[-1]["ranks"])
            print(f"{rows} episodes, {options.processes} processes: {peaks}", flush=True)
    if options.json:
        print(json.dumps(results))


def measured(options: argparse.Namespace, folder: Path, rows: int) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(options.processes), "LOCAL_WORLD_SIZE": str(options.processes)}
    command = [sys.executable, __file__, "--rows", str(rows), "--step", str(options.step), "--folder", str(folder)]
    command += ["--setting", options.setting] if options.setting else []
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PORT": port},
        )
        for rank in range(options.processes)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "a process failed"
    return [json.loads(output.splitlines()[-1]) for output in outputs]


WRITE = """
from pathlib import Path
from components.trajectories.schema import Score
from components.trajectories.store import scored_writer
from tests.benchmarks.streaming import episodes

def write(folder, rows):
    with scored_writer(folder) as add:
        for episode in episodes(rows, 8):
            reward, episode.reward = episode.reward, None
            episode.histories[0].token_ids = [3 + token % 250 for token in episode.histories[0].token_ids]
            add(episode, Score(episode.id, reward))

"""


def train(folder: Path, minibatches: int, setting: str | None) -> dict[str, float]:
    """Take the first gradient step. Return the peak before and during it."""
    import torch

    from components.algorithms.continual.replay import mixed
    from components.algorithms.continual.spec import ReplaySpec
    from components.algorithms.policy_gradient.spec import GRPOSpec
    from components.algorithms.spec import CostSpec
    from components.models.weights import prepare
    from components.trajectories.roles import MAIN
    from flows.stages.train import _restricted, _scored
    from tests.algorithms.builders import MODEL, train_in

    if SIZE > 1:
        from torch import distributed

        distributed.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ['PORT']}", rank=RANK, world_size=SIZE)
    base_dir = prepare(MODEL, folder / "models")
    names = ("trajectories", "scores", "selection")
    inputs = {name: argparse.Namespace(path=folder) for name in names}
    costs = {"turns": CostSpec(limit=4.0)} if setting == "costs" else None
    spec = GRPOSpec(minibatches=max(1, minibatches), max_kl=1e9, costs=costs)  # the tokens are random
    start, before = time.perf_counter(), own_mb()
    peak, running = [before], threading.Event()

    def watch() -> None:
        while not running.wait(0.02):
            peak[0] = max(peak[0], own_mb())

    def stop(metrics: dict[str, float]) -> None:
        raise Enough

    threading.Thread(target=watch, daemon=True).start()
    scored = _scored(inputs, components=bool(costs))  # as the train stage reads them
    if setting == "order":
        scored = _restricted(scored, [MAIN])
    elif setting == "replay":
        scored, _ = mixed(ReplaySpec(), scored, [scored], version="v", compared=True, seed=0)
    torch.set_num_threads(1)
    try:
        train_in(folder / "training", spec, base_dir, scored, on_step=stop, model=MODEL.model_copy(update=LONG))
    except Enough:
        running.set()
    return {"peak_mb": round(peak[0]), "before_mb": round(before), "seconds": round(time.perf_counter() - start, 1)}


LONG = {"max_length": 512}


def own_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    main()
