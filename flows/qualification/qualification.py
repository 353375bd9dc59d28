"""Qualification of an experiment's environment: all checks, one after the other, on a few scenarios of each split."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.environments.protocol import Environment, Solver
from components.errors import BoundaryError, EnvironmentFailed, ResourceError, SpecError
from components.evaluation.checks import FAILED, PASSED, PropertyCheck, skipped_check
from components.evaluation.spec import EvaluateSpec
from components.models.spec import ModelSpec
from components.rewards.judge import RewardCaller
from components.rewards.protocol import ModelReward
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.trajectories.schema import Scenario, Trajectory
from flows.qualification import checks
from flows.qualification.checks import EXAMPLES
from flows.qualification.recording import TestedInstance

if TYPE_CHECKING:
    from collections.abc import Callable

    from components.trajectories.chat import ChatFormat

LENGTH = "length"
TURNS = 30
"""Maximum number of actions of chance and of exploits, if `agent.max_turns` is larger."""
Check = Callable[[checks.Qualification], Awaitable[PropertyCheck]]
CHECKS: dict[str, Check] = {
    "solver": checks.check_solver,
    "chance": checks.check_chance,
    "replay": checks.check_replay,
    "isolation": checks.check_isolation,
    "restore": checks.check_restore,
    "splits": checks.check_splits,
    "exploits": checks.check_exploits,
    "agreement": checks.check_agreement,
}
"""Checks in their order; `length` follows."""


class QualifiedSettings(Protocol):
    """Sections of an experiment: environment, reward, agent, model and evaluation."""

    @property
    def required_environment(self) -> Target: ...

    @property
    def reward(self) -> Target: ...

    @property
    def agent(self) -> AgentSpec: ...

    @property
    def model(self) -> ModelSpec: ...

    @property
    def evaluate(self) -> EvaluateSpec: ...


def qualify(spec: QualifiedSettings, count: int, cache: Path) -> list[PropertyCheck]:
    """Return the result of each check. count: number of scenarios to play. cache: folder of prepared models."""
    environment: Environment = spec.required_environment.build()
    results, chosen = asyncio.run(_play(spec, environment, count))
    return [*results, check_length(spec, cache, environment, chosen)]


async def _play(
    spec: QualifiedSettings, environment: Environment, count: int
) -> tuple[list[PropertyCheck], list[Scenario]]:
    world = TestedInstance(environment)
    try:
        scenarios = {split: await world.scenarios(split) for split in ("train", "heldout")}
        chosen = [*_draw(scenarios["heldout"], (count + 1) // 2), *_draw(scenarios["train"], count // 2)]
        turns = min(TURNS, spec.agent.max_turns)
        tested = checks.Qualification(spec.required_environment.build, world, scenarios, chosen, turns, _reward(spec))
        results = []
        for name, check in CHECKS.items():
            if not chosen:
                results.append(PropertyCheck(name, FAILED, "the environment has no scenarios"))
                continue
            results.append(await _checked(name, check, tested, spec.evaluate.timeout))
        return results, chosen
    finally:
        await world.close()


def _reward(spec: QualifiedSettings) -> RewardCaller | None:
    """Return the reward of the experiment; None if it asks a model, or depends on a whole collection."""
    reward = spec.reward.build()
    return None if isinstance(reward, ModelReward) or getattr(reward, "settles", False) else RewardCaller(reward)


async def _checked(name: str, check: Check, tested: checks.Qualification, timeout: float) -> PropertyCheck:
    """Run a check. An error of the environment, or a check that takes too long, is a failed check."""
    try:
        async with asyncio.timeout(timeout):
            return await check(tested)
    except BoundaryError as error:
        return PropertyCheck(name, FAILED, str(error)[:500])
    except TimeoutError:
        return PropertyCheck(name, FAILED, f"took longer than evaluate.timeout = {timeout:g} s")


def _draw(scenarios: list[Scenario], count: int) -> list[Scenario]:
    """Return `count` scenarios, drawn with a fixed seed: types and difficulties often alternate at equal distances."""
    return random.Random(0).sample(scenarios, min(count, len(scenarios)))


def check_length(
    spec: QualifiedSettings, cache: Path, environment: Environment, scenarios: Sequence[Scenario]
) -> PropertyCheck:
    """Check that solutions fit `model.max_length` in tokens and `agent.max_turns`, in the agent's format with the
    model's tokenizer. environment: any instance."""
    from components.rollout.collector import demonstrate

    if not isinstance(environment, Solver):
        return skipped_check(LENGTH, "the environment has no solve(scenario), so the length of a solution is unknown")
    try:
        chat = _chat(spec, cache)
    except ResourceError as error:
        return skipped_check(LENGTH, f"the tokenizer of {spec.model.name} is missing: {error}")
    make: Callable[[], Environment] = spec.required_environment.build
    try:
        episodes = demonstrate(make, scenarios, spec.agent.presentation())
    except (EnvironmentFailed, SpecError) as error:
        return PropertyCheck(LENGTH, FAILED, str(error)[:500])
    tokens = [_tokens(chat, episode) for episode in episodes]
    turns = [_turns(episode) for episode in episodes]
    failures = []
    if max(tokens) > spec.model.max_length:
        failures.append(f"a solution has {max(tokens)} tokens; model.max_length is {spec.model.max_length}")
    if max(turns) > spec.agent.max_turns:
        failures.append(f"a solution has {max(turns)} turns; agent.max_turns is {spec.agent.max_turns}")
    if failures:
        failures.append("set the larger value, or easier scenarios")
    longest = sorted(zip(tokens, episodes, strict=True), key=lambda pair: -pair[0])
    figures = {"episodes": len(episodes), "most_tokens": max(tokens), "most_turns": max(turns)}
    shown = [episode for _, episode in longest[:EXAMPLES]] if failures else []
    return PropertyCheck(LENGTH, FAILED if failures else PASSED, "; ".join(failures), figures, shown)


def _chat(spec: QualifiedSettings, cache: Path) -> ChatFormat:
    from components.models.weights import check_weights, load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat

    model = spec.model.model_copy(update={"quantization": "none"})  # the tokenizer needs no rounded weights
    check_weights(model, cache)
    return ChatFormat(load_tokenizer(prepare(model, cache)))


def _tokens(chat: ChatFormat, episode: Trajectory) -> int:
    """Return the number of tokens of the longest history."""
    from components.trajectories.convert import to_openai

    histories = [[to_openai(message) for message in history.messages] for history in episode.histories]
    return max(len(stream.token_ids) for shown in histories for stream in chat.streams(shown, episode.tools))


def _turns(episode: Trajectory) -> int:
    return sum(message.role == "assistant" for history in episode.histories for message in history.messages)
