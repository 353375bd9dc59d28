"""Every error that Espalier raises on purpose.

    EspalierError
    ├── SpecError (ValueError)              the configuration is wrong; lists every problem at once
    ├── ResourceError (OSError)             weights, disk space or a package are missing
    ├── ArtifactError (ValueError)          a stored artifact cannot be used
    │   ├── ArtifactDamaged                 its files do not match its manifest
    │   └── SchemaMismatch                  it was written by another schema version
    ├── BoundaryError (RuntimeError)        something outside our code failed; recorded with its boundary
    │   ├── EngineError                     generation failed
    │   │   ├── StalePolicy                 the engine holds another policy version than was asked for
    │   │   ├── ContextOverflow             prompt and answer do not fit the model's context
    │   │   ├── PromptRefused               the chat template or the tokenizer cannot express the conversation
    │   │   ├── EngineBusy                  the policy cannot change while answers are under way
    │   │   └── CallsUsedUp                 an agent's episode has no call left, or is over
    │   ├── EnvironmentFailed               an environment raised or broke its protocol
    │   │   └── EnvironmentAway             it cannot be reached for now; the episode may be played again
    │   ├── AgentError                      an agent loop raised
    │   ├── JudgeError                      a reward raised or returned something that is no score
    │   │   └── AnswerTooCostly             computing with an answer exceeded a limit of time, memory or nesting
    │   └── DeployError                     a host failed to put a model into use, or its endpoint does not answer well
    ├── TooManyFailures (RuntimeError)      more episodes failed than the collect spec allows
    ├── BudgetSpent (RuntimeError)          judging would cost more than the experiment allows; what was judged is kept
    ├── TrainingDiverged (ArithmeticError)  NaN, infinity or a KL blow-up; no checkpoint was written
    ├── GuardStruck (RuntimeError)          a guard of the flow ended the run; what was finished is kept
    └── WaitTimeout (TimeoutError)          a wait ran out; says what was awaited and for how long

A user's mistake (SpecError, ResourceError) is shown as its message, without a stack trace. All errors survive
pickling: they cross process borders under Prefect.
"""

from __future__ import annotations

from dataclasses import dataclass


class EspalierError(Exception):
    """Root of the tree."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration."""

    path: str
    """Key path, as a user would type it on the command line: `algorithm.learning_rate`."""
    message: str
    """What is wrong, with the value, and what was expected."""
    nearest: str | None = None
    """The valid name that is closest to what was written, where there is one."""

    def __str__(self) -> str:
        hint = f". Did you mean '{self.nearest}'?" if self.nearest else ""
        return f"{self.path}: {self.message.rstrip('.')}{hint}"


class SpecError(EspalierError, ValueError):
    """The configuration is wrong. `problems` holds every mistake that was found."""

    def __init__(self, problems: tuple[Problem, ...] | list[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        return "\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)])


class ResourceError(EspalierError, OSError):
    """Something that the run needs is not there; the message says what to do."""


class ArtifactError(EspalierError, ValueError):
    """A stored artifact cannot be used."""


class ArtifactDamaged(ArtifactError):
    """The files of an artifact do not match its manifest."""


class SchemaMismatch(ArtifactError):
    """An artifact was written by another version of its schema."""


class BoundaryError(EspalierError, RuntimeError):
    """A failure outside our own code. `boundary` names where: engine, environment, agent, judge or
    deployment."""

    boundary = "unknown"


class EngineError(BoundaryError):
    """Generation failed."""

    boundary = "engine"


class StalePolicy(EngineError):
    """The engine holds another policy version than the request asked for."""


class ContextOverflow(EngineError):
    """Prompt and answer do not fit the model's context."""


class PromptRefused(EngineError):
    """The chat template or the tokenizer cannot express the conversation."""


class EngineBusy(EngineError):
    """The policy cannot change while answers are under way."""


class CallsUsedUp(EngineError):
    """An agent's episode has no call left, or is over."""


class EnvironmentFailed(BoundaryError):
    """An environment raised or broke its protocol."""

    boundary = "environment"


class EnvironmentAway(EnvironmentFailed):
    """An environment cannot be reached for now, and not for what the agent did: the episode may be played again, from
    its start. An environment may raise it itself."""


class AgentError(BoundaryError):
    """An agent loop raised."""

    boundary = "agent"


class JudgeError(BoundaryError):
    """A reward raised, or returned something that is no score."""

    boundary = "judge"


class AnswerTooCostly(JudgeError):
    """Computing with an answer exceeded a limit of time, memory or nesting. The answer is the cause, so rules that
    compare it score 0: unscored, it could evade a bad score."""


class DeployError(BoundaryError):
    """A host failed to put a model into use, or its endpoint does not answer as the policy does."""

    boundary = "deployment"


class TooManyFailures(EspalierError, RuntimeError):
    """More episodes failed than the collect spec allows."""


class BudgetSpent(EspalierError, RuntimeError):
    """Judging would cost more than `judge.budget`; the message says what is kept and how to go on."""


class TrainingDiverged(EspalierError, ArithmeticError):
    """Loss, gradient or KL left the range in which training makes sense; no checkpoint was written."""


class GuardStruck(EspalierError, RuntimeError):
    """A guard of the flow ended the run; the message says what it found and what to do."""


class WaitTimeout(EspalierError, TimeoutError):
    """A wait ran out; the message says what was awaited and for how long."""
