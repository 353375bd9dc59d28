"""Specs: plain, typed, immutable descriptions of what to build.

There are two kinds. A `Spec` is a pydantic model that is defined beside the component it configures; every field has a
docstring. A `Target` names a class or function by dotted path,
`{"_target_": "components.environments.worlds.shop.Shop", ...}`, with its arguments; it selects environments, rewards
and filters, built-in or a user's own. Its arguments are validated against the signature. Only names below the allowed
packages are imported.

Specs are light: nothing here, and no module that only defines a spec, imports torch, prefect, mlflow or hydra.
`validate` collects every mistake into one `SpecError`, each with its key path and the nearest valid name.
"""

from components.specs.base import FieldError, Spec, nearest
from components.specs.target import Target
from components.specs.validation import names_below, validate

__all__ = ["FieldError", "Spec", "Target", "names_below", "nearest", "validate"]
