"""SkyPilot's offers for places. Its optimizer runs in a subprocess (`optimizer`), because importing SkyPilot takes
seconds and changes the importing process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.compute.offer import Offer

if TYPE_CHECKING:
    from components.compute.sky.spec import SkyPlace

TIMEOUT = 90.0
"""Seconds for importing SkyPilot and querying clouds that it has not queried yet."""
COMMAND = (sys.executable, "-m", "components.compute.sky.optimizer")


def offers(places: Mapping[str, SkyPlace], timeout: float = TIMEOUT) -> dict[str, Offer]:
    """Return the offers by name of the place. Errors are recorded in the offer, because a plan works without prices."""
    request = json.dumps({name: place.model_dump(mode="json") for name, place in places.items()})
    try:
        completed = subprocess.run(COMMAND, input=request, capture_output=True, text=True, timeout=timeout, check=True)
        return {name: Offer(**offer) for name, offer in json.loads(completed.stdout).items()}
    except subprocess.TimeoutExpired:
        problem = f"SkyPilot's optimizer timed out after {timeout:g} s"
    except (subprocess.CalledProcessError, ValueError) as error:
        stderr_lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        problem = f"SkyPilot's optimizer failed: {stderr_lines[-1] if stderr_lines else error}"
    return {name: Offer(place.describe(), None, problem) for name, place in places.items()}
