"""Builders of feedback for tests."""

from __future__ import annotations

from typing import Any

from components.trajectories.feedback import Correction, PairChoice, Rating, StepLabel, content_digest
from components.trajectories.schema import Trajectory

ARTIFACT = "a" * 64


def base(one: Trajectory, author: str, second: int, artifact: str, note: str) -> dict[str, Any]:
    time = f"2026-11-05T10:{second // 60:02}:{second % 60:02}+00:00"
    return {"author": author, "time": time, "artifact": artifact, "trajectory": one.id, "content": content_digest(one),
            "note": note}  # fmt: skip


def rated(one: Trajectory, score: int, author="Ada", second=0, artifact=ARTIFACT, note="") -> Rating:
    return Rating(score=score, **base(one, author, second, artifact, note))


def chose(
    one: Trajectory, other: Trajectory, better="a", author="Ada", second=0, artifact=ARTIFACT, note=""
) -> PairChoice:
    about = base(one, author, second, artifact, note)
    return PairChoice(other=other.id, other_content=content_digest(other), better=better, **about)


def labelled_step(
    one: Trajectory, message: int, good: bool, author="Ada", second=0, artifact=ARTIFACT, history=0
) -> StepLabel:
    return StepLabel(message=message, history=history, good=good, **base(one, author, second, artifact, ""))


def corrected(
    one: Trajectory, message: int, text="Better.", author="Ada", second=0, artifact=ARTIFACT, history=0, calls=()
) -> Correction:
    about = base(one, author, second, artifact, "")
    return Correction(message=message, history=history, text=text, calls=calls, **about)
