"""Marks of fields whose values reach out of a run, and of arguments that may hold a reference to a variable.

A field that names code, a program, a server, a path or an environment variable says so in its annotation, as in
`command: Annotated[list[str] | None, PROGRAM]`; a `Callable` is code and a `Path` a path without a mark. Readers of
configurations that somebody else wrote, or may change, go by these marks (`components.specs.access`).

`REFERENCE` marks an argument that may hold `env:NAME`; in other arguments of a component a reference is refused.
"""

from __future__ import annotations

import collections.abc
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin


@dataclass(frozen=True)
class Access:
    """Mark of a field whose value reaches out of the run."""

    text: str
    """Verb and object, for messages."""


CODE = Access("runs code")
PROGRAM = Access("starts a program")
SERVER = Access("contacts a server")
FILES = Access("reads or writes files")
ENV_VARIABLE = Access("reads an environment variable")
MODEL = Access("reads a model folder or downloads a model")
REFERENCE = object()
"""Mark of an argument that may hold `env:NAME`."""


def declared_access(annotation: Any) -> Access | None:
    """Return the access that an annotation declares, directly or in its parts; None if it declares none."""
    if isinstance(annotation, Access):
        return annotation
    if collections.abc.Callable in (annotation, get_origin(annotation)):
        return CODE
    if inspect.isclass(annotation) and issubclass(annotation, Path):
        return FILES
    parts = get_args(annotation)
    return next((access for part in parts if (access := declared_access(part)) is not None), None)


def may_refer(annotation: Any) -> bool:
    """Return True for the annotation of an argument that may hold `env:NAME`."""
    return annotation is REFERENCE or any(map(may_refer, get_args(annotation)))
