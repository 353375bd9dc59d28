"""Calibration of a judge as one self-contained HTML page. `Calibration` is plain data that a command fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.evaluation.calibration import Mark
from components.pages.charts import calibration_chart, roc_chart
from components.pages.page import page
from components.trajectories.schema import Trajectory

MEASURES = {
    "auc": "AUC: how often a good episode scores above a bad one",
    "spearman": "Rank correlation with the truth",
    "spearman_within": "Rank correlation within a group, mean",
    "agreement": "Pairs within a group in the order of the truth",
    "length_bias": "Rank correlation with length, given the truth",
    "position_bias": "Rank correlation with the place shown",
    "noise": "Standard deviation over judgements of an episode",
}
"""Description of each measure. Of the first four, higher is better; of the others, values near 0 are better."""


@dataclass(frozen=True)
class Disagreement:
    """Episode on which score and truth differ most."""

    trajectory: Trajectory
    score: float
    truth: float
    explanation: str = ""


@dataclass(frozen=True)
class Calibration:
    """Content of the page."""

    experiment: str
    reward: str
    """Class of the measured reward."""
    truth: str
    """Description of the source of truth."""
    measures: Mapping[str, Any]
    """Result of `components.evaluation.calibration.measure`."""
    counts: Mapping[str, float | None]
    """Values of `episodes`, `failed`, `unscored` (a share), `cost_per_thousand` and `seconds_per_thousand`."""
    curve: Sequence[Mapping[str, Any]] = ()
    roc: Sequence[tuple[float, float]] = ()
    marks: Sequence[Mark] = ()
    warnings: Sequence[str] = ()
    misjudged: Sequence[Disagreement] = ()
    created: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the reward."""
    overrides: Sequence[str] = ()

    def charts(self) -> dict[str, str]:
        """Return the charts by title; empty text if there is nothing to plot."""
        return {
            "Mean truth by decile of the score": calibration_chart(self.curve),
            "ROC: good episodes against bad ones that score as high": roc_chart(self.roc),
        }


def render(calibration: Calibration) -> str:
    """Return the page as HTML text."""
    charts = {title: chart for title, chart in calibration.charts().items() if chart}
    return page("calibration.html.j2", it=calibration, descriptions=MEASURES, charts=charts)
