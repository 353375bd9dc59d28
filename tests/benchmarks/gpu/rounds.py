"""Rounds per hour on the same prompts: Espalier with vLLM, and TRL's `GRPOTrainer` with vLLM colocated.

A round samples eight responses for each prompt, takes one gradient step on them and serves the new weights. The reward
is a number that depends on the response alone, so every group has a spread; both sides train an adapter of rank 8 with
the same learning rate. Timed are the rounds after the first. TRL imports vLLM into its own process
(`trl_rounds`), which starts while Espalier's rounds are timed, but waits before it touches the GPU. Without vLLM,
Espalier generates with the embedded engine and TRL, on a CPU always, with transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.environments.protocol import Step
from components.trajectories.schema import Scenario
from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.quickstart import last_lines
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.served import start_vllm
from tests.benchmarks.gpu.setup import ALPHA, GPU_MEMORY, GROUP, RANK, Setup, free

LEARNING_RATE = 1e-5
SCRIPT = Path(__file__).with_name("trl_rounds.py")


class OneAnswer:
    """Environment with one answer to each prompt."""

    def __init__(self, count: int = 16):
        self.count = count

    def scenarios(self, split: str) -> list[Scenario]:
        count = {"train": self.count, "heldout": 1}.get(split, 0)
        return [Scenario(f"{split}-{number}", {"prompt": prompt(number)}, split) for number in range(count)]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        return [{"role": "user", "content": scenario.input["prompt"]}]

    async def step(self, action: dict[str, Any]) -> Step:
        return Step([], 0.0, True, {"success": True})

    def close(self) -> None: ...


def prompt(number: int) -> str:
    return f"Tell story {number} of a lamp, a kettle and a chair in a small shop, in a few sentences."


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
    """Run the stages of an experiment without Prefect and MLflow, as `tests.benchmarks.overlap` does."""
    from components.specs import validate
    from flows.execution.executor import Execution
    from flows.execution.overlap import Concurrent
    from flows.experiment.spec import ExperimentSpec
    from flows.recipes.run import Run
    from flows.stages.base import Context
    from flows.terminal.console import Console, hush

    began = time.monotonic()
    if with_vllm:
        start_vllm(setup).close()
    hush()
    root = setup.root("rounds")
    spec = validate(ExperimentSpec, experiment(setup, root, with_vllm=with_vllm))
    execution = Execution(spec, Context.at(root), Console(io.StringIO()), None, root / "log")
    ended: list[float] = []

    def on_round(number: int, artifacts: Any) -> None:
        ended.append(time.monotonic())

    try:
        background = Concurrent(execution, lambda run: lambda label, step, request: run(label, step, request).artifact)
        Run(spec, execution.artifact, background, on_round=on_round).execute()
    finally:
        execution.close()
        execution.context.warm.close()
    stages = {label: round(stage.seconds, 2) for label, stage in execution.done.items()}
    return {
        "label": f"Espalier, {'vLLM' if with_vllm else 'embedded engine'}",
        "first_seconds": round(ended[0] - began, 1),
        "rounds_per_hour": round(3600 * (len(ended) - 1) / (ended[-1] - ended[0])),
        "stage_seconds": stages,
    }


def experiment(setup: Setup, root: Path, *, with_vllm: bool) -> dict[str, Any]:
    shape = setup.shape
    inference = {"name": "vllm", "urls": [setup.server.url]} if with_vllm else {"name": "embedded"}
    return {
        "name": "rounds",
        "root": str(root),
        "rounds": shape.rounds,
        "allow": ["tests"],
        "model": {
            "name": shape.chat_model[0],
            "source": shape.chat_model[1],
            "dtype": setup.dtype,
            "device": setup.device,
            "max_length": 512,
            "lora": {"rank": RANK, "alpha": ALPHA},
        },
        "inference": inference,
        "environment": {"_target_": "tests.benchmarks.gpu.rounds.OneAnswer", "count": shape.prompts},
        "reward": {"_target_": "tests.benchmarks.gpu.rounds.TokenReward"},
        "filter": {"_target_": "components.filters.everything.Everything"},
        "algorithm": {"name": "grpo", "learning_rate": LEARNING_RATE},
        "collect": {
            "scenarios": shape.prompts,
            "group_size": GROUP,
            "concurrency": GROUP * shape.prompts,
        },
        "evaluate": {"scenarios": 1},
        "agent": {"max_turns": 1, "max_tokens": shape.sampled},
        "deploy": {"mode": "none"},
    }


@contextlib.contextmanager
def trl_process(setup: Setup, site: Path | None) -> Iterator[subprocess.Popen[str]]:
    """Start TRL's process, which imports its packages and then waits for a line. site: vLLM's packages."""
    request = {
        "model": str(setup.chat_dir),
        "device": setup.device,
        "dtype": setup.dtype,
        "vllm": site is not None,
        "gpu_memory": GPU_MEMORY,
        "prompts": [prompt(number) for number in range(setup.shape.prompts)],
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
    with open(setup.folder / "trl_rounds.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(request)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
        process.wait()
