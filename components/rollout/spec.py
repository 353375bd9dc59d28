"""Configuration of rollouts: the agent loop and the collection of episodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from components.inference.protocol import Sampling
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import TeacherSpec
from components.rollout.formats import MAX_OBSERVATION, Name, Presentation
from components.sandbox import Limits
from components.specs import FieldError, Spec, Target
from components.specs.marks import CODE

RUNTIME_ARGUMENTS = ("scenario", "client", "base_url", "api_key", "model", "environment")
"""Parameters that a custom agent function may declare; the collector passes them at run time (`own_agent`)."""


class OwnAgentTarget(Target):
    """Import path of a custom agent function, with its configured arguments."""

    called_with = RUNTIME_ARGUMENTS


class RolesSpec(Spec):
    """Two roles of the policy, both trained: a planner that states sub-goals and the final answer, and a worker that
    acts."""

    planner: str = Field(
        "You plan, and a worker acts for you. State the worker's next sub-goal in one sentence: the worker knows only "
        "what you write. You then receive its report. When the task is done, write Answer: followed by the answer for "
        "the user.",
        min_length=1,
    )
    """System prompt of the planner. The worker's tools and the environment's instructions follow it."""
    worker: str = Field(
        "Carry out the instruction with your tools. When it is done, or cannot be done, report the result without "
        "calling a tool.",
        min_length=1,
    )
    """System prompt of each worker. The environment's instructions follow it."""
    worker_turns: int = Field(4, ge=1)
    """Maximum number of worker messages per sub-goal."""


class CodeSpec(Spec):
    """Resource limits of a code block that the agent writes."""

    seconds: float = Field(10.0, ge=0.1, le=600)
    """Time limit in seconds, including the earlier blocks, which are re-executed. Time spent waiting for tools does not
    count."""
    memory_mb: int = Field(256, ge=32)
    """Memory limit in MB."""
    calls: int = Field(32, ge=1)
    """Maximum number of tool calls per block. One call more terminates the block."""
    output: int = Field(4000, ge=100)
    """Maximum number of bytes shown of a block's output and errors. The middle of longer output is cut."""

    def limits(self) -> Limits:
        """Return these limits in the sandbox's form."""
        return Limits(
            seconds=self.seconds,
            cpu_seconds=int(self.seconds) + 1,
            memory_mb=self.memory_mb,
            processes=16,
            disk_mb=16,
            output_bytes=self.output,
            calls=self.calls,
        )


