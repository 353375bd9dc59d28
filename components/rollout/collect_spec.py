"""Configuration of the collection of episodes, and the player that it selects."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from components.inference.protocol import Sampling
from components.rollout.players.continuation import ContinuationSpec
from components.rollout.players.partial import PartialSpec
from components.rollout.players.player import PlayerSpec
from components.rollout.players.reflection import ReflectionSpec
from components.rollout.players.selfplay import SelfPlaySpec
from components.rollout.players.teacher import CollectTeacherSpec
from components.rollout.spec import PATIENCE, EpisodeLimits


class CollectSpec(EpisodeLimits):
    """Collection of episodes: number, sampling, players and limits."""

    scenarios: int = Field(8, ge=1)
    """Scenarios per round, drawn from the train split without replacement until it is exhausted, then drawn again."""
    group_size: int = Field(6, ge=1, le=10_000)
    """Episodes per scenario."""
    refills: int = Field(0, ge=0)
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): maximum number of refills per round. A refill plays, judges
    and filters as many other scenarios as the filter removed from the round."""
    overlap: int = Field(0, ge=0)
    """K: up to K later rounds are collected, judged and filtered while a round trains, each in a worker process of its
    own. Round r is collected with the policy after round r - 1 - K, or with that at the start of the rounds, so its
    episodes are min(r - 1, K) versions old when they are trained on. 0: rounds run after training, with the newest
    policy."""
    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 means greedy decoding."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the smallest token set to sample from; 1 means all tokens."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 means no limit."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Minimum probability of a sampled token, as a share of the most likely token's probability."""
    temperature_step: float = Field(0.0, ge=0)
    """Temperature increment per sample: sample k of a scenario (from 0) uses temperature + k · temperature_step.
    Training uses the distribution that each sample was drawn from."""
    reflection: ReflectionSpec | None = None
    """`{max_tokens: 128, ...}`: the policy reflects on an unsuccessful episode and makes a second attempt. null: no
    second attempt."""
    continuations: int = Field(0, ge=0)
    """Monte Carlo continuations per step: the share of successful continuations is the step's label (metrics
    `continued/0`, `continued/1`, …), which `reward=continued` turns into a step reward. 0: none."""
    opponent: Literal["environment", "policy", "base"] = "environment"
    """Opponent in a two-player game. `environment`: the environment, as in evaluations. `policy`: the policy itself;
    both sides are training episodes. `base`: the model before any training; its side is no training episode."""
    teacher: CollectTeacherSpec | None = None
    """`{model: {name: NAME}, ...}`: another model plays the scenarios that the policy failed. null: no teacher."""

    partial: PartialSpec | None = None
    """`{turns: 4}` or `{groups: 2, rounds: 3}`: long episodes are paused, and continue in a later round with its
    policy. Their group is trained on when all of its episodes have ended. null: each episode is played to its end by
    one policy."""

    def players(self) -> list[PlayerSpec]:
        """Return the settings of the players whose keys are set. `checks.playing` refuses more than one."""
        declared: list[PlayerSpec | None] = [
            self.partial,
            self.reflection,
            ContinuationSpec(count=self.continuations) if self.continuations else None,
            self.teacher,
            SelfPlaySpec(opponent=self.opponent) if self.opponent != "environment" else None,
        ]
        return [player for player in declared if player is not None]

    @property
    def player(self) -> PlayerSpec:
        """Settings of the player of an episode; by default a single attempt."""
        return next(iter(self.players()), PlayerSpec())

    @property
    def continues_after(self) -> int:
        """Number of rounds after which a paused episode continues: its collection must have ended."""
        return max(1, self.overlap)

    def staleness(self, max_turns: int) -> int:
        """Return the largest number of versions between the policy that sampled a token and the one that is trained on
        it."""
        parts = self.partial.parts(max_turns) if self.partial else 1
        return self.overlap + (parts - 1) * self.continues_after

    def excess_overlap(self, rounds: int) -> str | None:
        """Return a message if `overlap` exceeds the number of rounds that can be collected ahead; None if it does not.

        rounds: rounds of the run. It is no error, because a sweep or a shortened run often changes only `rounds`."""
        most = max(0, rounds - 1)
        if self.overlap <= most:
            return None
        return (
            f"collect.overlap={self.overlap}: with rounds={rounds} at most {most} rounds can be collected ahead, all "
            f"with the policy at the start of the rounds; expected at most {most}"
        )

    def off_policy_reason(self, rounds: int) -> str | None:
        """Return the reason why rounds train on episodes of earlier policies; None if they do not.

        rounds: rounds of the run, which limit the age of episodes to `rounds - 1` versions. Otherwise the reason does
        not depend on them, so that a run that is extended keeps its correction, and with it its stage keys."""
        if self.partial is not None:
            return "with collect.partial episodes continue on the policies of later rounds"
        if not self.overlap:
            return None
        oldest = min(self.overlap, max(0, rounds - 1))
        if not oldest:
            return f"collect.overlap={self.overlap} collects rounds ahead, although with rounds={rounds} there is none"
        age = "1 version" if oldest == 1 else f"up to {oldest} versions"
        return (
            f"with collect.overlap={self.overlap} rounds are collected with a policy {age} behind the one in training"
        )

    def sampling(self, max_tokens: int, max_thinking_tokens: int | None) -> Sampling:
        """Return the sampling parameters of sample 0. max_tokens: maximum number of tokens per message.
        max_thinking_tokens: as in `Sampling`."""
        return Sampling(self.temperature, self.top_p, self.top_k, max_tokens, self.min_p, max_thinking_tokens)

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys. Optional ways of playing appear only if set."""
        data = self.model_dump(mode="json", exclude=PATIENCE | {"refills", "overlap"})
        data["teacher"] = self.teacher.key_part() if self.teacher else None
        defaults = CollectSpec().model_dump(mode="json")
        return {name: value for name, value in data.items() if name not in WAYS or value != defaults[name]}


WAYS = ("temperature_step", "reflection", "continuations", "opponent", "teacher", "partial")
"""Keys of CollectSpec that change how an episode is played; by default the policy alone plays it once. Stage keys omit
default values."""
