"""A person's word before a policy is deployed (`deploy.approve`).

The run stops before its last stage and shows the evaluations. On a Prefect server of the user it is paused there, and
its UI asks: accept or reject, and why. Without one the terminal asks. Whoever has neither learns it before the run
begins. An export that is in the store already was accepted when it was made: nobody is asked again.

Rejected, the run ends well, with its report and without an export; the word is in its record. Unanswered in time, it
ends by WaitTimeout. Both keep everything up to there, and the same run asks again.
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
    from flows.recipes.outcome import Approve, Outcome

POLL = 2.0
"""Seconds between two questions to Prefect whether somebody has answered."""
KEPT = "everything up to there is kept, and the same run asks again"


def check(spec: ExperimentSpec) -> None:
    """Raises ResourceError where nobody can be asked."""
    if spec.deploy.approve and not _in_prefect() and not (sys.stdin and sys.stdin.isatty()):
        raise ResourceError(
            "deploy.approve=true: nobody can be asked, for there is neither a terminal nor a Prefect server of yours. "
            "Run it in a terminal, or from Prefect's UI (python -m flows.serve), or set PREFECT_API_URL, or say "
            "deploy.approve=false"
        )


def _in_prefect() -> bool:
    return bool(os.environ.get("PREFECT_API_URL"))


def asker(execution: Execution) -> Approve:
    """Asks whoever there is, with models let go: a person may take hours."""
    spec = execution.spec

    def approve(outcome: Outcome, request: Request) -> str | None:
        if find_stage(request, execution.context) is not None:
            return None
        execution.context.warm.close()
        execution.console.line(
            f"waiting for a person to accept the policy, for {duration(spec.deploy.approve_timeout)}"
        )
        table = rows(spec, outcome)
        if _in_prefect():
            reason = by_prefect(spec, table)
        else:
            reason = by_terminal(execution.console, spec, table)
        return None if reason is None else f"the deployment was rejected{f': {reason}' if reason else ''}; {KEPT}"

    return approve


def rows(spec: ExperimentSpec, outcome: Outcome) -> list[list[str]]:
    """What the person decides on: policy, success, reward, turns, as in the table at the end of a run."""
    from flows.reporting.report import summary_of, titles_of
    from flows.reporting.results import with_interval

    titles = titles_of(spec, outcome)
    summaries = {titles[name]: summary_of(artifact) for name, artifact in outcome.evaluations.items()}
    measures = ("success", "reward", "turns")
    return [[title, *(with_interval(one[measure]) for measure in measures)] for title, one in summaries.items()]


def by_terminal(console: Console, spec: ExperimentSpec, table: list[list[str]]) -> str | None:
    """Asks on stderr, hears on stdin. Returns the reason of a rejection, None for yes. Raises WaitTimeout."""
    for row in [["policy", "success", "reward", "turns"], *table]:
        console.line("  ".join(f"{cell:26}" for cell in row).rstrip())
    until = time.monotonic() + spec.deploy.approve_timeout
    while True:
        console.line(f"Deploy {spec.deploy.name or spec.name}? yes, or no and why:")
        if not select.select([sys.stdin], [], [], max(0.0, until - time.monotonic()))[0]:
            raise _unanswered(spec, "in the terminal")
        typed = os.read(sys.stdin.fileno(), 4096).decode(errors="replace")
        for line in typed.splitlines():
            word, _, rest = printable(line.strip()).partition(" ")
            if word.lower().rstrip(",:") in ("yes", "y"):
                return None
            if word.lower().rstrip(",:") in ("no", "n"):
                return rest.strip()
        if not typed:
            return "the terminal was closed"


def by_prefect(spec: ExperimentSpec, table: list[list[str]]) -> str | None:
    """Pauses the flow that is active until somebody fills in the form of its UI. Returns and raises as `by_terminal`,
    and ResourceError where the server goes away meanwhile."""
    import httpx
    from prefect.exceptions import FlowPauseTimeout
    from prefect.flow_runs import pause_flow_run
    from prefect.input import RunInput
    from pydantic import Field

    class Approval(RunInput):
        decision: Literal["accept", "reject"] = Field(description="Whether the policy is deployed.")
        reason: str = Field("", description="Of a rejection; it is kept with the run.")

    head = ["| Policy | Success | Reward | Turns |", "|---|---|---|---|"]
    shown = "\n".join([*head, *("| " + " | ".join(row) + " |" for row in table)])
    about = f"Deploy {spec.deploy.name or spec.name}? Held-out episodes, mean [95 % interval]:\n\n{shown}"
    try:
        answer = pause_flow_run(
            wait_for_input=Approval.with_initial_data(description=about),
            timeout=max(1, round(spec.deploy.approve_timeout)),
            poll_interval=POLL,
            key=f"deploy-{uuid.uuid4()}",  # one question, one answer: a retry of the run asks anew
        )
    except FlowPauseTimeout:
        raise _unanswered(spec, "in Prefect") from None
    except httpx.HTTPError as error:
        raise ResourceError(
            f"the Prefect server went away while the run waited to be accepted ({type(error).__name__}); {KEPT}"
        ) from None
    return None if answer.decision == "accept" else printable(answer.reason.strip())


def _unanswered(spec: ExperimentSpec, where: str) -> WaitTimeout:
    limit = duration(spec.deploy.approve_timeout)
    return WaitTimeout(f"waited {limit} (deploy.approve_timeout) for a person to accept the policy {where}; {KEPT}")
