"""Check that solutions fit the experiment: `model.max_length` in tokens, and `agent.max_turns`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.environments.protocol import Environment, Solver
from components.errors import EnvironmentFailed, ResourceError, SpecError
from components.evaluation.qualification_page import FAILED, PASSED, QualificationCheck
from components.trajectories.schema import Scenario, Trajectory
from flows.qualification.checks import EXAMPLES, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from components.trajectories.chat import ChatFormat
    from flows.qualification.settings import QualifiedSettings

NAME = "length"


def check_length(
    spec: QualifiedSettings, cache: Path, environment: Environment, scenarios: Sequence[Scenario]
) -> QualificationCheck:
    """Measure the solutions in the agent's format with the model's tokenizer. environment: any instance."""
    from components.rollout.collector import demonstrate

    if not isinstance(environment, Solver):
        return skipped(NAME, "the environment has no solve(scenario), so the length of a solution is unknown")
    try:
        chat = _chat(spec, cache)
    except ResourceError as error:
        return skipped(NAME, f"the tokenizer of {spec.model.name} is missing: {error}")
    make: Callable[[], Environment] = spec.required_environment.build
    try:
        episodes = demonstrate(make, scenarios, spec.agent.presentation())
    except (EnvironmentFailed, SpecError) as error:
        return QualificationCheck(NAME, FAILED, str(error)[:500])
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
    return QualificationCheck(NAME, FAILED if failures else PASSED, "; ".join(failures), figures, shown)


def _chat(spec: QualifiedSettings, cache: Path) -> ChatFormat:
    from components.models.weights import check_weights, load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat

    check_weights(spec.model, cache)
    return ChatFormat(load_tokenizer(prepare(spec.model, cache)))


def _tokens(chat: ChatFormat, episode: Trajectory) -> int:
    """Return the number of tokens of the longest history."""
    from components.trajectories.convert import to_openai

    histories = [[to_openai(message) for message in history.messages] for history in episode.histories]
    return max(len(stream.token_ids) for shown in histories for stream in chat.streams(shown, episode.tools))


def _turns(episode: Trajectory) -> int:
    return sum(message.role == "assistant" for history in episode.histories for message in history.messages)
