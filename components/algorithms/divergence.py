"""Stops a training that left the range in which it makes sense, before a checkpoint is written.

What is needed to look into it stays in the stage's scratch folder: `diverged.json` with the numbers of the step and
the ids of the trajectories in its batch, which lie in the stage's input artifacts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from components.errors import TrainingDiverged

FILE = "diverged.json"


def stop(
    scratch: Path, step: int, measured: Mapping[str, float], trajectories: Iterable[str], *, advice: str
) -> NoReturn:
    """Writes `scratch/diverged.json` and raises TrainingDiverged. measured: name to value; not finite ones are written
    as text, for JSON has no word for them. trajectories: ids of the batch, each written once."""
    shown = {name: value if math.isfinite(value) else str(value) for name, value in measured.items()}
    record = {"step": step, **shown, "trajectories": list(dict.fromkeys(trajectories))}
    (scratch / FILE).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    listed = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
    raise TrainingDiverged(
        f"gradient step {step}: {listed}. No checkpoint was written; the batch is in {scratch / FILE}. {advice}"
    )
