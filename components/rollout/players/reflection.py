"""Reflection: a failed episode is thought about, and tried once more (Reflexion, arXiv:2303.11366).

An attempt that came to its end without success is shown to the policy as a transcript. What the policy writes on it,
the reflection, stands in the prompt of a second attempt at the same scenario. The first attempt stays as it is. The
second is an episode of its own, `SCENARIO~second/SAMPLE`, with the reflection and the attempt as histories of sampled
tokens. It is judged by how the attempt ended, so that is what the reflection is rewarded by; of the step rewards the
first, 0, is its own. The second attempts of a scenario are a group: they are compared with each other, not with
attempts that began without a reflection.

The transcript is text in a conversation of its own: what is asked depends on what was said, and on nothing that an
engine remembers. Of one that is too long, for `max_transcript` or for the context, the middle is cut, with a mark, and
counted (`cut_transcript`).

A second attempt that succeeded can also be had as a demonstration (`demonstrations`): the same conversation without
the reflection, in the group of the first attempts. It is text: nobody sampled it so, and its tokens are laid out anew
by what trains on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment, Messages
from components.errors import ContextOverflow
from components.inference.protocol import Engine, Sampling
from components.rollout.agent import Episode, as_messages, ask
from components.rollout.observations import clean
from components.rollout.players.player import Attempt, episode_number
from components.rollout.spec import ReflectionSpec
from components.trajectories.convert import conversations, to_message
from components.trajectories.groups import aside, scenario_of
from components.trajectories.parts import DEMONSTRATION
from components.trajectories.schema import History, Scenario, Trajectory

SECOND = "second"
"""Name of the group of second attempts."""
NOTE = "You have tried this before and did not succeed. What you noted then:\n"
"""Stands before a reflection in the prompt."""


SHORTEST = 100
"""Characters of a transcript; of fewer there is nothing to say."""


class Reflecting:
    """Makes an attempt, and after one without success a reflection and a second attempt."""

    def __init__(self, attempt: Attempt, spec: ReflectionSpec):
        self._attempt = attempt
        self._spec = spec

    async def play(
        self,
        engine: Engine,
        environment: Environment,
        scenario: Scenario,
        *,
        sample: int,
        sampling: Sampling,
        max_turns: int,
        seed: int,
        **patience: Any,
    ) -> list[Trajectory]:
        """patience: holds for each attempt, and for the reflection."""
        how: dict[str, Any] = {"sample": sample, "sampling": sampling, "max_turns": max_turns, **patience}
        first = await self._attempt(engine, environment, scenario, **how, seed=seed)
        if not self.following(first):
            return [first]
        again = aside(scenario, SECOND)
        seed = episode_number(seed, SECOND)
        thinking = Thought(engine, environment, replace(sampling, max_tokens=self._spec.max_tokens), seed)
        async with thinking.within(**patience):
            await thinking.about(first, self._spec)
        reflection = thinking.trajectory(again, sample)
        if reflection.failure is not None:
            return [first, reflection]
        noted = Noted(environment, note(reflection.histories[0]))
        second = await self._attempt(engine, noted, scenario, **how, seed=episode_number(seed, "attempt"))
        counts = ("sampled_tokens", "truncated", *(["cut_transcript"] if thinking.cut else []))
        return [
            first,
            replace(
                second,
                id=reflection.id,
                scenario=again,
                histories=[*reflection.histories, *second.histories],
                step_rewards=[0.0, *second.step_rewards],
                metrics=second.metrics
                | {name: second.metrics.get(name, 0.0) + reflection.metrics[name] for name in counts},
            ),
        ]

    def following(self, first: Trajectory) -> list[str]:
        """The second attempt, where the first came to its end without success."""
        again = first.failure is None and not first.success
        return [f"{aside(first.scenario, SECOND).id}/{first.sample}"] if again else []


class Thought(Episode):
    """A reflection under way: one question, and its answer."""

    cut = False
    """Whether the transcript is not the whole one."""

    async def about(self, episode: Trajectory, spec: ReflectionSpec) -> None:
        """Where the transcript does not fit the context, it is cut to half as much until it does. Raises
        ContextOverflow where even the shortest does not."""
        most = spec.max_transcript
        while True:
            text, self.cut = transcript(episode, most)
            self.talk.messages = [{"role": "user", "content": whole(f"{spec.prompt}\n\n{text}")}]
            try:
                await self.answer()
                return
            except ContextOverflow:
                if most <= SHORTEST:
                    raise
            most = max(min(most, len(text)) // 2, SHORTEST)

    def trajectory(self, scenario: Scenario, sample: int) -> Trajectory:
        found = super().trajectory(scenario, sample)
        return replace(found, metrics=found.metrics | {"cut_transcript": 1.0}) if self.cut else found


class Noted:
    """An environment with a note before its first words to the user: at their end a limit would cut it away."""

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
    """What a second attempt is told of a reflection."""
    return NOTE + whole(reflection.messages[-1].content).strip()


def whole(text: str) -> str:
    """All of a text, clean."""
    return clean(text, len(text))[0]


def transcript(episode: Trajectory, most: int) -> tuple[str, bool]:
    """What was said in an episode, and whether it was cut to so many characters: its beginning and its end, with a mark
    between them."""
    lines = []
    for message in (message for talk in conversations(episode) for message in talk):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        said = [message["content"], *(f"calls {one['name']} {one['arguments']}" for one in calls)]
        lines.append(f"{message['role']}: " + "\n".join(one for one in said if one))
    text = "\n".join(lines)
    if len(text) <= most:
        return text, False
    half = most // 2
    return f"{text[:half]}\n[cut: {len(text) - 2 * half:,} characters]\n{text[-half:]}", True


def demonstrations(trajectories: Sequence[Trajectory], group_size: int) -> Iterator[Trajectory]:
    """Second attempts that succeeded, without their reflections: sample `group_size + k` of their scenario was attempt
    k. Those with an answer that was cut off are left out: laid out anew, it would teach to stop in the middle."""
    scenarios = {one.group: one.scenario for one in trajectories}
    for one in trajectories:
        name = scenario_of(one.group)
        if not one.success or one.group != aside(scenarios[name], SECOND).id:
            continue
        reflection, *attempt = one.histories
        if any(message.finish_reason == "length" for history in attempt for message in history.messages):
            continue
        sample, text = group_size + one.sample, note(reflection)
        yield replace(
            one,
            id=f"{name}/{sample}",
            scenario=scenarios[name],
            sample=sample,
            histories=[_without(text, said) for said in conversations(replace(one, histories=attempt))],
            step_rewards=one.step_rewards[1:],
            metrics={"turns": one.metrics["turns"]},
            policy=DEMONSTRATION,
        )


def _without(text: str, messages: Messages) -> History:
    """The conversation without a note, as text."""
    found = []
    for message in messages:
        if message["role"] == "user" and message["content"].startswith(text):
            message = {**message, "content": message["content"].removeprefix(text).lstrip()}
            if not message["content"]:
                continue
        found.append(to_message(message))
    return History(found)
