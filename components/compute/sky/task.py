"""SkyPilot task built from a place and a stage request, as data for `sky.Task.from_yaml_config`.

The code travels as the task's workdir, a snapshot; the request as an environment variable; data is in the store that
both machines reach. Secrets appear by name, without values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.compute.runners import STAGE

if TYPE_CHECKING:
    from components.compute.sky.spec import SkyPlace

REQUEST = "ESPALIER_REQUEST"
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


@dataclass(frozen=True)
class TaskTemplate:
    """Part of a task that the stages of a run share."""

    place: SkyPlace
    name: str
    """Name of the cluster and of the jobs."""
    workdir: Path
    """Snapshot of the code."""
    options: Sequence[str] = ()
    """Options of the module besides request and root, such as the store."""
    module: str = STAGE
    """Module that runs on the node, as `python -m`, and takes a request."""
    distributed: Sequence[str] = ()
    """Stages in which several processes can train together."""


def render(template: TaskTemplate, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task of one request."""
    place, stage = template.place, str(request["stage"])
    task = {
        "name": stage.replace("_", "-"),
        "resources": resources(place),
        "num_nodes": place.nodes,
        "workdir": str(template.workdir),
        "envs": {**place.envs, REQUEST: json.dumps(request, sort_keys=True)},
        "secrets": dict.fromkeys(place.secrets),
        "setup": _setup(place),
        "run": _run(template, stage),
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


def _run(template: TaskTemplate, stage: str) -> str:
    """Return the command, for a training with all its processes. Its report goes to the log of the job, among its other
    output."""
    place, group, module, options = template.place, template.place.group, [template.module], template.options
    python = '"$ROOT/environment/bin/python"' if place.python is None else _folder(place.python)
    if stage in template.distributed and group.size > 1:
        module = ["components.compute.launch", "--processes", str(group.processes), "--", *module]
        options = [*options, *group.options()]
    command = [python, "-m", *module, "--request", '"$REQUEST"', '"root=$ROOT"', *map(shlex.quote, options)]
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
