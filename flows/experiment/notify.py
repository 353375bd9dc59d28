"""Notifications of a run: a webhook, and events in the user's Prefect server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.specs import Spec
from components.specs.marks import ENV_VARIABLE
from components.specs.served import VARIABLE

Event = Literal["ended", "failed", "approval", "guard", "budget"]
EVENTS: tuple[Event, ...] = ("ended", "failed", "approval", "guard", "budget")
"""All events: the end, a failure, the wait for approval, a triggered guard, 80 % of the budget spent."""


class NotifySpec(Spec):
    """Destinations of the events of a run. They do not affect results, so they are in no stage key."""

    url_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the URL of a webhook, which gets a POST with a JSON body for each event. The URL
    is a secret, so the configuration names only its variable. null: no webhook."""
    prefect: bool = False
    """Emit each event to your own Prefect server (`PREFECT_API_URL`), as `espalier.run.EVENT`, for its automations."""
    events: list[Event] = Field(list(EVENTS), min_length=1)
    """Events to report: ended, failed, approval, guard, budget."""
