"""`python -m flows.runs [SUBCOMMAND]`: runs below a root: list, tag, annotate, export, clean, and more.

Each subcommand is described in its module; without one, the runs are listed.
"""

from __future__ import annotations

from flows.terminal.interrupt import leave
from flows.terminal.subcommands import Subcommand, Subcommands

RUNS = Subcommands(
    "runs",
    {
        "list": Subcommand("flows.runs.listing:main", "list of the runs, with the overrides in which they differ"),
        "tag": Subcommand("flows.runs.labels:tag", "add tags to a run, or remove them"),
        "note": Subcommand("flows.runs.labels:note", "add a note to a run, or remove its notes"),
        "lineage": Subcommand("flows.runs.lineage:main", "ancestors and descendants of an artifact"),
        "annotate": Subcommand("flows.runs.annotate:main", "web page for human feedback on the episodes of a run"),
        "revise": Subcommand("flows.runs.revise:main", "revision by a judge of answers that violate its principles"),
        "export": Subcommand("flows.runs.export:main", "scored episodes of a run, in the forms that imports read"),
        "deployments": Subcommand("flows.runs.deployments:main", "state of the models that runs have deployed"),
        "clean": Subcommand("flows.runs.clean:main", "garbage collection; deletes only with --delete"),
        "ui": Subcommand("flows.runs.ui:main", "Prefect server and user interface for the runs"),
    },
    default="list",
)

if __name__ == "__main__":
    leave(RUNS.main)
