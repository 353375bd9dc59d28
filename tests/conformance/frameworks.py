"""Agents of real frameworks, captured through the endpoint for own agents and trained on.

    python -m tests.conformance.frameworks [--python PYTHON] [--node FOLDER] [--only NAME] [--json]

Each agent of `agents` is a program that knows a URL and a key. It plays two or four episodes with two tools, against a
policy whose words are written down (`scripted_policy`); one GRPO step then trains on the capture. A case passes if

    the agent reads the policy's answers and returns its tools' results (the answer is correct where it should be),
    the histories have exactly the tokens that the policy sampled, each once,
    the step has a finite loss, counts every sampled token once, and computes the log-probabilities at which they were
    sampled, which depend on every token before them.

--python: environment with the Python frameworks. --node: folder with node_modules.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.inference.app import AppOptions
from components.inference.protocol import Sampling
from components.inference.server import ModelServer
from components.models.spec import LoraSpec, ModelSpec
from components.models.weights import prepare
from components.rollout.own_agent import MODEL, OwnAgent
from components.rollout.players.player import Player
from components.trajectories.schema import Scenario, Trajectory
from tests.conformance.report import Case, Report, show
from tests.conformance.scripted_policy import ScriptedPolicy
from tests.rollout.worlds import collect

COMMAND = "python -m tests.conformance.frameworks"
AGENTS = Path(__file__).parent / "agents"
KL = 1e-4
"""Maximum KL divergence, in nats a token, between the sampled and the trained distribution before the step."""
MAX_LENGTH = 16384
"""Tokens of a history: the tokenizer of the tiny model has one for each byte, and smolagents writes long prompts."""
TINY = ModelSpec(name="tiny", source="random", device="cpu", max_length=MAX_LENGTH, lora=LoraSpec(rank=4, alpha=8.0))


@dataclass(frozen=True)
class Agent:
    program: str
    package: str
    """Package whose version is reported."""
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.program.removesuffix("_agent.py").removesuffix(".py").removesuffix(".mjs"), *self.flags))


AGENT_VARIANTS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("langgraph_agent.py", "langgraph"): ((), ("--stream",), ("--responses",), ("--responses", "--stream")),
    ("openai_agents.py", "openai-agents"): ((), ("--stream",), ("--responses",), ("--responses", "--stream")),
    ("litellm_agent.py", "litellm"): ((), ("--stream",)),
    ("anthropic_agent.py", "anthropic"): ((), ("--stream",)),
    ("smolagents_agent.py", "smolagents"): ((), ("--stream",)),
    ("pydantic_ai_agent.py", "pydantic-ai-slim"): ((), ("--stream",), ("--responses",), ("--responses", "--stream")),
    ("openai_node.mjs", "openai"): ((), ("--stream",)),
    ("vercel_ai.mjs", "ai"): ((), ("--stream",), ("--responses",), ("--responses", "--stream")),
}
ALL = [Agent(program, package, flags) for (program, package), variants in AGENT_VARIANTS.items() for flags in variants]


class Questions:
    """The tasks; the agents have their own tools."""

    def scenarios(self, split: str) -> list[Scenario]:
        numbers = [(17, 23, 5, 8, 9), (31, 12, 40, 2, 2)]
        return [
            Scenario(
                f"q{index}",
                {"question": f"What is {a} * {b} + {c}, and {d} + {e}?", "answer": f"{a * b + c} and {d + e}"},
                split,
            )
            for index, (a, b, c, d, e) in enumerate(numbers)
        ]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        raise AssertionError("the agents have tools of their own")

    def step(self, action: dict[str, Any]) -> Any:
        raise AssertionError("the agents have tools of their own")

    def close(self) -> None: ...


def program(agent: Agent, python: Path, node: Path | None) -> Callable[..., Any]:
    """Return the function of an own agent that runs a program."""

    async def play(scenario: Scenario, base_url: str, api_key: str) -> dict[str, Any]:
        command = [str(python), str(AGENTS / agent.program)]
        cwd = AGENTS
        if agent.program.endswith(".mjs"):
            assert node is not None
            cwd = node
            for file in AGENTS.glob("*.mjs"):  # modules resolve packages from the folder of their file
                shutil.copyfile(file, node / file.name)
            command = ["node", agent.program]
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, *agent.flags, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, cwd=cwd
        )
        out, errors = await process.communicate(json.dumps(scenario.input).encode())
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command[0], out, errors)
        outcome: dict[str, Any] = json.loads(out.decode().strip().splitlines()[-1])
        right = outcome["answer"] == scenario.input["answer"]
        return {"success": right, "reward": float(right), **outcome}

    return play


def play(agent: Agent, python: Path, node: Path | None, model_dir: Path) -> tuple[ScriptedPolicy, list[Trajectory]]:
    """Play two episodes of each task, one at a time; with flags of the first task only."""
    engine, engines = ScriptedPolicy(model_dir, MAX_LENGTH), {}
    sampling = Sampling(max_tokens=200, temperature=1.0)
    with ModelServer(engine, MODEL, AppOptions(engines=engines, timeout=600)) as server:
        own = OwnAgent(program(agent, python, node), server.url, engines)
        jobs = Questions().scenarios("train")[: 1 if agent.flags else None]
        options = {"player": Player(own), "timeout": 300.0, "group_size": 2, "concurrency": 1}
        found = collect(engine, Questions, jobs, sampling=sampling, max_turns=8, **options)
    return engine, found


def problems(engine: ScriptedPolicy, trajectories: list[Trajectory]) -> str:
    """Return what is wrong with captured episodes; empty if nothing is."""
    if failed := next((trajectory.failure for trajectory in trajectories if trajectory.failure), None):
        return f"{failed.kind}: {failed.message}" + (f" ({engine.failure})" if engine.failure else "")
    successes = sum(bool(trajectory.outcome.get("success")) for trajectory in trajectories)
    called = [sorted(trajectory.outcome.get("called", [])) for trajectory in trajectories]  # frameworks call at once
    if called != [["add", "add", "multiply"]] * len(trajectories):
        return f"tools called: {called}"
    if 2 * successes != len(trajectories):
        return f"{successes} of {len(trajectories)} answers are correct, expected half: {trajectories[0].outcome}"
    captured = Counter(
        tuple(history.token_ids[slice(*message.span)])
        for trajectory in trajectories
        for history in trajectory.histories
        for message in history.messages
        if message.span
    )
    if captured != Counter(map(tuple, engine.sampled)):
        return f"{captured.total()} answers captured, {len(engine.sampled)} sampled, or other tokens"
    return ""


def trained(trajectories: list[Trajectory], model_dir: Path, folder: Path) -> dict[str, float]:
    """Run one GRPO step on captured episodes; return its metrics."""
    from components.algorithms.policy_gradient.spec import GRPOSpec
    from components.algorithms.train import train
    from components.algorithms.trainer import PolicyTrainingRequest

    for trajectory in trajectories:
        trajectory.reward = float(trajectory.outcome["reward"])
    steps: list[dict[str, float]] = []
    request = PolicyTrainingRequest(
        model=TINY,
        base_dir=model_dir,
        trajectories=trajectories,
        out=folder / "out",
        scratch=folder / "scratch",
        seed=0,
        on_step=steps.append,
    )
    return train(GRPOSpec(), request)


def case(agent: Agent, python: Path, node: Path | None, model_dir: Path) -> Case:
    """Play, check and train; return the result."""
    engine, trajectories = play(agent, python, node, model_dir)
    if text := problems(engine, trajectories):
        return Case(agent.name, "failed", text)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("out", "scratch"):
            (folder / name).mkdir()
        metrics = trained(trajectories, model_dir, folder)
    sampled = sum(map(len, engine.sampled))
    histories = sum(len(trajectory.histories) for trajectory in trajectories)
    exact = abs(metrics["kl_sampler"]) < KL and metrics["sampled_tokens"] == sampled
    if not exact or not math.isfinite(metrics["loss"]):
        return Case(agent.name, "failed", f"{sampled} tokens sampled, the step says {metrics}")
    summary = f"{len(engine.sampled)} answers in {histories} histories, {sampled} tokens, loss {metrics['loss']:.4f}"
    return Case(agent.name, "passed", summary)


def missing(agent: Agent, python: Path, node: Path | None) -> str | None:
    """Return why an agent cannot run here."""
    if agent.program.endswith(".mjs"):
        if shutil.which("node") is None or node is None or not (node / "node_modules" / agent.package).is_dir():
            return f"{node or '--node'} has no node_modules/{agent.package}, or node is missing"
        return None
    if not python.is_file():
        return f"--python {python}: no such file"
    return missing_module(agent.program, python)


@functools.cache
def missing_module(program: str, python: Path) -> str | None:
    """Return why the imports of a Python agent fail; it ends after them, because it gets no task."""
    ended = subprocess.run([python, AGENTS / program], capture_output=True, text=True, check=False, input="")
    last = (ended.stderr.strip().splitlines() or [""])[-1]
    return last if last.startswith("ModuleNotFoundError") else None


def run(agents: list[Agent], python: Path, node: Path | None) -> Report:
    """Run the agents whose packages are installed."""
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = prepare(TINY, Path(scratch))
        for agent in agents:
            reason = missing(agent, python, node)
            cases.append(Case(agent.name, "skipped", reason) if reason else case(agent, python, node, model_dir))
            print(f"{cases[-1].name}: {cases[-1].outcome} {cases[-1].reason}", file=sys.stderr)
    return Report("frameworks", versions(agents, python, node), COMMAND, cases)


def versions(agents: list[Agent], python: Path, node: Path | None) -> str:
    """Return the versions of the installed packages of the agents."""
    found = {}
    for agent in agents:
        if missing(agent, python, node):
            continue
        if agent.program.endswith(".mjs"):
            assert node is not None
            package = json.loads((node / "node_modules" / agent.package / "package.json").read_text())
            found[f"{agent.package} (npm)"] = package["version"]
        else:
            text = f"import importlib.metadata; print(importlib.metadata.version({agent.package!r}))"
            found[agent.package] = subprocess.run([python, "-c", text], capture_output=True, text=True).stdout.strip()
    return ", ".join(f"{name} {version}" for name, version in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Trains on captures of agents of real frameworks.")
    default = os.environ.get("CONFORMANCE_PYTHON", sys.executable)
    parser.add_argument("--python", type=Path, default=Path(default), help="Python with the frameworks")
    parser.add_argument("--node", type=Path, help="folder with node_modules (default: CONFORMANCE_NODE)")
    parser.add_argument("--only", help="agents whose name begins like this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    agents = [agent for agent in ALL if agent.name.startswith(options.only or "")]
    node = options.node or (Path(os.environ["CONFORMANCE_NODE"]) if "CONFORMANCE_NODE" in os.environ else None)
    return show(run(agents, options.python.absolute(), node and node.absolute()), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
