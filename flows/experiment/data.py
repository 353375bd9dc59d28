"""Data of one's own as a run imports it: with the form resolved, digests of the content, and the tools of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.data.spec import DataSpec, SourceSpec
from components.errors import Problem, ResourceError, SpecError
from components.specs import Target
from flows.experiment.checks.worlds import offered_tools


@dataclass(frozen=True)
class ImportedData:
    """Source of an import stage."""

    spec: DataSpec
    """Settings with the resolved form."""
    content: str
    """Digest of the rows to train on."""
    heldout_content: str | None
    """Digest of the held-out rows; None without a source of their own."""


def resolve(spec: DataSpec, section: str = "data") -> ImportedData:
    """Return the source with its form and its digests. section: key of the spec, for messages. Raises SpecError without
    a source, for a source that cannot be read, and for a form that does not fit it."""
    from components.data.form_resolution import resolve_form

    if not spec.is_set:
        raise SpecError([Problem(f"{section}.path", f"needs a value: {section}.path=FILE, or {section}.dataset=NAME")])
    spec = until_now(spec, section)
    content = _digest(spec, f"{section}.path" if spec.path is not None else f"{section}.dataset")
    heldout = spec.heldout_source()
    heldout_key = "data.heldout_path" if spec.heldout_path is not None else "data.heldout_split"
    heldout_content = _digest(heldout, heldout_key) if heldout is not None else None
    try:
        form = resolve_form(spec, section)
    except ResourceError as error:
        raise SpecError([Problem(f"{section}.path", str(error))]) from None
    return ImportedData(spec.model_copy(update={"form": form}), content, heldout_content)


def tools_of_rows(spec: DataSpec, environment: Target | None) -> list[dict[str, Any]]:
    """Return the tools of rows that list none: those of the environment if one of the first rows calls tools without a
    list, else none. `spec.form` is resolved."""
    from components.data.form_resolution import first_examples

    if environment is None or not any(example.calls_unlisted_tools() for example in first_examples(spec)):
        return []
    return offered_tools(environment)


def until_now(spec: DataSpec, section: str) -> DataSpec:
    """Return conversations of a served policy up to now, because a server may go on recording."""
    from components.data.served.rows import ServedSource

    try:
        served = ServedSource.of(spec)
    except ResourceError as error:
        raise SpecError([Problem(f"{section}.path", str(error))]) from None
    return spec if served is None else spec.model_copy(update={"path": served.until_now().path})


def _digest(source: SourceSpec, key: str) -> str:
    from components.data.sources import content_digest

    try:
        return content_digest(source)
    except ResourceError as error:
        raise SpecError([Problem(key, str(error))]) from None
