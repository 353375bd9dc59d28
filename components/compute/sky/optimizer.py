"""`python -m components.compute.sky.optimizer`: machine type and hourly price of places, before a launch.

SkyPilot's optimizer chooses the machine as it would for a launch: of the clouds that `sky check` found on this machine,
the cheapest that satisfies the place.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from components.compute.place import Offer
from components.compute.sky.failures import explain
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import resources
from components.errors import EspalierError


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
        return Offer(place.describe(), None, str(explained).partition("; ")[0])


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
