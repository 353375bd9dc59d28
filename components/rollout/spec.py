"""Configuration of the agent, and limits of its episodes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from components.rollout.formats import MAX_OBSERVATION, Name, Presentation
from components.sandbox import Limits
from components.specs import Spec, Target
from components.specs.marks import CODE, PROGRAM

RUNTIME_ARGUMENTS = ("scenario", "sample", "client", "base_url", "api_key", "model", "environment")
"""Parameters that a custom agent function may declare; the collector passes them at run time (`own_agent`)."""


class OwnAgentTarget(Target):
    """Import path of a custom agent function, with its configured arguments."""

    called_with = RUNTIME_ARGUMENTS

    @property
    def label(self) -> str:
        """Name in messages: the dotted path, or of a program's rollout (`components.rollout.program.play`) its
        function."""
        return str(self.arguments["name"]) if self.target == "components.rollout.program.play" else self.target


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
    max_thinking_tokens: int | None = Field(None, ge=1)
    """Number of tokens after which unfinished reasoning of a message is ended: the engine adds its end, which is not
    trained on, and the policy goes on with its answer. null: only `max_tokens` ends it. Needs
    `inference.name=embedded`."""
    function: Annotated[OwnAgentTarget | None, CODE] = None
    """Custom agent function that replaces the loop, as `my_package.agents.mine` or with arguments. `max_turns` then
    limits its number of calls. Its package must be in `allow`."""
    command: Annotated[list[str] | None, PROGRAM] = Field(None, min_length=1)
    """Program and arguments that replace the loop, such as a coding agent, with `{instruction}` in place of the task's
    messages, `{model}` of the model's name and `{base_url}` of the endpoint's address: `[mini, -t, "{instruction}"]`.
    It runs in the sandbox, and its output is its answer. `max_turns` limits its number of calls."""
    roles: RolesSpec | None = None
    """`{worker_turns: 4, ...}`: a planner and workers play the episode; `max_turns` limits the total number of their
    messages. null: a single agent plays it."""
    by_environment: bool = False
    """True: the agent that plays an environment of a mixture has its name, so that `model.lora.roles` can give each
    environment an adapter of its own."""
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

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `by_environment=false`, so that it does not change stage keys."""
        data: dict[str, Any] = serialize(self)
        return data if self.by_environment else {k: v for k, v in data.items() if k != "by_environment"}

    @property
    def own(self) -> str | None:
        """Key whose agent replaces the loop; None if the loop acts."""
        if self.function is not None:
            return "agent.function"
        return None if self.command is None else "agent.command"

    def limits(self) -> Limits | None:
        """Return the sandbox limits of `format=code`; None for other formats."""
        return (self.code or CodeSpec()).limits() if self.format == "code" else None

    def presentation(self) -> Presentation:
        """Return the presentation of an environment to the agent."""
        return Presentation(self.format, self.max_observation, self.limits(), self.by_environment)

    def shown_part(self) -> dict[str, Any]:
        """Return the settings that determine how an episode is presented to the agent, for stage keys."""
        part: dict[str, Any] = {"format": self.format, "max_observation": self.max_observation}
        if self.roles is not None:
            part["roles"] = self.roles.model_dump(mode="json")
        if self.by_environment:
            part["by_environment"] = True
        return part | ({"code": (self.code or CodeSpec()).model_dump()} if self.format == "code" else {})

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys."""
        data: dict[str, Any] = {"max_turns": self.max_turns, "max_tokens": self.max_tokens}
        if self.max_thinking_tokens is not None:
            data["max_thinking_tokens"] = self.max_thinking_tokens
        if self.function is not None:
            return data | {"function": self.function.resolved()}
        if self.command is not None:
            return data | {"command": self.command}
        return data | self.shown_part()


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
