"""Import of optional packages that only one environment or command needs."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from typing import Any

from components.errors import ResourceError


def import_optional(module: str, extra: str, needed_by: str = "environment") -> Any:
    """Import and return a module.

    Raises ResourceError with the install command if it is missing. extra: the extra of espalier that installs it.
    needed_by: key or command that needs the module.
    """
    try:
        # Deprecated syntax in packages and banners on stdout: users cannot act on them.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{needed_by}: the package {error.name or module} is not installed; run pip install -e '.[{extra}]'"
        ) from error
