"""Training on what people said, before the rounds: `feedback=scores` or `feedback=choices`.

With `fork=RUN` it goes on from the policy of a finished run. The answers name the artifacts whose episodes they are
about, by their digests; these have to be in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from components.algorithms.spec import DPOSpec, IPOSpec, KTOSpec, ORPOSpec, PairSpec, SFTSpec
from components.artifacts import Artifact, Store
from components.errors import Problem, ResourceError, SpecError
from components.specs import Spec
from components.trajectories.feedback_episodes import Learns

FeedbackAlgorithmSpec = Annotated[SFTSpec | DPOSpec | IPOSpec | ORPOSpec | KTOSpec, Field(discriminator="name")]


class FeedbackSpec(Spec):
    """Training on what people said of episodes, before the first round."""

    path: str = Field(min_length=1)
    """File of answers, or folder of such files: `ROOT/feedback`, or what `flows.annotate --export` wrote."""
    algorithm: FeedbackAlgorithmSpec
    """`sft` learns corrections, and scored episodes by their scores; dpo, ipo and orpo the pairs that people chose; kto
    scored episodes, as good from `threshold` on (a score of 3 is 0.5)."""

    @property
    def learns(self) -> tuple[Learns, ...]:
        if isinstance(self.algorithm, SFTSpec):
            return "scores", "corrections"
        return ("choices",) if isinstance(self.algorithm, PairSpec) else ("scores",)


@dataclass(frozen=True)
class Said:
    """What people said, and of which episodes."""

    path: str
    answers: str
    """Digest of what stands."""
    artifacts: dict[str, Artifact]
    """By name of the input."""


def resolve(spec: FeedbackSpec | None, store: Store) -> Said | None:
    """None where there is none. Raises SpecError where the file is damaged, says nothing that the algorithm learns, or
    is about episodes that the store does not have."""
    from components.trajectories.feedback import Choice, Correction, Rating, digest_of, read_all

    if spec is None:
        return None
    path = Path(spec.path).expanduser().absolute()
    try:
        answers = read_all(path)
    except ResourceError as error:
        raise _problem(str(error)) from None
    kinds = {"scores": Rating, "corrections": Correction, "choices": Choice}
    if not any(isinstance(one, kinds[name]) for one in answers for name in spec.learns):
        raise _problem(f"{path} has no {' and no '.join(spec.learns)}, of which {spec.algorithm.name} learns")
    by_digest: dict[str, Artifact] = {}
    for artifact in store.manifests():
        if artifact.kind in ("trajectories", "evaluation"):
            by_digest[artifact.digest] = min(
                artifact, by_digest.get(artifact.digest, artifact), key=lambda one: one.key
            )
    found = {}
    for number, digest in enumerate(sorted({one.artifact for one in answers}), 1):
        known = store.find(by_digest[digest].key) if digest in by_digest else None
        if known is None:
            about = sum(one.artifact == digest for one in answers)
            raise _problem(
                f"{about} answers in {path} are about episodes of the artifact {digest[:12]}, which is not in "
                f"{store.root}: give the root of the run that was annotated, or run it again"
            )
        found[f"episodes_{number}"] = known
    return Said(str(path), digest_of(answers), found)


def _problem(message: str) -> SpecError:
    return SpecError([Problem("feedback.path", message)])
