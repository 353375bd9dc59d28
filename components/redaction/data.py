"""Secrets in nested data: a traversal that returns their key paths and a masked copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.errors import Problem, SpecError
from components.redaction.forms import MASK, mask_text, spans
from components.redaction.names import (
    VARIABLE,
    could_be_variable,
    is_harmless,
    is_secret,
    names_variable,
    words,
)
from components.redaction.references import reference

_DESCRIPTIVE = {
    "_target_",
    "enabled",
    "kind",
    "method",
    "mode",
    "name",
    "provider",
    "scheme",
    "type",
    "url",
    "user",
    "username",
}
"""Keys below a secret key whose values are not therefore secrets."""
_NAMES_OF_VARIABLES = {"headers", "secrets", "variables"}
"""Keys below which a value may be the name of the variable that holds the secret."""
_PAIR_LISTS = {"cookies", "env", "environ", "envs", "environment", "header", "headers"}
"""Keys of lists of pairs, `[[Authorization, VALUE]]`."""

_TARGETS = {"environment", "reward", "filter", "warmup.filter", "evaluate.reward", "calibrate.truth", "agent.function"}
"""Config keys that take a `_target_`, whose arguments accept `env:NAME` where they declare it."""


@dataclass(frozen=True)
class Secret:
    """Secret in data, without its value."""

    path: str
    """Key path, as a user would type it."""
    kind: str
    """Reason for recognising it as a secret."""


def secrets_in(data: Any, path: str = "") -> list[Secret]:
    """Return the secrets in plain data. path: key path of the data, whose last part counts as its key."""
    secrets: list[Secret] = []
    _walk(data, path, False, secrets)
    return secrets


def mask(value: Any, key: str = "") -> Any:
    """Return a copy of plain data (mappings, sequences, scalars) with its secrets masked. Absent values, flags and
    small numbers stay: `token: 3` is a count, and an absent password is useful to see."""
    return _walk(value, key, False, [])


def refuse_secrets(data: Any, path: str = "") -> None:
    """Raise SpecError if the data of a configuration holds secrets, with every key and no value."""
    if secrets := secrets_in(data, path):
        raise SpecError(problems(secrets))


def problems(secrets: Iterable[Secret]) -> list[Problem]:
    """Return the problems of a configuration with these secrets."""
    by_path = {secret.path: secret for secret in secrets}
    return [
        Problem(
            secret.path or "configuration",
            f"holds a secret ({secret.kind}). A configuration is stored and shown (artifacts, MLflow, Prefect, "
            f"records, reports); expected {_instead(secret.path)}",
        )
        for secret in by_path.values()
    ]


def _walk(value: Any, path: str, inherited: bool, secrets: list[Secret]) -> Any:
    """Return the value masked, and add its secrets to `secrets`. inherited: a parent key is a secret by its name."""
    if isinstance(value, Mapping):
        return _mapping(value, path, inherited, secrets)
    if isinstance(value, str):
        return _string(value, path, inherited, secrets)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return _sequence(value, path, inherited, secrets)
    if isinstance(value, bytes | bytearray):
        return _string(bytes(value).decode("utf-8", "replace"), path, inherited, secrets)
    if isinstance(value, int | float) and is_secret(path) and not is_harmless(value, path):
        secrets.append(Secret(path, "a value of a secret key"))
        return MASK
    return value


def _mapping(value: Mapping[Any, Any], path: str, inherited: bool, secrets: list[Secret]) -> dict[Any, Any]:
    inherited = inherited or is_secret(path)
    title = next((value[name] for name in ("name", "key", "header") if isinstance(value.get(name), str)), "")
    masked = {}
    for name, item in value.items():
        masked_name = mask_text(name) if isinstance(name, str) else name
        item_path = _joined(path, masked_name)
        if masked_name != name:
            secrets.append(Secret(item_path, "a secret in the name of a key"))
        if isinstance(name, str) and name.lower() == "value" and is_secret(title):
            masked[masked_name] = _walk(item, item_path, True, secrets)
        else:
            masked[masked_name] = _walk(item, item_path, inherited and str(name).lower() not in _DESCRIPTIVE, secrets)
    return masked


def _sequence(value: Sequence[Any], path: str, inherited: bool, secrets: list[Secret]) -> list[Any]:
    masked: list[Any] = []
    pair = len(value) == 2 and isinstance(value[0], str) and is_secret(value[0])
    parents = path.replace("/", ".").split(".")
    for index, item in enumerate(value):
        previous = value[index - 1] if index else None
        option = isinstance(previous, str) and previous.startswith("--") and "=" not in previous and is_secret(previous)
        listed = pair and index == 1 and any(part in _PAIR_LISTS for part in parents)
        secret = inherited or is_secret(path) or option or listed
        masked.append(_walk(item, f"{path}.{index}" if isinstance(item, Mapping | list) else path, secret, secrets))
    return masked


def _string(value: str, path: str, inherited: bool, secrets: list[Secret]) -> str:
    if reference(value) is not None:
        return value
    forms = spans(value)
    if forms:
        secrets.append(Secret(path, forms[0].kind))
        return MASK if inherited or is_secret(path) else mask_text(value)
    if names_variable(path) and value and not is_harmless(value, path) and not could_be_variable(value):
        secrets.append(Secret(path, "a value that is not the name of a variable"))
        return MASK
    if not (inherited or is_secret(path)) or is_harmless(value, path) or _is_name_of_variable(value, path):
        return value
    if words(path)[-1:] == ["dsn"] and "://" in value:  # a password in it would have been recognised by its form
        return value
    secrets.append(Secret(path, "a value of a secret key"))
    return MASK


def _is_name_of_variable(value: str, path: str) -> bool:
    parents = {part.lower() for part in path.split(".")}
    word = value.isalpha() and value.isupper()
    return bool(parents & _NAMES_OF_VARIABLES) and (word or VARIABLE.fullmatch(value) is not None)


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _instead(path: str) -> str:
    """Return the expected replacement of a secret at a key, or a note that none is read there."""
    remedy = _remedy(path)
    if remedy is None:
        return "no secret: nothing reads one here"
    return f"the name of an environment variable in its place: {remedy}"


def _remedy(path: str) -> str | None:
    parts = path.split(".")
    head = ".".join(parts[:2])
    if parts[0] == "compute" or "places" in parts:
        return "compute.places.PLACE.secrets=[NAME] passes a variable of this machine on"
    if parts[0] == "hydra":
        return "set it in the environment before the command (hydra.job.env_copy=[NAME] passes one on to a launcher)"
    if parts[0] == "store":
        return "a store reads its credentials from variables of its own: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if path == "tracking.uri":
        return "tracking.uri=env:NAME, or MLflow's own MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if path == "url":  # address of a server given to a command
        return "key_variable=NAME, or the option --key-variable NAME"
    if "inference" in parts:
        return f"{'.'.join(parts[: parts.index('inference') + 1])}.key_variable=NAME"
    if head == "deploy.target":
        return "deploy.target.key_variable=NAME, or deploy.target.source=env:NAME"
    if parts[0] in ("reward", "evaluate", "calibrate") and "extra" in parts:
        return f"{path}=env:NAME"
    if parts[0] in ("reward", "evaluate", "calibrate") and "model" in parts:
        return f"{'.'.join(parts[: parts.index('model') + 1])}.key_variable=NAME"
    if head == "environment.command":
        return "environment.variables=[NAME] passes a variable on to the program"
    if head == "environment.headers":
        return f"{path}=NAME, in capitals, names the variable that holds the header"
    if head == "environment.judge":
        return "environment.judge.key_variable=NAME"
    if parts[0] in _TARGETS or head in _TARGETS:
        return f"{path}=env:NAME, if the argument declares it (REFERENCE)"
    return None
