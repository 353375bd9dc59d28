"""`python -m components.compute.sky.optimizer`: machine type and hourly price of places, before a launch.

SkyPilot's optimizer chooses the machine as it would for a launch: of the clouds that `sky check` found on this machine,
the cheapest that satisfies the place. Where none is enabled, the price is the lowest of the catalogue, which needs no
credentials.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict
from typing import Any

from components.compute.place import Offer
from components.compute.sky.failures import explain
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import resources
from components.errors import EspalierError

CATALOGUED = ("aws", "gcp", "azure", "lambda", "runpod")
"""Clouds of docs/guides/cloud.md whose prices SkyPilot's catalogue lists."""
CATALOGUE = "SkyPilot's catalogue (no cloud is enabled here: `sky check`)"


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
        if type(error).__name__ == "NoCloudAccessError" and (listed := _listed(sky, place)) is not None:
            return listed
        explained: EspalierError = explain(error, place, "a cluster")
        return Offer(place.describe(), None, str(explained).partition("; ")[0])


def _listed(sky: Any, place: SkyPlace) -> Offer | None:
    """Return the cheapest machine of the catalogue; None if it lists none."""
    (wanted,) = sky.Resources.from_yaml_config(resources(place))
    spot = " (spot)" if place.use_spot else ""
    clouds = CATALOGUED if wanted.cloud is None else [str(wanted.cloud).lower()]
    prices = [entry for cloud in clouds if (entry := _cheapest(wanted, cloud)) is not None]
    if not prices:
        return None
    price, machine, cloud = min(prices)
    count = f"{place.nodes} × " * (place.nodes > 1)
    return Offer(f"{count}{machine} on {cloud}{spot}", price * place.nodes, source=CATALOGUE)


def _cheapest(wanted: Any, cloud: str) -> tuple[float, str, str] | None:
    """Return price, type and cloud of the cheapest machine of a cloud; None if its catalogue has none."""
    from sky import catalog

    size = {"cpus": wanted.cpus, "memory": wanted.memory, "region": wanted.region, "use_spot": wanted.use_spot}
    try:
        if wanted.accelerators:
            ((name, count),) = wanted.accelerators.items()
            machines, _ = catalog.get_instance_type_for_accelerator(name, count, **size, clouds=cloud)
        else:
            machines = [catalog.get_default_instance_type(**size, clouds=cloud)]
        machine = machines[0] if machines else None
        if machine is None:
            return None
        price = catalog.get_hourly_cost(machine, wanted.use_spot, wanted.region, None, clouds=cloud)
    except Exception:  # noqa: BLE001  without a network there is no catalogue, and each cloud fails in its own way
        return None
    return (price, machine, cloud) if math.isfinite(price) else None


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
