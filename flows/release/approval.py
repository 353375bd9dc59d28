"""Human approval before a policy is deployed (`deploy.approve`).

The run stops before its last stage and shows the evaluations. With the user's own Prefect server, the flow run is
paused and Prefect's UI asks for a decision and a reason. Otherwise the terminal asks. If there is neither, the command
fails before the run starts. A cached export was approved when it was created, so it needs no new approval.

After a rejection the run succeeds, with a report and without an export; its record contains the reason. Without an
answer in time it fails with WaitTimeout. In both cases the finished stages stay cached, and a repeated run asks again.
"""

from __future__ import annotations

import os
import select
import sys
import time
import uuid
from typing import TYPE_CHECKING, Literal

from components.errors import ResourceError, WaitTimeout
from flows.experiment.spec import ExperimentSpec
from flows.stages.base import Request
from flows.stages.execute import find_stage
from flows.terminal.console import Console, duration, printable

if TYPE_CHECKING:
    from flows.execution.executor import Execution
    from flows.recipes.outcome import RunOutcome
    from flows.recipes.stage_calls import Approve

POLL = 2.0
"""Seconds between two polls of Prefect for an answer."""
_RETRY_ADVICE = "finished stages stay cached, and the same run asks again"


def check(spec: ExperimentSpec) -> None:
    """Raise ResourceError if approval is required but there is neither a terminal nor the user's Prefect server."""
    if spec.deploy.approve and not _in_prefect() and not (sys.stdin and sys.stdin.isatty()):
        raise ResourceError(
            "deploy.approve = true: approval needs a terminal or your own Prefect server, and there is neither. Run in "
            "a terminal or from Prefect's UI (python -m flows.serve), or set PREFECT_API_URL, or set "
            "deploy.approve=false"
        )


def _in_prefect() -> bool:
    return bool(os.environ.get("PREFECT_API_URL"))


def asker(execution: Execution) -> Approve:
    """Return the function that asks for approval, in Prefect or in the terminal. It first unloads the models, because
    a person may take hours."""
    spec = execution.spec

    def approve(outcome: RunOutcome, request: Request) -> str | None:
        if find_stage(request, execution.context) is not None:
            return None
        execution.context.warm.close()
        execution.console.line(
            f"waiting up to {duration(spec.deploy.approve_timeout)} (deploy.approve_timeout) for a person's approval"
        )
        if execution.notifier is not None:
            execution.notifier.send("approval", f"deploy {spec.deploy.name or spec.name}?", outcome.last_step)
        table = rows(spec, outcome)
        if _in_prefect():
            reason = ask_in_prefect(spec, table)
        else:
            reason = ask_in_terminal(execution.console, spec, table)
        return (
            None if reason is None else f"the deployment was rejected{f': {reason}' if reason else ''}; {_RETRY_ADVICE}"
        )

    return approve


def rows(spec: ExperimentSpec, outcome: RunOutcome) -> list[list[str]]:
    """Return the rows for the decision, the first with the names of the columns, as in the table at the end of a run:
    success, reward and turns, or without an environment the metrics of held-out rows."""
    from flows.reporting.report import heldout_metrics, summary_of, titles_of
    from flows.reporting.results import EPISODE_COLUMNS, heldout_table, with_interval

    if not outcome.evaluations:
        table = heldout_table(heldout_metrics(outcome))
        return [list(table.columns), *table.rows]
    titles = titles_of(spec, outcome)
    summaries = {titles[name]: summary_of(artifact) for name, artifact in outcome.evaluations.items()}
    measures = EPISODE_COLUMNS[1:]
    rows = [[title, *(with_interval(summary[measure]) for measure in measures)] for title, summary in summaries.items()]
    return [list(EPISODE_COLUMNS), *rows]


def ask_in_terminal(console: Console, spec: ExperimentSpec, table: list[list[str]]) -> str | None:
    """Ask on stderr and read the answer from stdin. Return the reason of a rejection, or None for approval.

    Raises WaitTimeout after `deploy.approve_timeout`.
    """
    for row in table:
        console.line("  ".join(f"{cell:26}" for cell in row).rstrip())
    until = time.monotonic() + spec.deploy.approve_timeout
    while True:
        console.line(f"Deploy {spec.deploy.name or spec.name}? Answer yes, or no and the reason:")
        if not select.select([sys.stdin], [], [], max(0.0, until - time.monotonic()))[0]:
            raise _unanswered(spec, "in the terminal")
        typed = os.read(sys.stdin.fileno(), 4096).decode(errors="replace")
        for line in typed.splitlines():
            word, _, reason = printable(line.strip()).partition(" ")
            if word.lower().rstrip(",:") in ("yes", "y"):
                return None
            if word.lower().rstrip(",:") in ("no", "n"):
                return reason.strip()
        if not typed:
            return "the terminal was closed"


def ask_in_prefect(spec: ExperimentSpec, table: list[list[str]]) -> str | None:
    """Pause the current flow run until a user submits the form in Prefect's UI.

    Returns and raises like `ask_in_terminal`; also raises ResourceError if the server becomes unreachable.
    """
    import httpx
    from prefect.exceptions import FlowPauseTimeout
    from prefect.flow_runs import pause_flow_run
    from prefect.input import RunInput
    from pydantic import Field

    class Approval(RunInput):
        decision: Literal["accept", "reject"] = Field(description="Deploy the policy?")
        reason: str = Field("", description="Reason of a rejection; the run's record stores it.")

    head = ["| " + " | ".join(map(str.capitalize, table[0])) + " |", "|---" * len(table[0]) + "|"]
    markdown = "\n".join([*head, *("| " + " | ".join(row) + " |" for row in table[1:])])
    measured = "rows" if spec.environment is None else "episodes, mean [95 % interval]"
    about = f"Deploy {spec.deploy.name or spec.name}? Held-out {measured}:\n\n{markdown}"
    try:
        answer = pause_flow_run(
            wait_for_input=Approval.with_initial_data(description=about),
            timeout=max(1, round(spec.deploy.approve_timeout)),
            poll_interval=POLL,
            key=f"deploy-{uuid.uuid4()}",  # unique, so that a retry of the run asks again
        )
    except FlowPauseTimeout:
        raise _unanswered(spec, "in Prefect") from None
    except httpx.HTTPError as error:
        raise ResourceError(
            f"lost the Prefect server while waiting for approval ({type(error).__name__}); {_RETRY_ADVICE}"
        ) from None
    return None if answer.decision == "accept" else printable(answer.reason.strip())


def _unanswered(spec: ExperimentSpec, where: str) -> WaitTimeout:
    limit = duration(spec.deploy.approve_timeout)
    return WaitTimeout(f"no approval {where} within {limit} (deploy.approve_timeout); {_RETRY_ADVICE}")
