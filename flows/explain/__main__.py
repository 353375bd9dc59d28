"""`python -m flows.explain SUBCOMMAND`: causes of a result: attribute, bisect, rejudge, replay, calibrate."""

from __future__ import annotations

from flows.terminal.interrupt import leave
from flows.terminal.subcommands import Subcommand, Subcommands

EXPLAIN = Subcommands(
    "explain",
    {
        "attribute": Subcommand(
            "flows.explain.attribute:main", "training groups that pushed against the scenarios which a round lost"
        ),
        "bisect": Subcommand("flows.explain.bisect:main", "the change that made two runs differ"),
        "rejudge": Subcommand("flows.explain.rejudge:main", "rewards compared by what they teach on the same episodes"),
        "replay": Subcommand(
            "flows.explain.replay:main", "an episode continued from one of its steps, with another tool answer"
        ),
        "calibrate": Subcommand(
            "flows.explain.calibrate:main", "agreement of the declared reward with the ground truth"
        ),
    },
)

if __name__ == "__main__":
    leave(EXPLAIN.main)
