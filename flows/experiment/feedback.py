"""Training on human feedback before the rounds: `feedback=scores` or `feedback=choices`.

With `fork=RUN` it continues from the policy of a finished run. Answers refer to the artifacts of their episodes by
digest; these artifacts must be in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from components.algorithms.choices import FeedbackAlgorithmSpec
from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact, Store
from components.errors import Problem, ResourceError, SpecError
from components.specs import Spec
from components.specs.marks import FILES
from components.trajectories.feedback_episodes import Learns
from flows.stages import EPISODE_KINDS


class FeedbackSpec(Spec):
    """Training on human feedback about episodes, before the first round."""

    path: Annotated[str, FILES] = Field(min_length=1)
    """File of answers, or folder of such files: `ROOT/feedback`, or the output of `flows.runs annotate --export`."""
    algorithm: FeedbackAlgorithmSpec
    """Algorithm: `sft` trains on corrections, and on scored episodes weighted by their scores; dpo, ipo and orpo on
    preference pairs; kto on scored episodes, which count as good from `threshold` on (a score of 3 is 0.5)."""

    @field_validator("algorithm")
    @classmethod
    def _trains_on_feedback(cls, value: AlgorithmSpec) -> AlgorithmSpec:
        if not value.feedback_kinds:
            raise ValueError(f"an algorithm that trains on feedback; {value.name} declares no feedback_kinds")
        return value

    @property
    def learns(self) -> tuple[Learns, ...]:
        """Kinds of answers that the algorithm trains on."""
        return self.algorithm.feedback_kinds


@dataclass(frozen=True)
class FeedbackData:
    """Answers of annotators, and the artifacts of the episodes that they refer to."""

    path: str
    answers: str
    """Digest of the valid answers."""
    artifacts: dict[str, Artifact]
    """Artifacts of the episodes, by name of the stage input."""


def resolve(spec: FeedbackSpec | None, store: Store) -> FeedbackData | None:
    """Return the answers and their artifacts; None without a spec.

    Raises SpecError if the file is damaged, has no answers of a kind that the algorithm trains on, or refers to
    episodes that are not in the store."""
    from components.trajectories.feedback import Correction, PairChoice, Rating, digest_of, read_all

    if spec is None:
        return None
    path = Path(spec.path).expanduser().absolute()
    try:
        answers = read_all(path)
    except ResourceError as error:
        raise _problem(str(error)) from None
    kinds = {"scores": Rating, "corrections": Correction, "choices": PairChoice}
    if not any(isinstance(answer, kinds[name]) for answer in answers for name in spec.learns):
        raise _problem(f"{path} has no {' and no '.join(spec.learns)}, which {spec.algorithm.name} trains on")
    by_digest: dict[str, Artifact] = {}
    for artifact in store.manifests():
        if artifact.kind in EPISODE_KINDS:
            same = by_digest.get(artifact.digest, artifact)
            by_digest[artifact.digest] = min(artifact, same, key=lambda manifest: manifest.key)
    artifacts = {}
    for number, digest in enumerate(sorted({answer.artifact for answer in answers}), 1):
        source = store.find(by_digest[digest].key) if digest in by_digest else None
        if source is None:
            count = sum(answer.artifact == digest for answer in answers)
            raise _problem(
                f"{count} answers in {path} refer to episodes of the artifact {digest[:12]}, which is not in "
                f"{store.root}: set root to that of the annotated run, or run it again"
            )
        artifacts[f"episodes_{number}"] = source
    return FeedbackData(str(path), digest_of(answers), artifacts)


def _problem(message: str) -> SpecError:
    return SpecError([Problem("feedback.path", message)])
