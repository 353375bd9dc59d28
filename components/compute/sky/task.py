"""SkyPilot task built from a place and a stage request, as data for `sky.Task.from_yaml_config`.

The code travels as the task's workdir, a snapshot; the request as an environment variable; data is in the store that
both machines reach. Secrets appear by name, without values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts.files import PACKAGES
from components.compute.runners import STAGE
from components.inference.spec import ENGINES, ServerEnvironment

if TYPE_CHECKING:
    from components.compute.sky.spec import SkyPlace

REQUEST = "ESPALIER_REQUEST"
NODE = "requirements/node.sh"
"""Script that installs what a stage needs below the root, once for each cluster, and runs Python with it."""


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
        "setup": f"set -e\n{place.setup.strip()}\n" if place.setup else "",
        "run": _run(template, request),
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


def _run(template: TaskTemplate, request: Mapping[str, Any]) -> str:
    """Return the command, for a training with all its processes. Its report goes to the log of the job, among its other
    output."""
    place, group, module, options = template.place, template.place.group, [template.module], template.options
    if place.python is None:
        python = [NODE, '"$ROOT/environments"', *requirements(request, options), "--"]
    else:
        python = [_folder(place.python)]
    if request["stage"] in template.distributed and group.size > 1:
        module = ["components.compute.launch", "--processes", str(group.processes), "--", *module]
        options = [*options, *group.options()]
    command = [*python, "-m", *module, "--request", '"$REQUEST"', '"root=$ROOT"', *map(shlex.quote, options)]
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


def requirements(request: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """Return the options of `NODE` for what a stage needs besides the locked packages: packages for the protocols of
    its store and data, and vLLM."""
    protocols = re.findall(r"\b([a-z0-9]+)://", json.dumps([request.get("spec"), list(options)]))
    packages = sorted({PACKAGES[protocol] for protocol in protocols if protocol in PACKAGES} - {"s3fs"})  # locked
    needed = [_environment(inference) for inference in _values(request.get("spec"), "inference")]
    generates = not {"solver", "random"} & set(_values(request.get("spec"), "actor"))
    servers = sorted({f"--{environment.package}" for environment in needed if environment and not environment.python})
    return [*(f"--package {package}" for package in packages), *(servers if generates else [])]


def _environment(inference: Any) -> ServerEnvironment | None:
    if not isinstance(inference, Mapping) or inference.get("name") not in ENGINES:
        return None
    return ENGINES[inference["name"]].model_validate(inference).environment


def _values(data: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key anywhere in JSON data."""
    if isinstance(data, Mapping):
        yield from (data[name] for name in data if name == key)
    for item in data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ():
        yield from _values(item, key)


def _folder(path: str) -> str:
    """Return a path quoted for the shell of the node, where `~` is another home."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
