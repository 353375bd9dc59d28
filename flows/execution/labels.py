"""Labels of stages: which belong to a round, and the prefix of their metric names."""

from __future__ import annotations

import re

from flows.stages import ROUND_STAGES
from flows.stages.anchors import is_anchor_label

_NUMBERED = re.compile(r"(\w+)\[\d+(\+\d+)?\]")
"""Label of a stage in a round or a refill."""


def is_part_of_round(label: str) -> bool:
    """Return True if the line of the round summarizes the stage."""
    match = _NUMBERED.fullmatch(label)
    return match is not None and match[1] in ROUND_STAGES


def metric_group(label: str) -> str:
    """Return the prefix of a stage's metric names, so that the rounds of a stage form one series: none for the stages
    of a round, `refill_1/` for its first refill, `reward/` and `reward_2/` for the training of reward models,
    `anchors/` for the judgements of the anchors."""
    if is_anchor_label(label):
        return "anchors/"
    name = label.partition("[")[2].rstrip("]")
    if "+" in name:
        return f"refill_{name.partition('+')[2]}/"
    return f"{name.partition('@')[0].replace(' ', '_')}/" if name.startswith("reward") else ""
