"""How episodes are collected."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import TeacherSpec
from components.rollout.formats import Name
from components.sandbox import Limits
from components.specs import Spec, Target

GIVEN = ("scenario", "client", "base_url", "api_key", "model", "environment")
"""What an agent of one's own may ask for (`own_agent`)."""


PATIENCE = {"concurrency", "environments", "timeout", "step_timeout", "retries"}
"""Keys of collect and evaluate that say how much at once and how patiently, and are in no stage's key."""


class OwnAgentTarget(Target):
    called_with = GIVEN


class RolesSpec(Spec):
    """A planner says sub-goals and the answer, a worker acts: two roles of the policy, both trained."""

    planner: str = Field(
        "You plan, and a worker acts for you. Say the next thing for the worker to do, in a sentence: it knows nothing "
        "but what you say. You are then told what came of it. When the task is done, say Answer: and what the user is "
        "to be told.",
        min_length=1,
    )
    """What the planner is told first; the worker's tools and the environment's own instructions follow."""
    worker: str = Field(
        "Do what you are told with your tools. When it is done, or cannot be done, say what came of it, without "
        "calling a tool.",
        min_length=1,
    )
    """What each worker is told first; the environment's own instructions follow."""
    worker_turns: int = Field(4, ge=1)
    """Most messages of a worker on one sub-goal."""


