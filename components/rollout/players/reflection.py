"""Reflection on an unsuccessful episode, followed by a second attempt (Reflexion, arXiv:2303.11366).

The policy reads a transcript of an attempt that ended without success and writes a reflection. The reflection is part
of the prompt of a second attempt at the same scenario. The first attempt is unchanged. The second attempt is a separate
episode, `SCENARIO~second/SAMPLE`, with the reflection and the attempt as histories of sampled tokens. Its reward
depends on the outcome of the attempt and so rewards the reflection too; the reflection's step reward is the first one,
0. The second attempts of a scenario form a group: they are compared with each other, not with first attempts.

The transcript is text in a separate conversation, so the request depends only on the messages and not on the engine's
cache. The middle of a transcript that exceeds `max_transcript` or the context is cut, marked and counted
(`cut_transcript`).

A successful second attempt can also be returned as a demonstration (`demonstrations`): the same conversation without
the reflection, in the group of the first attempts. A demonstration is text without sampled tokens; training tokenizes
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from components.environments.protocol import Environment, Messages
from components.errors import ContextOverflow, Problem
from components.inference.protocol import Engine
from components.rollout.agent import Episode, as_messages, ask
from components.rollout.formats import Presentation
from components.rollout.observations import clean
from components.rollout.players.player import Agent, Player, PlayerSpec, PlaySetup
from components.rollout.request import EpisodeRequest, derived_seed
from components.rollout.usage import REASONING_TOKENS
from components.trajectories.convert import conversations, to_message
from components.trajectories.groups import aside, scenario_of
from components.trajectories.parts import DEMONSTRATION
from components.trajectories.schema import History, Scenario, Trajectory

SECOND = "second"
"""Name of the group of second attempts."""
NOTE = "You have tried this before and did not succeed. What you noted then:\n"
"""Text before a reflection in the prompt."""


SHORTEST = 100
"""Minimum length of a truncated transcript in characters."""


class ReflectionSpec(PlayerSpec):
    """Reflection on an unsuccessful episode, followed by a second attempt with the reflection in the prompt."""

    key: ClassVar[str] = "reflection"

    max_tokens: int = Field(128, ge=1)
    """Maximum number of sampled tokens per reflection."""
    prompt: str = Field(
        "You tried the task below and did not succeed. Say in a few sentences what went wrong, and what to do "
        "differently the next time.",
        min_length=1,
    )
    """Prompt of the reflection. The transcript of the episode follows it."""
    max_transcript: int = Field(8_000, ge=100)
    """Maximum number of characters of the transcript. The middle of a longer transcript, or of one that exceeds the
    model's context, is cut, marked and counted (`cut_transcript`)."""
    demonstrate: bool = False
    """Demonstrations from successful second attempts: stored in addition, without the reflection, in the group of the
    first attempts, for sft, distill and preference algorithms."""

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        yield from super().problems(setup)
        if self.demonstrate and setup.sampled_only:
            yield self.problem(
                f"true: demonstrations are text, but {setup.sampled_only} learns only from sampled tokens; expected "
                "false, or algorithm=sft, distill or a preference algorithm",
                "demonstrate",
            )

    def derived(self, group_size: int, max_turns: int) -> int:
        return group_size

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        return ReflectionPlayer(agent, self)


class ReflectionPlayer(Player):
    """Player of an attempt and, after one without success, a reflection and a second attempt."""

    def __init__(self, agent: Agent, spec: ReflectionSpec):
        super().__init__(agent)
        self._spec = spec

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the first attempt, followed by the second one if the first had no success. The time limits apply to
        each attempt and to the reflection."""
        first = await self.agent.play(engine, environment, request)
        if not self.following(first):
            return [first]
        derived = request.aside(SECOND)
        sampling = replace(request.sampling, max_tokens=self._spec.max_tokens)
        reflecting = ReflectionEpisode(engine, environment, replace(derived, sampling=sampling), Presentation())
        async with reflecting.within():
            await reflecting.about(first, self._spec)
        reflection = reflecting.trajectory()
        if reflection.failure is not None or reflecting.limit is not None:
            return [first, reflection]
        # typed Any: an async method where the protocol has a plain one
        noted: Any = ReflectionEnvironment(environment, note(reflection.histories[0]))
        second = await self.agent.play(engine, noted, replace(request, seed=derived_seed(derived.seed, "attempt")))
        names = ("sampled_tokens", "truncated", "cut_transcript", REASONING_TOKENS)
        counts = [name for name in names if name in reflection.metrics]
        return [
            first,
            replace(
                second,
                id=derived.id,
                scenario=derived.scenario,
                histories=[*reflection.histories, *second.histories],
                step_rewards=[0.0, *second.step_rewards],
                metrics=second.metrics
                | {name: second.metrics.get(name, 0.0) + reflection.metrics[name] for name in counts},
            ),
        ]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the second attempt if the first one ended without success."""
        unsuccessful = first.failure is None and not first.success
        return [f"{aside(first.scenario, SECOND).id}/{first.sample}"] if unsuccessful else []


