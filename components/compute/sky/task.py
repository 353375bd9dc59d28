"""SkyPilot task built from a place and a stage request, as data for `sky.Task.from_yaml_config`.

The code travels as the task's workdir, a snapshot; the request as an environment variable; data is in the store that
both machines reach. Secrets appear by name, without values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.compute.sky.spec import SkyPlace
from components.compute.torchrun import TOGETHER, member

REQUEST = "ESPALIER_REQUEST"
STAGE = "flows.stage"
"""Module that runs on the node, as `python -m`."""
ENVIRONMENT = """\
if ! [ -e "$ROOT/environment/.installed" ]; then
  python3 -m venv --clear "$ROOT/environment"
  "$ROOT/environment/bin/python" -m pip install --quiet uv
  requirements/uv.sh "$ROOT/environment/bin/python" pip install --quiet \\
    --python "$ROOT/environment/bin/python" --override requirements/overrides.txt -r requirements/lock.txt
  touch "$ROOT/environment/.installed"
fi
"""
"""Setup script of the environment with the project's dependencies, below the root; runs once per disk."""


def render(
    place: SkyPlace,
    request: Mapping[str, Any],
    workdir: Path,
    options: Sequence[str],
    environment: Mapping[str, str],
    module: str = STAGE,
) -> dict[str, Any]:
    """Return the task of one stage, or of another `module` that takes a request.

    workdir: snapshot of the code. options: options of the module besides request and root, such as the store.
    environment: variables for every stage; those of the place take precedence.
    """
    task = {
        "name": str(request["stage"]).replace("_", "-"),
        "resources": resources(place),
        "num_nodes": place.nodes,
        "workdir": str(workdir),
        "envs": {**environment, **place.envs, REQUEST: json.dumps(request, sort_keys=True)},
        "secrets": dict.fromkeys(place.secrets),
        "setup": _setup(place),
        "run": _run(place, module, str(request["stage"]), options),
    }
    return {name: value for name, value in task.items() if value not in ({}, "")}


def resources(place: SkyPlace) -> dict[str, Any]:
    """Return the resources requested for each node."""
    requested = {
        "infra": place.infra,
        "accelerators": place.accelerators,
        "cpus": place.cpus,
        "memory": place.memory,
        "disk_size": place.disk,
        "use_spot": place.use_spot or None,
        "image_id": place.image_id,
        "autostop": _autostop(place),
    }
    return {name: value for name, value in requested.items() if value is not None}


def _autostop(place: SkyPlace) -> dict[str, Any] | None:
    if place.autostop is None or place.managed:  # SkyPilot ends the machines of a managed job with it
        return None
    return {"idle_minutes": place.autostop, "down": place.down}


def _setup(place: SkyPlace) -> str:
    parts = ["set -e", f"ROOT={_folder(place.root)}", 'mkdir -p "$ROOT"'] if place.python is None else []
    if place.setup:
        parts.append(place.setup.strip())
    if place.python is None:
        parts.append(ENVIRONMENT.strip())
    return "\n".join(parts) + "\n" if parts else ""


def _run(place: SkyPlace, module: str, stage: str, options: Sequence[str]) -> str:
    """Return the command, for a training with all its processes. Its report goes to the log of the job, among its other
    output."""
    python = '"$ROOT/environment/bin/python"' if place.python is None else _folder(place.python)
    started_module = [module]
    if stage in TOGETHER and place.group > 1:
        started_module = ["components.compute.launch", "--processes", str(place.processes), "--", module]
        options = [*options, *member(place.strategy, place.group_timeout)]
    command = [python, "-m", *started_module, "--request", '"$REQUEST"', '"root=$ROOT"', *map(shlex.quote, options)]
    return "\n".join(
        [
            f"ROOT={_folder(place.root)}",
            'mkdir -p "$ROOT"',
            "REQUEST=$(mktemp)",
            f'printf %s "${REQUEST}" > "$REQUEST"',
            f"exec {' '.join(command)} < /dev/null",
            "",
        ]
    )


def _folder(path: str) -> str:
    """Return a path quoted for the shell of the node, where `~` is another home."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
