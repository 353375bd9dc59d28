"""Feedback stage: converts human feedback on episodes into episodes to train on, with scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from components.artifacts import Draft
from components.errors import ResourceError
from components.specs.marks import FILES
from components.trajectories.feedback_episodes import Learns
from components.trajectories.schema import SCHEMA_VERSION, Selection
from flows.stages.base import Context, Inputs, Stage, StageSpec


class FeedbackStage(StageSpec):
    path: Annotated[str, FILES]
    """File of answers, or folder of such files; not part of the key."""
    answers: str
    """Digest of the answers of the kinds in `learns`."""
    learns: tuple[Learns, ...]

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"path"})


def feedback(spec: FeedbackStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `trajectories.parquet`, `scores.parquet`, `selection.parquet`, and the answers as `feedback.jsonl`. Inputs:
    the artifacts of the episodes that the answers refer to. Raises ResourceError if the file changed after the start
    of the run."""
    from components.trajectories.feedback import digest_of, read_all, write_line
    from components.trajectories.feedback_episodes import of_kinds, taught
    from components.trajectories.store import read_trajectories, write_scores, write_selection, write_trajectories

    answers = of_kinds(read_all(Path(spec.path)), spec.learns)
    if digest_of(answers) != spec.answers:
        raise ResourceError(
            f"feedback.path: {spec.path} changed after the start of the run. Run the same command again"
        )
    paths = (inputs[name].path / "trajectories.parquet" for name in sorted(inputs))
    episodes = (episode for path in paths for episode in read_trajectories(path))
    examples = taught(episodes, answers)
    write_trajectories(draft.path / "trajectories.parquet", [episode for episode, _ in examples])
    write_scores(draft.path / "scores.parquet", [score for _, score in examples])
    write_selection(draft.path / "selection.parquet", [Selection(episode.id, True, "kept") for episode, _ in examples])
    (draft.path / "feedback.jsonl").write_text("".join(map(write_line, answers)), encoding="ascii")
    context.progress(len(examples), len(examples))
    sources = [episode.id.rpartition("~")[2].partition("-")[0] for episode, _ in examples]
    return {
        "episodes": float(len(examples)),
        "authors": float(len({answer.author for answer in answers})),
        "scored": float(sources.count("score")),
        "corrected": float(sources.count("correction")),
        "pairs": sources.count("choice") / 2,
    }


STAGE = Stage(
    "feedback",
    1,
    FeedbackStage,
    "feedback",
    SCHEMA_VERSION,
    feedback,
    files={
        "feedback.jsonl": "human scores, choices and corrections",
        "trajectories.parquet": "episodes to train on",
        "scores.parquet": "their scores",
        "selection.parquet": "all of them, kept",
    },
    inputs={"episodes_K": "trajectories or evaluation"},
    order=40,
    unit="episodes",
    lineage="input",
)
