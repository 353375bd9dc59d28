"""Training on human feedback before the rounds: `feedback=answers`.

A file may hold scores, corrections and choices. One training learns from the scores and corrections, the next one from
the choices; a training without answers is left out. With `fork=RUN` they continue from the policy of a finished run.
Answers refer to the artifacts of their episodes by digest; these artifacts must be in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationInfo, field_validator

from components.algorithms.choices import FeedbackAlgorithmSpec
from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact, Store
from components.errors import Problem, ResourceError, SpecError
from components.specs import Spec
from components.specs.marks import FILES
from flows.stages import EPISODE_KINDS
from flows.stages.feedback import FeedbackStage

if TYPE_CHECKING:
    from components.trajectories.feedback import Answer

LEARNED: dict[str, tuple[str, ...]] = {"scores": ("scores", "corrections"), "choices": ("choices",)}
"""Kinds of answers by the key of the training that learns from them, in the order of the trainings."""


class FeedbackSpec(Spec):
    """Training on human feedback about episodes, before the first round: on scores and corrections, then on choices. A
    training that the file has no answers for is left out."""

    path: Annotated[str, FILES] = Field(min_length=1)
    """File of answers, or folder of such files: `ROOT/feedback`, or the output of `flows.runs annotate --export`."""
    scores: FeedbackAlgorithmSpec | None = None
    """Algorithm for scores and corrections: `sft` trains on corrections, and on scored episodes weighted by their
    scores; kto on scored episodes alone, which count as good from `threshold` on (a score of 3 is 0.5). null: none."""
    choices: FeedbackAlgorithmSpec | None = None
    """Algorithm for choices between two episodes: dpo, ipo or orpo. null: none."""

    @field_validator("scores", "choices")
    @classmethod
    def _trains_on_feedback(cls, value: AlgorithmSpec | None, info: ValidationInfo) -> AlgorithmSpec | None:
        kinds = LEARNED[str(info.field_name)]
        if value is not None and not set(kinds) & set(value.feedback_kinds):
            raise ValueError(f"an algorithm that trains on {' or '.join(kinds)}; {value.name} does not")
        return value

    @property
    def trainings(self) -> dict[str, AlgorithmSpec]:
        """Algorithms by key, in the order of training."""
        algorithms = {"scores": self.scores, "choices": self.choices}
        return {name: algorithm for name, algorithm in algorithms.items() if algorithm is not None}


@dataclass(frozen=True)
class FeedbackTraining:
    """Training on answers of annotators."""

    name: str
    """Key of its algorithm: `scores` or `choices`."""
    algorithm: AlgorithmSpec
    stage: FeedbackStage
    """Conversion of the answers to episodes to train on."""
    artifacts: dict[str, Artifact]
    """Artifacts of the episodes, by name of the stage input."""


def resolve(spec: FeedbackSpec | None, store: Store) -> list[FeedbackTraining]:
    """Return the trainings that the file has answers for, in order; none without a spec.

    Raises SpecError if the file is damaged, if an answer refers to an episode that is not in the store or does not fit
    it, or if nothing can be trained on."""
    from components.trajectories.feedback import MOST_SHOWN, StepLabel, digest_of, numbered, standing
    from components.trajectories.feedback_episodes import mismatch, of_kinds, taught
    from components.trajectories.store import read_trajectories

    if spec is None:
        return []
    path = Path(spec.path).expanduser().absolute()
    try:
        lines = numbered(path)
    except ResourceError as error:
        raise SpecError([_problem(str(error))]) from None
    kinds = [kind for algorithm in spec.trainings.values() for kind in algorithm.feedback_kinds]
    answers = of_kinds(standing(line for _, line in lines), kinds)
    artifacts = _artifacts(answers, store, path)
    named = {name for answer in answers for name in (answer.trajectory, getattr(answer, "other", None))}
    episodes = {
        digest: {it.id: it for it in read_trajectories(artifact.path / "trajectories.parquet") if it.id in named}
        for digest, artifact in artifacts.items()
    }
    places = {line.id: place for place, line in lines}
    problems = []
    for answer in answers:
        reason = mismatch(answer, episodes[answer.artifact], f"artifact {answer.artifact[:12]}")
        problems += [_problem(f"{places[answer.id]}: {reason}")] if reason else []
    if problems:
        raise SpecError(problems[:MOST_SHOWN])
    trainings = []
    for name, algorithm in spec.trainings.items():
        own = of_kinds(answers, algorithm.feedback_kinds)
        if taught((episode for by_id in episodes.values() for episode in by_id.values()), own):
            stage = FeedbackStage(path=str(path), answers=digest_of(own), learns=algorithm.feedback_kinds)
            digests = sorted({answer.artifact for answer in own})
            inputs = {f"episodes_{number}": artifacts[digest] for number, digest in enumerate(digests, 1)}
            trainings.append(FeedbackTraining(name, algorithm, stage, inputs))
    if not trainings:
        names = " or ".join(algorithm.name for algorithm in spec.trainings.values())
        text = f"{path} has no {' and no '.join(kinds)} of finished episodes of split train, which {names} trains on"
        if any(isinstance(line, StepLabel) for _, line in lines):
            text += ". A process reward model learns labels of steps: flows.runs annotate RUN --labels FILE"
        raise SpecError([_problem(text)])
    return trainings


def _artifacts(answers: Sequence[Answer], store: Store, path: Path) -> dict[str, Artifact]:
    """Return the artifacts that the answers refer to, by digest. Raises SpecError if one is not in the store."""
    by_digest: dict[str, Artifact] = {}
    for artifact in store.manifests():
        if artifact.kind in EPISODE_KINDS:
            same = by_digest.get(artifact.digest, artifact)
            by_digest[artifact.digest] = min(artifact, same, key=lambda manifest: manifest.key)
    artifacts = {}
    for digest in sorted({answer.artifact for answer in answers}):
        source = store.find(by_digest[digest].key) if digest in by_digest else None
        if source is None:
            count = sum(answer.artifact == digest for answer in answers)
            text = f"{count} answers in {path} refer to episodes of the artifact {digest[:12]}, which is not in "
            advice = f"{store.root}: set root to that of the annotated run, or run it again"
            raise SpecError([_problem(text + advice)])
        artifacts[digest] = source
    return artifacts


def _problem(message: str) -> Problem:
    return Problem("feedback.path", message)
