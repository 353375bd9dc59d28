"""Exceptions that Espalier raises deliberately.

    EspalierError
    ├── SpecError (ValueError)              the configuration is wrong; lists every problem at once
    ├── ResourceError (OSError)             model weights, disk space or a package are missing
    ├── ArtifactError (ValueError)          a stored artifact cannot be used
    │   ├── ArtifactDamaged                 its files do not match its manifest
    │   └── SchemaMismatch                  it was written by another schema version
    ├── BoundaryError (RuntimeError)        something outside Espalier's code failed; recorded with its boundary
    │   ├── EngineError                     generation failed
    │   │   ├── StalePolicy                 the engine holds another policy version than the request names
    │   │   ├── ContextOverflow             prompt and answer do not fit the model's context
    │   │   ├── PromptRefused               the chat template or the tokenizer cannot express the conversation
    │   │   ├── EngineBusy                  the engine cannot do it now, because of the requests in flight
    │   │   └── CallLimitReached            an agent's episode has ended, or has used its model calls
    │   ├── EnvironmentFailed               an environment raised or broke its protocol
    │   │   └── EnvironmentUnavailable      the environment is unreachable; the episode may be retried
    │   ├── AgentError                      an agent loop raised
    │   ├── JudgeError                      a reward raised, or returned an invalid score
    │   │   └── AnswerTooCostly             evaluating an answer exceeded a limit of time, memory or nesting
    │   └── DeployError                     a host failed to deploy a model, or its endpoint answers wrongly
    ├── TooManyFailures (RuntimeError)      more episodes failed than the collect spec allows
    ├── BudgetExceeded (RuntimeError)       judging would exceed the judge budget; finished scores are saved
    ├── CertificateFailed (RuntimeError)    template, engine, trainer or export disagree; nothing was trained
    ├── TrainingDiverged (ArithmeticError)  NaN, infinity or a KL blow-up; no checkpoint was written
    ├── GuardTriggered (RuntimeError)       a guard of the flow ended the run; finished stages are saved
    │   └── BudgetReached                   the next stage would exceed the budget of the run
    └── WaitTimeout (TimeoutError)          a wait timed out; names the awaited event and the limit

A user's mistake (SpecError, ResourceError) is shown as its message, without a stack trace. Every error can be pickled,
because Prefect passes errors between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class EspalierError(Exception):
    """Root of the exception tree."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration."""

    path: str
    """Key path, as a user would type it on the command line: `algorithm.learning_rate`."""
    message: str
    """The mistake, with the value and what was expected."""
    nearest: str | None = None
    """Closest valid name; None if no name is similar."""

    def __str__(self) -> str:
        hint = f". Did you mean '{self.nearest}'?" if self.nearest else ""
        return f"{self.path}: {self.message.rstrip('.')}{hint}"


class SpecError(EspalierError, ValueError):
    """Invalid configuration. `problems` holds every mistake found."""

    def __init__(self, problems: tuple[Problem, ...] | list[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    @classmethod
    def at(cls, path: str, message: str, nearest: str | None = None) -> SpecError:
        """Return the error of a single mistake."""
        return cls([Problem(path, message, nearest)])

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        return "\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)])


class ResourceError(EspalierError, OSError):
    """Missing resource (model weights, disk space, a package); the message says what to do."""


class ArtifactError(EspalierError, ValueError):
    """Unusable stored artifact."""


class ArtifactDamaged(ArtifactError):
    """Mismatch between the files of an artifact and its manifest."""


class SchemaMismatch(ArtifactError):
    """Artifact written by another version of its schema."""


class BoundaryError(EspalierError, RuntimeError):
    """Failure outside Espalier's code. `boundary` names the failing part: engine, environment, agent, judge or
    deployment."""

    boundary = "unknown"


class EngineError(BoundaryError):
    """Failed generation."""

    boundary = "engine"


class StalePolicy(EngineError):
    """Engine holds another policy version than the request names."""


class ContextOverflow(EngineError):
    """Prompt and answer exceed the model's context. hint: what the owner of a run can do, besides the message for a
    client of a server."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message, hint)

    def __str__(self) -> str:
        return "".join(map(str, self.args))


class PromptRefused(EngineError):
    """Conversation that the chat template or the tokenizer cannot express."""


class EngineBusy(EngineError):
    """Request that the engine cannot serve now, because of the requests in flight: to replace the policy, or to compile
    one more form."""


class CallLimitReached(EngineError):
    """Model call of an agent whose episode has ended or has used its calls."""


class EnvironmentFailed(BoundaryError):
    """Environment that raised or broke its protocol."""

    boundary = "environment"


class EnvironmentUnavailable(EnvironmentFailed):
    """Unreachable environment, for a reason unrelated to the agent's actions. The episode may be retried from its
    start. Environments may raise it."""


class AgentError(BoundaryError):
    """Agent loop that raised."""

    boundary = "agent"


class JudgeError(BoundaryError):
    """Reward that raised or returned an invalid score."""

    boundary = "judge"


class AnswerTooCostly(JudgeError):
    """Answer whose evaluation exceeded a limit of time, memory or nesting. Rules score such an answer 0: left unscored,
    it could evade a bad score."""


class DeployError(BoundaryError):
    """Failed deployment: the host failed, or the endpoint does not answer as the policy does."""

    boundary = "deployment"


class TooManyFailures(EspalierError, RuntimeError):
    """More failed episodes than the collect spec allows."""


class BudgetExceeded(EspalierError, RuntimeError):
    """Judging cost that would exceed `judge.budget`; the message says what is saved and how to continue."""


class CertificateFailed(EspalierError, RuntimeError):
    """Certificate with a failed check. `data` holds the result of every check."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        super().__init__(data)

    def __str__(self) -> str:
        failed = [check for check in self.data["checks"] if check["status"] == "failed"]
        lines = [f"{check['name']}: {check['reason']}. {check['remedy']}".replace("..", ".") for check in failed]
        return "\n".join(
            [f"{len(failed)} of {len(self.data['checks'])} checks failed:", *(f"  - {line}" for line in lines)]
        )


class TrainingDiverged(EspalierError, ArithmeticError):
    """Loss, gradient or KL outside the valid range; no checkpoint was written."""


class GuardTriggered(EspalierError, RuntimeError):
    """Run ended by a guard of the flow; the message names the cause and the remedy."""


class BudgetReached(GuardTriggered):
    """Run ended before a stage that would exceed `budget`; the message names what is spent and what remains."""


class WaitTimeout(EspalierError, TimeoutError):
    """Timed-out wait; the message names the awaited event and the limit."""
