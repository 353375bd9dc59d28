"""Partial rollouts: a long episode is paused, and continues in a later round with the policy of that round, so a round
does not wait for its longest episodes (Kimi k1.5, arXiv:2501.12599, section 2.6.2).

There are two rules. By `turns` or `tokens`, an episode is paused after the turn in which it reaches the limit of
messages or of sampled tokens of one round. Where it is cut then depends on the episode alone, and not on the speed of
the machine, so a collection has the same bytes whenever it is repeated. By `groups`, a collection ends as soon as all
groups but so many have ended, and their episodes are paused at once, also within a message (as in AReaL,
arXiv:2505.24298). Time decides where they are cut, so the artifact records what was played; a repetition may differ.

To continue, the environment is reset and the recorded responses are played again through the agent loop, which restores
conversation, environment and counts; the recorded tokens and log-probabilities stay as they were sampled, and a message
that was interrupted is completed from its tokens. The protocol requires equal observations; otherwise a SpecError names
the environment. The trajectory states the policy version of each of its tokens (`components.trajectories.versions`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

from components.environments.protocol import Environment
from components.errors import EngineError, Problem
from components.inference.protocol import ChatCompletion, ChatRequest, Engine, Increment, ResponseStart
from components.rollout.agent import AgentLoop, Conversation, Episode
from components.rollout.players.player import Agent, Player, PlayerSpec, PlaySetup
from components.rollout.recorded import Recall, RecordedEngine, recorded_responses
from components.rollout.request import EpisodeRequest
from components.rollout.usage import REASONING_TOKENS
from components.specs import FieldError
from components.trajectories.groups import begun_scenario
from components.trajectories.schema import History, Trajectory
from components.trajectories.versions import PAUSED, POLICIES, PolicyTokens, versions_of, with_versions

logger = logging.getLogger(__name__)


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
    groups: int | None = Field(None, ge=1)
    """Number of groups that a collection may leave in progress: it ends as soon as all others have ended, and their
    episodes are paused, also within a message. null waits for all."""
    rounds: int | None = Field(None, ge=2)
    """With `groups`: largest number of rounds that play an episode, which bounds the age of its tokens. A collection
    waits for the groups for which it is the last one."""

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        limits = {name: getattr(self, name) for name in ("turns", "tokens") if getattr(self, name) is not None}
        if self.groups is None:
            if not limits:
                text = "null, as are tokens and groups, so no episode is paused; expected a number for one of them"
                raise FieldError("turns", text)
            if self.rounds is not None:
                raise FieldError("rounds", f"{self.rounds}: bounds an episode that groups pauses; expected null")
            return self
        for name, limit in limits.items():
            raise FieldError(name, f"{limit}: groups={self.groups} decides when an episode is paused; expected null")
        if self.rounds is None:
            text = "null, but time decides how many rounds an episode takes with groups; expected a number from 2"
            raise FieldError("rounds", text)
        return self

    def reached(self, turns: int, tokens: int) -> bool:
        """Return True if an episode with this many messages and sampled tokens in a round is paused."""
        limits = ((self.turns, turns), (self.tokens, tokens))
        return any(limit is not None and count >= limit for limit, count in limits)

    def parts(self, max_turns: int) -> int:
        """Return the largest number of rounds that play a part of an episode."""
        if self.rounds is not None:
            return self.rounds
        return max_turns if self.turns is None else -(-max_turns // self.turns)

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        if self.turns is not None and self.turns >= setup.agent.max_turns:
            yield self.problem(
                f"{self.turns}: no episode has more than agent.max_turns={setup.agent.max_turns} messages, so none is "
                "paused; expected less, or collect.partial=null",
                "turns",
            )
        if self.groups is not None and self.groups >= setup.scenarios:
            text = f"a round of collect.scenarios={setup.scenarios} would end before its first group; expected less"
            yield self.problem(f"{self.groups}: {text}", "groups")
        if self.groups is not None and (most := setup.agent.max_thinking_tokens) is not None:
            text = "the reasoning of a response that collect.partial.groups interrupts cannot be ended; expected null"
            yield Problem("agent.max_thinking_tokens", f"{most}: {text}")
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
        self._members: defaultdict[str, set[str]] = defaultdict(set)
        """Episodes in progress by group."""
        self._last: set[str] = set()
        """Groups of which no episode is paused again."""
        self._pause = asyncio.Event()
        """Set when the episodes in progress are paused."""

    def begin(self, requests: Sequence[EpisodeRequest], finished: Mapping[str, Trajectory]) -> None:
        if self._spec.groups is None:
            return
        for request in requests:
            self._members[request.scenario.id].add(request.id)
            if request.paused is not None and _rounds_paused(request) + 1 == self._spec.rounds:
                self._last.add(request.scenario.id)
        for request in requests:
            if (trajectory := finished.get(request.id)) is not None:
                self.record(trajectory)

    def record(self, trajectory: Trajectory) -> None:
        """Pause the episodes in progress if few enough groups are, and none of them has to end in this round."""
        if self._spec.groups is None:
            return
        members = self._members[trajectory.group]
        if PAUSED not in trajectory.metrics:
            members.discard(trajectory.id)
        if not members:
            del self._members[trajectory.group]
        if len(self._members) <= self._spec.groups and self._last.isdisjoint(self._members):
            self._pause.set()

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Begin the requested episode, or continue a paused one. Return it, ended or paused again."""
        before, own = request.paused, request
        if self._pause.is_set():
            return [_not_played(engine.policy, request)]
        if self._spec.groups is not None:
            engine = InterruptibleEngine(engine, self._pause)
        recorded = list(recorded_responses(before)) if before is not None else []
        if before is not None:
            name, remedy = type(environment).__name__, "equal results, or collect.partial=null"
            engine = RecordedEngine(engine, request.id, recorded, name, self._recall, remedy)
            own = replace(request, scenario=begun_scenario(request.scenario))
        episode = Episode(engine, environment, own, self.agent.presentation)
        talk, earlier = episode.talk, int(before.metrics["turns"]) if before is not None else 0
        sampled, interrupted = 0, False
        try:
            async with episode.within():
                await episode.begin()
                while talk.turns < earlier:
                    await episode.turn()
                sampled = talk.sampled
                while not (episode.ended or self._pauses(talk.turns - earlier, talk.sampled - sampled)):
                    await episode.turn()
        except ResponseInterrupted as interruption:
            if interrupted := interruption.start is not None:
                _record_start(talk, interruption.start)
        pauses = not episode.ended and episode.failure is None
        if pauses and talk.turns == earlier and not interrupted:
            return [_not_played(engine.policy, request)]
        if recorded and recorded[-1][1].finish_reason == PAUSED:
            sampled += len(recorded[-1][1].token_ids)
        trajectory = replace(episode.trajectory(), id=request.id, scenario=request.scenario)
        versions = [
            *(versions_of(before) if before is not None else []),
            PolicyTokens(engine.policy, max(0, talk.sampled - sampled)),
        ]
        trajectory = with_versions(trajectory, versions)
        metrics = trajectory.metrics | {POLICIES: float(len(versions_of(trajectory)))}
        if pauses:
            metrics[PAUSED] = _rounds_paused(request) + 1.0
        if before is not None and REASONING_TOKENS in before.metrics:  # the recorded responses have no count
            metrics[REASONING_TOKENS] = metrics.get(REASONING_TOKENS, 0.0) + before.metrics[REASONING_TOKENS]
        return [replace(trajectory, metrics=metrics)]

    def _pauses(self, turns: int, tokens: int) -> bool:
        return self._pause.is_set() or self._spec.reached(turns, tokens)


