"""Training on human feedback before the rounds: `feedback=answers`.

A file of annotators, or the folder of a served policy, may hold scores, corrections and choices. One training learns
from the scores and corrections, the next one from the choices; a training without answers is left out. With `fork=RUN`
they continue from the policy of a finished run.

Answers of annotators refer to the artifacts of their episodes by digest; these artifacts must be in the store. Feedback
of users is imported with its conversations, as data of one's own: its stage is `import`, in place of `feedback`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationInfo, field_validator

from components.algorithms.choices import FeedbackAlgorithmSpec
from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact, Store
from components.data.spec import DataSpec
from components.errors import Problem, ResourceError, SpecError
from components.specs import Spec
from components.specs.marks import FILES
from flows.stages import EPISODE_KINDS
from flows.stages.feedback import FeedbackStage

if TYPE_CHECKING:
    from components.trajectories.feedback import Answer
    from components.trajectories.feedback_episodes import Learns

log = logging.getLogger(__name__)

IMPORT_SETTINGS = ("reasoning", "on_problem", "max_dropped", "near_duplicates")
"""Keys of `data` that hold for the feedback of users as well."""
LEARNED: dict[str, tuple[str, ...]] = {"scores": ("scores", "corrections"), "choices": ("choices",)}
"""Kinds of answers by the key of the training that learns from them, in the order of the trainings."""


class FeedbackSpec(Spec):
    """Training on human feedback about episodes, before the first round: on scores and corrections, then on choices. A
    training that the file has no answers for is left out."""

    path: Annotated[str, FILES] = Field(min_length=1)
    """File of answers, or folder of such files: `ROOT/feedback`, or the output of `flows.runs annotate --export`. Or
    the folder of a served policy with the feedback of its users: `ROOT/served`, or what it had at a time:
    `ROOT/served@2026-11-28T12:00:00+00:00`."""
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
    """Training on answers of annotators, or on feedback of users."""

    name: str
    """Key of its algorithm: `scores` or `choices`."""
    algorithm: AlgorithmSpec
    source: FeedbackStage | DataSpec
    """Conversion of the answers to episodes to train on, or the import of the conversations of users."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """Artifacts of the annotated episodes, by name of the stage input."""


def resolve(spec: FeedbackSpec | None, store: Store, settings: DataSpec | None = None) -> list[FeedbackTraining]:
    """Return the trainings that there are answers for, in order; none without a spec. settings: `data` of the
    experiment, whose IMPORT_SETTINGS hold for the feedback of users.

    Raises SpecError if the file is damaged, if an answer refers to an episode that is not in the store or does not fit
    it, or if nothing can be trained on."""
    if spec is None:
        return []
    served = _of_users(spec, settings or DataSpec())
    return _of_annotators(spec, store) if served is None else served


def _of_users(spec: FeedbackSpec, settings: DataSpec) -> list[FeedbackTraining] | None:
    """Return the trainings on the feedback of a served policy's users up to now; None if `path` is no such folder."""
    from components.data.served.rows import ServedSource
    from flows.experiment.data import until_now

    chosen = {name: getattr(settings, name) for name in IMPORT_SETTINGS}
    data = until_now(DataSpec(path=spec.path, form="served", **chosen), "feedback")
    source = ServedSource.of(data)
    if source is None:
        return None
    present = source.kinds()
    trainings = [
        FeedbackTraining(name, algorithm, data.model_copy(update={"split": "+".join(algorithm.feedback_kinds)}))
        for name, algorithm in spec.trainings.items()
        if set(present) & set(algorithm.feedback_kinds)
    ]
    if not trainings:
        raise _nothing(spec, spec.path, "recorded answers", present, ". Free text is not trained on")
    return trainings


def _of_annotators(spec: FeedbackSpec, store: Store) -> list[FeedbackTraining]:
    """Return the trainings on the answers of a file. Raises as `resolve`."""
    from components.trajectories.feedback import MOST_SHOWN, StepLabel, digest_of, numbered, standing
    from components.trajectories.feedback_episodes import KINDS, mismatch, of_kinds, taught
    from components.trajectories.store import read_trajectories

    path = Path(spec.path).expanduser().absolute()
    try:
        lines = numbered(path)
    except ResourceError as error:
        raise SpecError([_problem(str(error))]) from None
    valid = standing(line for _, line in lines)
    answers = of_kinds(valid, _learned(spec))
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
    trainings, unusable = [], []
    for name, algorithm in spec.trainings.items():
        own = of_kinds(answers, algorithm.feedback_kinds)
        if taught((episode for by_id in episodes.values() for episode in by_id.values()), own):
            stage = FeedbackStage(path=str(path), answers=digest_of(own), learns=algorithm.feedback_kinds)
            digests = sorted({answer.artifact for answer in own})
            inputs = {f"episodes_{number}": artifacts[digest] for number, digest in enumerate(digests, 1)}
            trainings.append(FeedbackTraining(name, algorithm, stage, inputs))
        elif own:
            unusable.append(f"train[{name}] is left out: all its answers in {path} ({len(own)})")
    if not trainings:
        present = {kind for kind in KINDS if of_kinds(valid, [kind])}
        steps = any(isinstance(answer, StepLabel) for answer in valid)
        advice = "A process reward model learns labels of steps: flows.runs annotate RUN --labels FILE"
        raise _nothing(spec, str(path), "finished episodes of split train", present, f". {advice}" if steps else "")
    for text in unusable:
        log.warning("%s are ties, or of held-out or failed episodes", text)
    return trainings


def _learned(spec: FeedbackSpec) -> list[Learns]:
    return [kind for algorithm in spec.trainings.values() for kind in algorithm.feedback_kinds]


def _nothing(spec: FeedbackSpec, path: str, subject: str, present: Collection[str], advice: str) -> SpecError:
    """Return the error of feedback that no training learns from. present: kinds of answers that it has."""
    names = " or ".join(algorithm.name for algorithm in spec.trainings.values())
    text = f"{path} has no {' and no '.join(_learned(spec))} of {subject}, which {names} trains on"
    for key, kinds in LEARNED.items():
        if others := [kind for kind in kinds if kind in present and kind not in _learned(spec)]:
            algorithm = getattr(spec, key)
            setting = f"feedback.{key} = {'null' if algorithm is None else algorithm.name}"
            text += f". It has {' and '.join(others)}, which {setting} does not train on"
    return SpecError([_problem(text + advice)])


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
