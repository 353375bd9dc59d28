"""`task.toml` of Harbor's task format, schema 1.4 (`harbor.models.task.config` 0.26): what a sandbox without container,
network and services can honour. The rest is refused by name, and so are keys that Harbor does not have."""

from __future__ import annotations

import math
import os
import re
import tomllib
from typing import Any

from components.specs import nearest

_NUMBER = (int, float)
_EXPECTED: dict[Any, str] = {_NUMBER: "a positive number", str: "text", dict: "a table", list: "a list"}
_SERVICES = "needs services besides the sandbox"
_GPU = "needs hardware that the sandbox does not have"
_HOSTS = "lists hosts, but the sandbox has no network"
_SEPARATE = (
    "gives the tests an image of their own and nothing of the agent's but artifacts, and no image is built; if the "
    'tests can run on the whole working folder, set verifier.environment_mode = "shared" without verifier.environment'
)
_USER = "names a user, but the sandbox has only one"
KEYS: dict[str, Any] = {
    **dict.fromkeys(("schema_version", "source", "environment.docker_image", "environment.workdir"), str),
    **dict.fromkeys(("agent.network_mode", "verifier.network_mode", "environment.network_mode"), str),
    **dict.fromkeys(("verifier.environment_mode", "environment.os"), str),
    **dict.fromkeys(("task", "metadata", "solution.env", "verifier.env", "environment.env"), dict),
    **dict.fromkeys(("agent.timeout_sec", "verifier.timeout_sec", "environment.build_timeout_sec"), _NUMBER),
    **dict.fromkeys(("environment.cpus", "environment.memory_mb", "environment.storage_mb"), _NUMBER),
    **dict.fromkeys(("steps", "multi_step_reward_strategy"), "is for tasks of several steps, which are not supported"),
    **dict.fromkeys(("agent.user", "verifier.user"), _USER),
    **dict.fromkeys(("agent.allowed_hosts", "verifier.allowed_hosts", "environment.allowed_hosts"), _HOSTS),
    **dict.fromkeys(("environment.gpus", "environment.gpu_types", "environment.tpu"), _GPU),
    **dict.fromkeys(("environment.mcp_servers", "environment.healthcheck", "verifier.collect"), _SERVICES),
    "environment.skills_dir": "names skills, which agents do not get",
    "verifier.environment": _SEPARATE,
    "artifacts": list,
}
"""Type of the value of each key that is read, or the reason why it is refused unless it is null, 0 or an empty list."""
DEFAULTS: dict[str, Any] = {
    "verifier.timeout_sec": 600.0,
    **{key: {} for key in ("metadata", "solution.env", "verifier.env", "environment.env")},
}
"""Values that are not null where a task has none."""
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Names of environment variables."""
_SECTIONS = ("agent", "verifier", "environment", "solution")


def parse(text: str, offline: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the settings by key, such as `environment.workdir`, and the reasons why a task cannot run.

    offline: run a task that asks for a network without one. A task that does not state it has none, unlike in Harbor.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return {}, [f"is no TOML: {error}"]
    for name in _SECTIONS:
        if not isinstance(data.get(name, {}), dict):
            return {}, [f"{name} = {data[name]!r:.80}: expected a table"]
        data |= {f"{name}.{key}": value for key, value in data.pop(name, {}).items()}
    _rename(data)
    settings = dict.fromkeys(KEYS) | DEFAULTS
    problems = []
    for key, value in data.items():
        kind = KEYS.get(key)
        if kind is None:
            close = nearest(key, KEYS)
            problems.append(f"{key}: no such key" + (f". Did you mean {close!r}?" if close else ""))
        elif isinstance(kind, str):
            problems += [f"{key} {kind}"] if value or value == {} else []  # an empty table asks for the default
        elif not isinstance(value, kind) or isinstance(value, bool) or (kind is _NUMBER and not 0 < value < math.inf):
            problems.append(f"{key} = {value!r:.80}: expected {_EXPECTED[kind]}")
        else:
            settings[key] = value
    return settings, problems or _unfit(settings, offline)


def _rename(data: dict[str, Any]) -> None:
    """Replace earlier names of keys, as Harbor does."""
    if "version" in data:
        data.setdefault("schema_version", data.pop("version"))
    for name in ("memory", "storage"):
        size = re.fullmatch(r"([\d.]+)([GMK])", str(data.get(f"environment.{name}", "")).strip().upper())
        if size is not None:
            megabytes = int(float(size[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[size[2]])
            data.setdefault(f"environment.{name}_mb", megabytes)
            del data[f"environment.{name}"]
    if (internet := data.pop("environment.allow_internet", None)) is not None:
        data.setdefault("environment.network_mode", "public" if internet else "no-network")


def _unfit(settings: dict[str, Any], offline: bool) -> list[str]:
    """Return the reasons why the sandbox cannot honour valid settings."""
    problems = [
        f"{key} = {value}: the sandbox has no network. If the task does without, set environment.offline=true"
        for key, value in settings.items()
        if key.endswith("network_mode") and value not in (None, "no-network") and not offline
    ]
    problems += [
        f"{key}.{name} = {value!r:.80}: expected the name of a variable, and text without ${{...}}: variables of this "
        "machine are not passed on"
        for key in ("solution.env", "verifier.env", "environment.env")
        for name, value in settings[key].items()
        if not isinstance(value, str) or "${" in value or "\0" in value or not VARIABLE.fullmatch(name)
    ]
    problems += [
        f"environment.{name} = {size:g}: the sandbox needs at least {least}"
        for name, least in (("memory_mb", 32), ("storage_mb", 1))
        if (size := settings[f"environment.{name}"]) is not None and size < least
    ]
    if (settings["environment.os"] or "linux").lower() != "linux":
        problems.append(f"environment.os = {settings['environment.os']}: the sandbox has Linux")
    if settings["verifier.environment_mode"] not in (None, "shared"):
        problems.append(f"verifier.environment_mode = {settings['verifier.environment_mode']} {_SEPARATE}")
    if (cpus := settings["environment.cpus"] or 0) > (os.cpu_count() or 1):
        problems.append(f"environment.cpus = {cpus:g}: this machine has {os.cpu_count()}")
    return problems
