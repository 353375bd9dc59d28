"""Machine type and hourly price of a place, before a launch.

SkyPilot's optimizer chooses it as it would for a launch: of the clouds that `sky check` found on this machine, the
cheapest that satisfies the place. It runs in a subprocess, `python -m components.compute.sky.offers`, because importing
SkyPilot takes seconds and changes the importing process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.compute.sky.failures import explain, wanted
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import resources
from components.errors import EspalierError

TIMEOUT = 90.0
"""Seconds for importing SkyPilot and querying clouds that it has not queried yet."""
COMMAND = (sys.executable, "-m", "components.compute.sky.offers")


@dataclass(frozen=True)
class Offer:
    """Machine that SkyPilot would choose for a place."""

    machine: str
    """Cloud, region and type; without an offer, the request."""
    price: float | None
    """US dollars per hour for all nodes; None without an offer."""
    problem: str | None = None
    """Reason why there is no offer; None with one."""


def offers(places: Mapping[str, SkyPlace], timeout: float = TIMEOUT) -> dict[str, Offer]:
    """Return the offers by name of the place. Errors are recorded in the offer, because a plan works without prices."""
    if not places:
        return {}
    request = json.dumps({name: place.model_dump(mode="json") for name, place in places.items()})
    try:
        completed = subprocess.run(COMMAND, input=request, capture_output=True, text=True, timeout=timeout, check=True)
        return {name: Offer(**offer) for name, offer in json.loads(completed.stdout).items()}
    except subprocess.TimeoutExpired:
        problem = f"SkyPilot's optimizer timed out after {timeout:g} s"
    except (subprocess.CalledProcessError, ValueError) as error:
        stderr_lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        problem = f"SkyPilot's optimizer failed: {stderr_lines[-1] if stderr_lines else error}"
    return {name: Offer(wanted(place), None, problem) for name, place in places.items()}


def _offer(sky: Any, place: SkyPlace) -> Offer:
    from sky import core

    config = {"name": "offer", "resources": resources(place), "num_nodes": place.nodes, "run": "true"}
    try:
        with sky.Dag() as dag:
            dag.add(sky.Task.from_yaml_config(config))
        chosen = core.optimize(dag, quiet=True).tasks[0].best_resources
        where = "/".join(part for part in (str(chosen.cloud).lower(), chosen.region) if part)
        spot = " (spot)" if chosen.use_spot else ""
        machine = f"{place.nodes} × " * (place.nodes > 1) + f"{chosen.instance_type} on {where}{spot}"
        return Offer(machine, chosen.get_cost(3600) * place.nodes)
    except Exception as error:  # noqa: BLE001  the optimizer raises many types, and each means that there is no offer
        explained: EspalierError = explain(error, place, "a cluster")
        return Offer(wanted(place), None, str(explained).partition("; ")[0])


def main() -> int:
    """Read places by name from standard input, as JSON, and write their offers to standard output."""
    places = {name: SkyPlace.model_validate(place) for name, place in json.load(sys.stdin).items()}
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # SkyPilot prints to standard output
    import sky

    with contextlib.closing(out):
        json.dump({name: asdict(_offer(sky, place)) for name, place in places.items()}, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
