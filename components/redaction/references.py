"""`env:NAME`: a value that is read from an environment variable at the moment of use.

A configuration holds the reference, and so does everything that is stored, hashed or shown. It stands for a whole
value, and works where a value may need to be a secret: in the arguments of a `_target_`, in `extra` of a judge, in
`tracking.uri` and in `deploy.target.source`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from components.errors import ResourceError

KNOWN: set[str] = set()
"""Names of variables that were read as secrets in this process: their values are masked, whatever they are called."""
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]{0,254})")


def reference(value: Any) -> str | None:
    """Return the name of the variable that a value refers to, or None."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) and value.startswith("env:") else None
    return found[1] if found else None


def secret_variable(name: str) -> str:
    """Return the value of an environment variable that holds a secret, empty where it is not set."""
    KNOWN.add(name)
    return os.environ.get(name, "")


def dereference(value: Any, path: str) -> Any:
    """Return plain data with every `env:NAME` replaced by the variable's value.

    path: key of the value, for errors. Raises ResourceError where a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: dereference(item, f"{path}.{name}") for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(dereference(item, path) for item in value)
    name = reference(value)
    if name is None:
        return value
    found = secret_variable(name)
    if not found:
        raise ResourceError(f"{path} = env:{name}: the environment variable {name} is not set; set it to the value")
    return found
