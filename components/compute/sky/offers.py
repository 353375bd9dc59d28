"""Which machine a place would be and what an hour of it costs, before anything is launched.

SkyPilot's optimizer chooses it, as it would for the launch: of the clouds that `sky check` found on this machine, the
cheapest that has what the place asks for. It runs in a process of its own, `python -m components.compute.sky.offers`,
because importing SkyPilot takes seconds and changes the process that does.
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
"""Seconds for the import of SkyPilot, and its look at the clouds where it has not looked yet."""
COMMAND = (sys.executable, "-m", "components.compute.sky.offers")


@dataclass(frozen=True)
class Offer:
    """What SkyPilot would take for a place."""

    machine: str
    """Cloud, region and type; where there is none, what was asked for."""
    price: float | None
    """US dollars for an hour of all its nodes; None where there is none."""
    problem: str | None = None
    """Why there is none."""


def offers(places: Mapping[str, SkyPlace], timeout: float = TIMEOUT) -> dict[str, Offer]:
    """By name of the place. What goes wrong is in the offer: a plan does not need a price."""
    if not places:
        return {}
    asked = json.dumps({name: place.model_dump(mode="json") for name, place in places.items()})
    try:
        done = subprocess.run(COMMAND, input=asked, capture_output=True, text=True, timeout=timeout, check=True)
        return {name: Offer(**one) for name, one in json.loads(done.stdout).items()}
    except subprocess.TimeoutExpired:
        problem = f"SkyPilot's optimizer said nothing for {timeout:g} s"
    except (subprocess.CalledProcessError, ValueError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        problem = f"SkyPilot's optimizer failed: {said[-1] if said else error}"
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
    except Exception as error:  # noqa: BLE001  the optimizer's errors are many, and all of them mean: no offer
        told: EspalierError = explain(error, place, "a cluster")
        return Offer(wanted(place), None, str(told).partition("; ")[0])


def main() -> int:
    """Reads places by name from standard input, as JSON, and writes their offers to standard output."""
    places = {name: SkyPlace.model_validate(one) for name, one in json.load(sys.stdin).items()}
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # SkyPilot prints
    import sky

    with contextlib.closing(out):
        json.dump({name: asdict(_offer(sky, place)) for name, place in places.items()}, out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
