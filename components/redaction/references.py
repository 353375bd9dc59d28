"""`env:NAME`: a value that is read from an environment variable at the moment of use.

A configuration holds the reference, and so does everything that is stored, hashed or shown. A reference is a whole
value. It works where a value may need to be a secret: in arguments of a `_target_` with the mark `REFERENCE`
(`components.specs.marks`), in `extra` of a judge or provider, in `tracking.uri` and in `deploy.target.source`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from components.errors import ResourceError

KNOWN: set[str] = set()
"""Names of variables read as secrets in this process; their values are masked, whatever the name is."""
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]{0,254})")


def reference(value: Any) -> str | None:
    """Return the name of the variable that a value refers to, or None."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and value.startswith("env:") else None
    return match[1] if match else None


def secret_variable(name: str) -> str:
    """Return the value of an environment variable that holds a secret; empty if it is not set."""
    KNOWN.add(name)
    return os.environ.get(name, "")


def dereference(value: Any, path: str) -> Any:
    """Return plain data with every `env:NAME` replaced by the variable's value.

    path: key of the value, for errors. Raises ResourceError if a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: dereference(item, f"{path}.{name}") for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(dereference(item, path) for item in value)
    name = reference(value)
    if name is None:
        return value
    secret = secret_variable(name)
    if not secret:
        raise ResourceError(f"{path} = env:{name}: the environment variable {name} is not set; set it to the value")
    return secret
