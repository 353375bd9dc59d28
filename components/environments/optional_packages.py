"""Packages that only one environment needs, and that are not installed with the rest."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from typing import Any

from components.errors import ResourceError


def needed(module: str, extra: str) -> Any:
    """The module. Raises ResourceError that says how to install it. extra: of espalier, which holds its package."""
    try:
        # Old syntax in packages, and greetings on stdout: nothing that a user could do about them.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"environment: the package {error.name or module} is missing; pip install 'espalier[{extra}]'"
        ) from error
