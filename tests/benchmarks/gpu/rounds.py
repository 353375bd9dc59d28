"""Rounds per hour on the same prompts: Espalier with vLLM, and TRL's `GRPOTrainer` with vLLM colocated.

A round samples eight responses for each prompt, takes one gradient step on them and serves the new weights. The reward
is a number that depends on the response alone, so every group has a spread; both sides train an adapter of rank 8 with
the same learning rate. Timed are the rounds after the first. TRL imports vLLM into its own process
(`trl_rounds`), which starts while Espalier's rounds are timed, but waits before it touches the GPU. Without vLLM,
Espalier generates with the embedded engine and TRL, on a CPU always, with transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.limits import session
from tests.benchmarks.gpu.quickstart import last_lines
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.served import start_vllm
from tests.benchmarks.gpu.setup import ALPHA, GPU_MEMORY, GROUP, RANK, Setup, free
from tests.benchmarks.overlap import Rounds, prompt

LEARNING_RATE = 1e-5
SCRIPT = Path(__file__).with_name("trl_rounds.py")


class TokenReward:
    """Reward in [0, 1) that depends on the tokens of an episode alone."""

    def __call__(self, trajectory: Any) -> float:
        tokens = ",".join(str(token) for history in trajectory.histories for token in history.token_ids)
        return int(hashlib.sha256(tokens.encode()).hexdigest()[:8], 16) / 2**32


def run(setup: Setup, report: Report) -> None:
    episodes = GROUP * setup.shape.prompts
    report.update(prompts=setup.shape.prompts, episodes=episodes, sampled_tokens=setup.shape.sampled, sides={})
    site = machine.vllm_site(setup.vllm_python)
    if setup.device == "cpu":
        site = None  # TRL's colocated vLLM needs a GPU
    with trl_process(setup, site[1] if site else None) as process:
        try:
            report.result["sides"]["ours"] = ours(setup, with_vllm=setup.vllm_python is not None)
        except Exception as error:  # noqa: BLE001  a side that fails here must not lose the other
            report.skip("ours", error)
        finally:
            free()
        report.update()
        said = process.communicate("\n")[0]
    lines = said.splitlines()
    if process.returncode or not lines:
        report.skip("trl", f"exit code {process.returncode}: {last_lines(setup.folder / 'trl_rounds.log')}")
    else:
        report.result["sides"]["trl"] = json.loads(lines[-1])
        report.update()


def ours(setup: Setup, *, with_vllm: bool) -> dict[str, Any]:
    """Run the rounds by the stages of a run, as `tests.benchmarks.overlap` does."""
    from flows.terminal.console import hush

    began = time.monotonic()
    if with_vllm:
        start_vllm(setup).close()
    hush()
    root = setup.root("rounds")
    run = Rounds(root, experiment(setup, root, with_vllm=with_vllm))
    ended = run.ended
    return {
        "label": f"Espalier, {'vLLM' if with_vllm else 'embedded engine'}",
        "first_seconds": round(ended[0] - began, 1),
        "rounds_per_hour": round(3600 * (len(ended) - 1) / (ended[-1] - ended[0])),
        "stage_seconds": {label: round(stage.seconds, 2) for label, stage in run.execution.done.items()},
    }


def experiment(setup: Setup, root: Path, *, with_vllm: bool) -> dict[str, Any]:
    shape = setup.shape
    inference = {"name": "vllm", "urls": [setup.server.url]} if with_vllm else {"name": "embedded"}
    environment = {"_target_": "tests.benchmarks.overlap.Waiting", "seconds": 0, "last": 1}
    return {
        "name": "rounds",
        "root": str(root),
        "rounds": shape.rounds,
        "allow": ["tests"],
        "model": setup.chat_model.model_dump(mode="json"),
        "inference": inference,
        "environment": {**environment, "train": shape.prompts},
        "reward": {"_target_": "tests.benchmarks.gpu.rounds.TokenReward"},
        "filter": {"_target_": "components.filters.everything.Everything"},
        "algorithm": {"name": "grpo", "learning_rate": LEARNING_RATE},
        "collect": {"scenarios": shape.prompts, "group_size": GROUP, "concurrency": GROUP * shape.prompts},
        "evaluate": {"scenarios": 1},
        "agent": {"max_turns": 1, "max_tokens": shape.sampled},
        "deploy": {"mode": "none"},
    }


def trl_process(setup: Setup, site: Path | None) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start TRL's process, which imports its packages and then waits for a line. site: vLLM's packages."""
    request = {
        "model": str(setup.chat_dir),
        "device": setup.device,
        "dtype": setup.dtype,
        "vllm": site is not None,
        "gpu_memory": GPU_MEMORY,
        "prompts": [prompt(f"train-{number}") for number in range(setup.shape.prompts)],
        "group": GROUP,
        "sampled": setup.shape.sampled,
        "rounds": setup.shape.rounds,
        "rank": RANK,
        "alpha": ALPHA,
        "learning_rate": LEARNING_RATE,
        "out": str(setup.folder / "trl-rounds"),
    }
    path = [*([str(site)] if site else []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return session([str(SCRIPT), json.dumps(request)], setup.folder / "trl_rounds.log", env=environment, **pipes)
