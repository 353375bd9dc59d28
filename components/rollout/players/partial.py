"""Partial rollouts: a long episode is paused at the end of its share of a round, and continues in a later round with
the policy of that round (interruptible rollouts of AReaL, arXiv:2505.24298, where an update interrupts at any token).

The rule is deterministic: an episode is paused after the turn in which it reaches the limit of messages or of sampled
tokens of one round. Where an episode is cut then depends on the episode alone, and not on the speed of the machine, so
a collection has the same bytes whenever it is repeated.

To continue, the environment is reset and the recorded responses are played again through the agent loop, which restores
conversation, environment and counts; the recorded tokens and log-probabilities stay as they were sampled. The protocol
requires equal observations; otherwise a SpecError names the environment. The trajectory states the policy version of
each of its turns (`components.trajectories.versions`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from components.environments.protocol import Environment
from components.errors import Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest, Engine
from components.rollout.agent import AgentLoop, Episode
from components.rollout.players.player import Agent, Player, PlayerSpec, PlaySetup
from components.rollout.request import EpisodeRequest
from components.rollout.usage import REASONING_TOKENS
from components.specs import FieldError
from components.trajectories.convert import to_message, to_openai
from components.trajectories.groups import begun_scenario
from components.trajectories.schema import Message, Trajectory
from components.trajectories.versions import PAUSED, POLICIES, PolicyTurns, versions_of, with_versions

Recall = Callable[[ChatRequest, dict[str, Any], list[int]], None]
"""Function that makes an engine continue a conversation from exact tokens: the request, its response, and the tokens of
the conversation up to the end of the response."""


class PartialSpec(PlayerSpec):
    """Share of a round in an episode. An episode that exceeds it is paused, and continues in a later round with the
    policy of that round."""

    key: ClassVar[str] = "partial"
    whole_collection: ClassVar[str | None] = (
        "pauses episodes (collect.partial), and continues them in another collection as a whole"
    )

    turns: int | None = Field(None, ge=1)
    """Number of assistant messages in one round, after which an episode is paused. null is no limit."""
    tokens: int | None = Field(None, ge=1)
    """Number of sampled tokens in one round: an episode is paused after the message in which it reaches it. null is no
    limit."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.turns is None and self.tokens is None:
            raise FieldError("turns", "null, as is tokens, so no episode is paused; expected a number for one of them")
        return self

    def reached(self, turns: int, tokens: int) -> bool:
        """Return True if an episode with this many messages and sampled tokens in a round is paused."""
        limits = ((self.turns, turns), (self.tokens, tokens))
        return any(limit is not None and count >= limit for limit, count in limits)

    def rounds(self, max_turns: int) -> int:
        """Return the largest number of rounds that play a part of an episode."""
        return max_turns if self.turns is None else -(-max_turns // self.turns)

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        if self.turns is not None and self.turns >= setup.agent.max_turns:
            yield self.problem(
                f"{self.turns}: no episode has more than agent.max_turns={setup.agent.max_turns} messages, so none is "
                "paused; expected less, or collect.partial=null",
                "turns",
            )
        if setup.refills:
            yield Problem("collect.refills", _WHOLE)
        for name in ("function", "roles"):
            if getattr(setup.agent, name) is not None:
                yield Problem(
                    f"agent.{name}",
                    "collect.partial pauses the agent loop of a single agent; expected null for one of them",
                )

    def excluded(self, other: PlayerSpec) -> Problem:
        return other.problem(_WHOLE)

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        assert isinstance(agent, AgentLoop)
        return PartialPlayer(agent, self, getattr(engine, "recall", None))


class PartialPlayer(Player):
    """Player of the part of an episode that belongs to one round. recall: of the engine; None for an engine that reads
    text."""

    agent: AgentLoop

    def __init__(self, agent: AgentLoop, spec: PartialSpec, recall: Recall | None = None):
        super().__init__(agent)
        self._spec = spec
        self._recall = recall

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Begin the requested episode, or continue a paused one. Return it, ended or paused again."""
        before, own = request.paused, request
        if before is not None:
            engine = _ResumedEngine(engine, before, type(environment).__name__, self._recall)
            own = replace(request, scenario=begun_scenario(request.scenario))
        episode = Episode(engine, environment, own, self.agent.presentation)
        talk, earlier = episode.talk, int(before.metrics["turns"]) if before is not None else 0
        async with episode.within():
            await episode.begin()
            while talk.turns < earlier:
                await episode.turn()
            sampled = talk.sampled
            while not (episode.ended or self._spec.reached(talk.turns - earlier, talk.sampled - sampled)):
                await episode.turn()
        trajectory = replace(episode.trajectory(), id=request.id, scenario=request.scenario)
        versions = [
            *(versions_of(before) if before is not None else []),
            PolicyTurns(engine.policy, talk.turns - earlier),
        ]
        trajectory = with_versions(trajectory, versions)
        metrics = trajectory.metrics | {POLICIES: float(len(versions_of(trajectory)))}
        if not episode.ended and trajectory.failure is None:
            metrics[PAUSED] = 1.0
        if before is not None and REASONING_TOKENS in before.metrics:  # the recorded responses have no count
            metrics[REASONING_TOKENS] = metrics.get(REASONING_TOKENS, 0.0) + before.metrics[REASONING_TOKENS]
        return [replace(trajectory, metrics=metrics)]


class _ResumedEngine:
    """Engine that first repeats the recorded responses of an episode, then samples."""

    def __init__(self, engine: Engine, episode: Trajectory, environment: str, recall: Recall | None):
        self._engine = engine
        self._episode = episode
        self._environment = environment
        self._recall = recall
        self._recorded = deque(_responses(episode))

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the next recorded response, or sample one. Raises SpecError if the conversation is not the recorded
        one."""
        if not self._recorded:
            return await self._engine.chat(request)
        conversation, completion = self._recorded.popleft()
        if [_content(to_message(message)) for message in request.messages] != conversation:
            raise SpecError([Problem("environment", _NOT_REPRODUCIBLE.format(self._environment, self._episode.id))])
        if self._recall is not None and completion.token_ids:
            self._recall(request, completion.message, completion.prompt_token_ids + completion.token_ids)
        return completion


def _responses(episode: Trajectory) -> Iterator[tuple[list[Any], ChatCompletion]]:
    """Yield each sampled response in order, with the content of the conversation before it."""
    for history in episode.histories:
        for place, message in enumerate(history.messages):
            if message.finish_reason is None:  # not sampled in this history
                continue
            start, end = message.span or (0, 0)
            yield (
                [_content(earlier) for earlier in history.messages[:place]],
                ChatCompletion(
                    message=to_openai(message),
                    finish_reason=message.finish_reason,
                    prompt_token_ids=history.token_ids[:start],
                    token_ids=history.token_ids[start:end],
                    logprobs=history.logprobs[start:end],
                    policy=episode.policy,
                    altered=not message.trained,
                ),
            )


def _content(message: Message) -> tuple[Any, ...]:
    return message.role, message.content, message.tool_calls, message.tool_call_id


_WHOLE = "needs whole episodes, which collect.partial pauses; expected it unset"
_NOT_REPRODUCIBLE = (
    "{} gave other observations when the actions of the paused episode {} were played again, so it cannot be "
    "continued; expected equal results, or collect.partial=null"
)