class CodeSpec(Spec):
    """What a block of code may use that the agent writes."""

    seconds: float = Field(10.0, ge=0.1, le=600)
    """Of time, with the earlier blocks, which are carried out again; waiting for tools does not count."""
    memory_mb: int = Field(256, ge=32)
    """Of memory."""
    calls: int = Field(32, ge=1)
    """Calls of tools that one block may make; with one more it is ended."""
    output: int = Field(4000, ge=100)
    """Bytes that are shown of what it prints, and of its errors; of more, the middle is cut."""

    def limits(self) -> Limits:
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
    """The agent loop: one assistant message a turn."""

    format: Name = "native"
    """How actions are written. `native`: the message's own tool calls. `react`: Thought and Action as text
    (arXiv:2210.03629), tools in the system message. `chat`: what is said is the action, for environments of text.
    `code`: a block of Python in which the tools are functions (arXiv:2402.01030), run in the sandbox."""
    max_turns: int = Field(8, ge=1)
    """Most assistant messages of one episode; then it ends as it stands."""
    max_tokens: int = Field(128, ge=1)
    """Most sampled tokens of one message."""
    function: OwnAgentTarget | None = None
    """An agent of your own in place of the loop: a function, as `my_package.agents.mine` or with arguments; `max_turns`
    is then how many calls it may make. Its package must be in `allow`."""
    roles: RolesSpec | None = None
    """`{worker_turns: 4, ...}`: the episode is played by a planner and workers; `max_turns` is of all their messages
    together. null: by one agent."""
    max_observation: int = Field(100_000, ge=100)
    """Most characters of one message of the environment; what is cut is marked and counted (`cut_observations`)."""
    code: CodeSpec | None = None
    """`{seconds: 10, memory_mb: 256, calls: 32, output: 4000}`: what a block of `format=code` may use: seconds of time
    (with the earlier blocks, which are carried out again), memory, calls of tools, and bytes of output that are shown.
    null for other formats; for `code` it means these."""

    @field_validator("function", mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        return {"_target_": value} if isinstance(value, str) else value

    def limits(self) -> Limits | None:
        """Of code; None where none is written."""
        return (self.code or CodeSpec()).limits() if self.format == "code" else None

    def shown_part(self) -> dict[str, Any]:
        """What determines how an episode is shown, for stage keys."""
        part: dict[str, Any] = {"format": self.format, "max_observation": self.max_observation}
        return part | ({"code": (self.code or CodeSpec()).model_dump()} if self.format == "code" else {})

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys."""
        data: dict[str, Any] = {"max_turns": self.max_turns, "max_tokens": self.max_tokens}
        if self.function is not None:
            return data | {"function": self.function.resolved()}
        return data | self.shown_part() | ({"roles": self.roles.model_dump(mode="json")} if self.roles else {})


class ReflectionSpec(Spec):
    """A failed episode is thought about and tried once more, with the reflection in the prompt."""

    max_tokens: int = Field(128, ge=1)
    """Most sampled tokens of a reflection."""
    prompt: str = Field(
        "You tried the task below and did not succeed. Say in a few sentences what went wrong, and what to do "
        "differently the next time.",
        min_length=1,
    )
    """What the policy is asked; the transcript of the episode follows."""
    max_transcript: int = Field(8_000, ge=100)
    """Most characters of the transcript; the middle of a longer one, or of one that does not fit the model's context,
    is cut, with a mark, and counted (`cut_transcript`)."""
    demonstrate: bool = False
    """A second attempt that succeeded is also written as a demonstration without the reflection, in the group of the
    first attempts: for sft, distill and preference algorithms."""


class CollectTeacherSpec(Spec):
    """A stronger model plays what the policy did not succeed in: its episodes stand in the group of the policy's, for
    sft, distill and preference algorithms. On this machine, or on a server."""

    model: TeacherSpec | None = None
    """The model, for `inference.name: embedded`; null for a server's, which `inference.model` names."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the teacher, as `inference`. A server needs no `tokens`: what it says is laid out in those of model."""
    samples: int = Field(1, ge=1, le=10_000)
    """Of each scenario, this many of the policy's episodes are followed by the teacher's."""
    only_failed: bool = True
    """Those without success only."""
    temperature: float = Field(0.7, ge=0)
    """As collect.temperature, for the teacher."""
    top_p: float = Field(1.0, gt=0, le=1)
    """As collect.top_p, for the teacher."""

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys."""
        data = self.model_dump(mode="json", exclude={"model", "inference"})
        return data | {"model": self.model.key_part() if self.model else None, **self.inference.key_part()}


class CollectSpec(Spec):
    scenarios: int = Field(8, ge=1)
    """Scenarios of one round, drawn without repetition from the train split until it is used up, then again."""
    group_size: int = Field(6, ge=1, le=10_000)
    """Episodes of each scenario."""
    refills: int = Field(0, ge=0)
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): where the filter left fewer scenarios than the round has, as
    many others are played, judged and filtered, at most so many times a round."""
    overlap: int = Field(0, ge=0, le=1)
    """1: while a round is trained, the next one is collected, judged and filtered, by the policy before that training,
    which is one version behind; 0: after it, by the newest policy. The first two rounds are then played by the same
    one."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Tokens are drawn from the smallest set that has this mass; 1 means all."""
    top_k: int = Field(0, ge=0)
    """0 means no limit."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Tokens with less than this share of the likeliest one's probability are not drawn."""
    temperature_step: float = Field(0.0, ge=0)
    """Sample k of a scenario, from 0, is drawn at temperature + k · temperature_step; each is trained on under the
    distribution that it was drawn from."""
    reflection: ReflectionSpec | None = None
    """`{max_tokens: 128, ...}`: episodes without success are thought about and tried once more; null tries once."""
    continuations: int = Field(0, ge=0)
    """From each step of an episode the policy plays on so many times, and the share of successes is the step's label
    (metrics `continued/0`, `continued/1`, …), which `reward=continued` makes a step reward of. 0: none."""
    opponent: Literal["environment", "policy", "base"] = "environment"
    """Who plays the other side of a game for two: the environment, as in evaluations; `policy`: the policy itself, both
    sides are episodes that are trained on; `base`: the model before any training, whose side is not."""
    teacher: CollectTeacherSpec | None = None
    """`{model: {name: NAME}, ...}`: another model plays where the policy had no success; null: none."""
    concurrency: int = Field(64, ge=1)
    """Episodes in flight at once; the engine batches their requests."""
    environments: int | None = Field(None, ge=1)
    """Most instances of the environment at once; further episodes wait for one. None: one for each episode, or as many
    as the environment says (`instances`)."""
    max_failures: float = Field(0.1, ge=0)
    """Below 1: share of the episodes that may fail; from 1: how many. More end the stage with an error. Cancelled ones
    count for nothing."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take; then it is a failed episode."""
    step_timeout: float | None = Field(None, gt=0)
    """Seconds that the environment may take for one step, or to reset; then it is a failed episode. An agent of your
    own asks its environment itself: `timeout` holds for it. None: no limit but `timeout`."""
    retries: int = Field(2, ge=0)
    """How often an episode is played again, with the same seed, whose environment was away: nobody listened, the line
    broke, HTTP 429, 502, 503 or 504. What else fails is never played again."""

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys; ways of playing that are not asked for are not in it."""
        data = self.model_dump(mode="json", exclude=PATIENCE | {"refills", "overlap"})
        data["teacher"] = self.teacher.key_part() if self.teacher else None
        plain = CollectSpec().model_dump(mode="json")
        return {name: value for name, value in data.items() if name not in WAYS or value != plain[name]}


WAYS = ("temperature_step", "reflection", "continuations", "opponent", "teacher")
"""Keys of CollectSpec for other ways of playing than each episode once, by the policy alone."""