def _record_start(talk: Conversation, start: ResponseStart) -> None:
    """Record the first tokens of a response whose sampling was interrupted, as a message without text."""
    message = {"role": "assistant", "content": ""}
    tokens = start.prompt_token_ids, start.token_ids, start.logprobs
    talk.recorder.record(talk.messages, ChatCompletion(message, PAUSED, *tokens, talk.policy))
    talk.sampled += len(start.token_ids)


def _rounds_paused(request: EpisodeRequest) -> float:
    return request.paused.metrics[PAUSED] if request.paused is not None else 0.0


def _not_played(policy: str, request: EpisodeRequest) -> Trajectory:
    """Return a requested episode that is paused before its first message in this round."""
    trajectory = request.paused
    if trajectory is None:
        metrics = {"turns": 0.0, "sampled_tokens": 0.0, POLICIES: 1.0}
        trajectory = replace(request.trajectory(policy), histories=[History([])], metrics=metrics)
    return replace(trajectory, metrics=trajectory.metrics | {PAUSED: _rounds_paused(request) + 1.0})


class ResponseInterrupted(BaseException):
    """Interruption of the sampling of a response. Like a cancellation, it is no failure of the engine."""

    def __init__(self, start: ResponseStart | None):
        super().__init__()
        self.start = start
        """Tokens so far; None without any."""


class InterruptibleEngine:
    """Engine whose responses are interrupted when the event `pause` is set. A response that breaks off, as that of a
    server that is restarted, is completed from its tokens."""

    def __init__(self, engine: Engine, pause: asyncio.Event):
        self._engine = engine
        self._pause = pause

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response. Raises ResponseInterrupted."""
        while True:
            start = copy.deepcopy(request.start) or ResponseStart([], [], [])
            begun = len(start.token_ids)
            try:
                return await self._sampled(request, start)
            except EngineError as error:
                if len(start.token_ids) == begun:
                    raise
                logger.info("a response broke off after %d tokens, and is completed: %s", len(start.token_ids), error)
                request = replace(request, start=start)

    async def _sampled(self, request: ChatRequest, start: ResponseStart) -> ChatCompletion:
        """Return the response to a request. start: receives its tokens as they are sampled."""

        def listen(increment: Increment) -> None:
            if not start.prompt_token_ids:
                start.prompt_token_ids.extend(increment.prompt_token_ids)
            start.token_ids.extend(increment.token_ids)
            start.logprobs.extend(increment.logprobs)

        response = asyncio.ensure_future(self._engine.chat(replace(request, listener=listen)))
        pause = asyncio.ensure_future(self._pause.wait())
        try:
            await asyncio.wait((response, pause), return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                return response.result()
            raise ResponseInterrupted(start if start.token_ids else None)
        finally:
            for task in (response, pause):
                task.cancel()
            await asyncio.gather(response, pause, return_exceptions=True)


_WHOLE = "needs whole episodes, which collect.partial pauses; expected it unset"
