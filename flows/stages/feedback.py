"""Feedback: what people said of episodes becomes episodes to learn from, with their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.artifacts import Draft
from components.errors import Problem, ResourceError, SpecError
from components.trajectories.feedback_episodes import Learns
from components.trajectories.schema import SCHEMA_VERSION, Selection
from flows.stages.base import Context, Inputs, Stage, StageSpec


class FeedbackStage(StageSpec):
    path: str
    """File of answers, or folder of such files; in no key."""
    answers: str
    """Digest of what stands there."""
    learns: tuple[Learns, ...]

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"path"})


def feedback(spec: FeedbackStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `trajectories.parquet`, `scores.parquet`, `selection.parquet`, and the answers as `feedback.jsonl`.
    Inputs: the artifacts whose episodes the answers are about. Raises SpecError where they teach nothing."""
    from components.trajectories.feedback import digest_of, read_all, write_line
    from components.trajectories.feedback_episodes import taught
    from components.trajectories.store import read_trajectories, write_scores, write_selection, write_trajectories

    answers = read_all(Path(spec.path))
    if digest_of(answers) != spec.answers:
        raise ResourceError(f"feedback.path: {spec.path} has changed since the start; the same command takes all of it")
    episodes = (one for name in sorted(inputs) for one in read_trajectories(inputs[name].path / "trajectories.parquet"))
    found = taught(episodes, answers, spec.learns)
    if not found:
        what = " or ".join(spec.learns)
        raise SpecError(
            [Problem("feedback.path", f"{spec.path} teaches nothing: no {what} of finished episodes of split train")]
        )
    write_trajectories(draft.path / "trajectories.parquet", [one for one, _ in found])
    write_scores(draft.path / "scores.parquet", [score for _, score in found])
    write_selection(draft.path / "selection.parquet", [Selection(one.id, True, "kept") for one, _ in found])
    (draft.path / "feedback.jsonl").write_text("".join(map(write_line, answers)), encoding="ascii")
    context.progress(len(found), len(found))
    kinds = [one.id.rpartition("~")[2].partition("-")[0] for one, _ in found]
    return {
        "episodes": float(len(found)),
        "authors": float(len({one.author for one in answers})),
        "scored": float(kinds.count("score")),
        "corrected": float(kinds.count("correction")),
        "pairs": kinds.count("choice") / 2,
    }


STAGE = Stage("feedback", 1, FeedbackStage, "feedback", SCHEMA_VERSION, feedback)