class AgentSpec(Spec):
    """The agent loop: one assistant message per turn."""

    format: Name = "native"
    """Action format. `native`: the message's tool calls. `react`: Thought and Action as text (arXiv:2210.03629), with
    the tools in the system message. `chat`: the message text is the action, for text environments. `code`: a Python
    block in which the tools are functions (arXiv:2402.01030), executed in the sandbox."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of assistant messages per episode. The episode is truncated there."""
    max_tokens: int = Field(128, ge=1)
    """Maximum number of sampled tokens per message."""
    function: Annotated[OwnAgentTarget | None, CODE] = None
    """Custom agent function that replaces the loop, as `my_package.agents.mine` or with arguments. `max_turns` then
    limits its number of calls. Its package must be in `allow`."""
    roles: RolesSpec | None = None
    """`{worker_turns: 4, ...}`: a planner and workers play the episode; `max_turns` limits the total number of their
    messages. null: a single agent plays it."""
    max_observation: int = Field(MAX_OBSERVATION, ge=100)
    """Maximum number of characters per environment message. Truncation is marked in the text and counted
    (`cut_observations`)."""
    code: CodeSpec | None = None
    """Resource limits of a block of `format=code`: `{seconds: 10, memory_mb: 256, calls: 32, output: 4000}`. They are
    time in seconds (including the earlier blocks, which are re-executed), memory in MB, tool calls, and bytes of output
    shown. null for other formats; with `code`, null means these defaults."""

    @field_validator("function", mode="before")
    @classmethod
    def _expand_path(cls, value: Any) -> Any:
        return {"_target_": value} if isinstance(value, str) else value

    def limits(self) -> Limits | None:
        """Return the sandbox limits of `format=code`; None for other formats."""
        return (self.code or CodeSpec()).limits() if self.format == "code" else None

    def presentation(self) -> Presentation:
        """Return the presentation of an environment to the agent."""
        return Presentation(self.format, self.max_observation, self.limits())

    def shown_part(self) -> dict[str, Any]:
        """Return the settings that determine how an episode is presented to the agent, for stage keys."""
        part: dict[str, Any] = {"format": self.format, "max_observation": self.max_observation}
        if self.roles is not None:
            part["roles"] = self.roles.model_dump(mode="json")
        return part | ({"code": (self.code or CodeSpec()).model_dump()} if self.format == "code" else {})

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys."""
        data: dict[str, Any] = {"max_turns": self.max_turns, "max_tokens": self.max_tokens}
        if self.function is not None:
            return data | {"function": self.function.resolved()}
        return data | self.shown_part()


class ReflectionSpec(Spec):
    """Reflection on an unsuccessful episode, followed by a second attempt with the reflection in the prompt."""

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


class CollectTeacherSpec(Spec):
    """A stronger model that plays scenarios that the policy failed. Its episodes join the policy's group, for sft,
    distill and preference algorithms. The model runs locally or on a server."""

    model: TeacherSpec | None = None
    """Teacher model for `inference.name: embedded`; null for a server, whose model `inference.model` names."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the teacher, as `inference`. A server needs no `tokens`: its text is tokenized with the tokenizer of
    model."""
    samples: int = Field(1, ge=1, le=10_000)
    """Number of policy episodes per scenario that a teacher episode follows."""
    only_failed: bool = True
    """The teacher follows unsuccessful episodes only."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature of the teacher, as collect.temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling of the teacher, as collect.top_p."""

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys."""
        data = self.model_dump(mode="json", exclude={"model", "inference"})
        return data | {"model": self.model.key_part() if self.model else None, **self.inference.key_part()}


class PartialSpec(Spec):
    """Share of a round in an episode. An episode that exceeds it is paused, and continues in a later round with the
    policy of that round."""

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


class EpisodeLimits(Spec):
    """Limits of a collection of episodes: concurrency, time, retries and failures."""

    concurrency: int = Field(64, ge=1)
    """Maximum number of concurrent episodes. The engine batches their requests."""
    environments: int | None = Field(None, ge=1)
    """Maximum number of concurrent environment instances; further episodes wait. None: one per episode, or the
    environment's own limit (`instances`)."""
    max_failures: float = Field(0.1, ge=0)
    """Failures allowed: below 1 a share of the episodes, from 1 an absolute number. More failures end the stage with an
    error. Cancelled episodes do not count."""
    timeout: float = Field(600.0, gt=0)
    """Time limit of an episode in seconds. An episode that times out has failed."""
    step_timeout: float | None = Field(None, gt=0)
    """Time limit in seconds of one environment step or reset. An episode that exceeds it has failed. A custom agent
    calls its environment itself, so only `timeout` applies to it. None: no limit but `timeout`."""
    retries: int = Field(2, ge=0)
    """Retries, with the same seed, of an episode whose environment was unreachable: connection refused or broken, HTTP
    429, 502, 503 or 504. Other failures are not retried."""


PATIENCE = set(EpisodeLimits.model_fields) - {"max_failures"}
"""Concurrency and timeout keys of collect and evaluate. Stage keys exclude them."""


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
    """`{turns: 4, tokens: null}`: long episodes are paused, and continue in a later round with its policy. Their group
    is trained on when all of its episodes have ended. null: each episode is played to its end by one policy."""

    @property
    def continues_after(self) -> int:
        """Number of rounds after which a paused episode continues: its collection must have ended."""
        return max(1, self.overlap)

    def staleness(self, max_turns: int) -> int:
        """Return the largest number of versions between the policy that sampled a token and the one that is trained on
        it."""
        parts = self.partial.rounds(max_turns) if self.partial else 1
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

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the sampling parameters of sample 0. max_tokens: maximum number of tokens per message."""
        return Sampling(self.temperature, self.top_p, self.top_k, max_tokens, self.min_p)

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys. Optional ways of playing appear only if set."""
        data = self.model_dump(mode="json", exclude=PATIENCE | {"refills", "overlap"})
        data["teacher"] = self.teacher.key_part() if self.teacher else None
        defaults = CollectSpec().model_dump(mode="json")
        return {name: value for name, value in data.items() if name not in WAYS or value != defaults[name]}


WAYS = ("temperature_step", "reflection", "continuations", "opponent", "teacher", "partial")
"""Keys of CollectSpec that change how an episode is played; by default the policy alone plays it once. Stage keys omit
default values."""