class ReflectionEpisode(Episode):
    """The running reflection: one prompt and its response."""

    cut = False
    """True if the transcript is truncated."""

    async def about(self, episode: Trajectory, spec: ReflectionSpec) -> None:
        """Sample the reflection on an episode. The transcript's length is halved until it fits the context. Raises
        ContextOverflow if even the minimum length does not fit."""
        length_limit = spec.max_transcript
        while True:
            text, self.cut = transcript(episode, length_limit)
            self.talk.messages = [{"role": "user", "content": whole(f"{spec.prompt}\n\n{text}")}]
            try:
                await self.answer()
                return
            except ContextOverflow:
                if length_limit <= SHORTEST:
                    raise
            length_limit = max(min(length_limit, len(text)) // 2, SHORTEST)

    def trajectory(self) -> Trajectory:
        trajectory = super().trajectory()
        return replace(trajectory, metrics=trajectory.metrics | {"cut_transcript": 1.0}) if self.cut else trajectory


class ReflectionEnvironment:
    """An environment wrapper that prepends a note to the first user message. At its end, truncation would remove it."""

    def __init__(self, environment: Environment, text: str):
        self._environment = environment
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, scenario: Scenario) -> Messages:
        first = as_messages(await ask(self._environment.reset, scenario), "reset")
        if not first or first[-1]["role"] != "user":
            return [*first, {"role": "user", "content": self._text}]
        return [*first[:-1], {**first[-1], "content": f"{self._text}\n\n{first[-1]['content']}"}]


def note(reflection: History) -> str:
    """Return the prompt text with a reflection for the second attempt."""
    return NOTE + whole(reflection.messages[-1].content).strip()


def whole(text: str) -> str:
    """Return the whole text, sanitized."""
    return clean(text, len(text))[0]


def transcript(episode: Trajectory, most: int) -> tuple[str, bool]:
    """Return the episode's transcript, and True if it was truncated to `most` characters: its beginning and end, with
    a mark between them."""
    lines = []
    for message in (message for talk in conversations(episode) for message in talk):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        parts = [message["content"], *(f"calls {call['name']} {call['arguments']}" for call in calls)]
        lines.append(f"{message['role']}: " + "\n".join(part for part in parts if part))
    text = "\n".join(lines)
    if len(text) <= most:
        return text, False
    half = most // 2
    return f"{text[:half]}\n[cut: {len(text) - 2 * half:,} characters]\n{text[-half:]}", True


def demonstrations(trajectories: Sequence[Trajectory], group_size: int) -> Iterator[Trajectory]:
    """Yield successful second attempts without their reflections. Attempt k becomes sample `group_size + k` of its
    scenario. Attempts with a truncated response are skipped: they would teach the policy to stop mid-message."""
    scenarios = {trajectory.group: trajectory.scenario for trajectory in trajectories}
    for trajectory in trajectories:
        name = scenario_of(trajectory.group)
        if not trajectory.success or trajectory.group != aside(scenarios[name], SECOND).id:
            continue
        reflection, *attempt = trajectory.histories
        if any(message.finish_reason == "length" for history in attempt for message in history.messages):
            continue
        sample, text = group_size + trajectory.sample, note(reflection)
        yield replace(
            trajectory,
            id=f"{name}/{sample}",
            scenario=scenarios[name],
            sample=sample,
            histories=[_without(text, messages) for messages in conversations(replace(trajectory, histories=attempt))],
            step_rewards=trajectory.step_rewards[1:],
            metrics={"turns": trajectory.metrics["turns"]},
            policy=DEMONSTRATION,
        )


def _without(text: str, messages: Messages) -> History:
    """Return the conversation without a note, as text."""
    converted = []
    for message in messages:
        if message["role"] == "user" and message["content"].startswith(text):
            message = {**message, "content": message["content"].removeprefix(text).lstrip()}
            if not message["content"]:
                continue
        converted.append(to_message(message))
    return History(converted)
