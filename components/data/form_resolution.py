"""Form of a source's rows: the declared one, checked against the first rows, or the one recognised from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from components.data.examples import DataExample, RowProblem
from components.data.forms import FORMS, Form, recognise, score_form
from components.data.rows import BrokenRow
from components.data.sources import rows
from components.data.spec import DataSpec
from components.data.thumb_values import ThumbValues
from components.errors import Problem, SpecError
from components.specs import nearest

log = logging.getLogger(__name__)

RECOGNISED_FROM = 50
"""Number of rows that a form is recognised from."""


def resolve_form(spec: DataSpec, path: str = "data") -> str:
    """Return the form of the data: `spec.form`, or the recognised one. path: key of the spec, for messages. Raises
    SpecError for a form that does not fit the first rows, and ResourceError if the source cannot be read."""
    broken: list[BrokenRow] = []
    read = list(islice(rows(spec, lambda row: None if broken else broken.append(row)), RECOGNISED_FROM))
    first = [spec.without_ignored(row.values) for row in read]
    source = f"{path}.path" if spec.path is not None else f"{path}.dataset"
    filled = {name for values in first for name, value in values.items() if value is not None}
    columns = dict.fromkeys(name for values in first for name in values)
    names = ", ".join(name if name in filled else f"{name} (null)" for name in columns) or "none"
    if not first:
        reason = (
            f"no row can be read; the first is {broken[0]}"
            if broken
            else f"{', '.join(spec.paths) or spec.dataset} is empty"
        )
        raise SpecError([Problem(source, reason)])
    _refuse_unknown_columns(spec, path)
    if spec.form != "auto":
        form = FORMS[spec.form]
        if not score_form(form, first, spec.mapped):
            _refuse_values([form], first, spec, source, read[0].place)
            message = f"{spec.form}: does not fit the rows ({_reason(form, first[0], spec)}). Columns: {names}"
            raise SpecError([Problem(f"{path}.form", message)])
        return _two_valued(form, first, spec, path)
    name = recognise(first, spec.mapped)
    if name is None:
        _refuse_values(FORMS.values(), first, spec, source, read[0].place)
        forms = "; ".join(
            f"{form.name} ({', '.join(form.columns) if form.parts is None else form.summary})"
            for form in FORMS.values()
        )
        raise SpecError(
            [
                Problem(
                    f"{path}.form",
                    f"auto: no form fits the columns {names}. Expected the columns of one of the forms {forms}. Name "
                    f"the form, and map its columns with {path}.columns={{prompt: COLUMN, completion: COLUMN}}",
                )
            ]
        )
    log.info("%s: form %s, recognised from the columns %s", path, name, names)
    return _two_valued(FORMS[name], first, spec, path)


def _refuse_values(
    forms: Iterable[Form], first: Sequence[Mapping[str, Any]], spec: DataSpec, source: str, place: str
) -> None:
    """Raise SpecError if the first row has the columns of one of these forms: then its values are wrong. place: of this
    row."""
    fitting = [form for form in forms if form.parts is None and form.fits(first[0], spec.mapped)]
    if fitting:
        reasons = "; ".join(f"{form.name}: {_reason(form, first[0], spec)}" for form in fitting)
        raise SpecError([Problem(source, f"none of the first {len(first)} rows can be read. {place}: {reasons}")])


def _refuse_unknown_columns(spec: DataSpec, path: str) -> None:
    """Raise SpecError if `columns` has a key that no form has; with a declared form, one that it does not have."""
    forms, whose = (
        (FORMS.values(), "any form") if spec.form == "auto" else ([FORMS[spec.form]], f"the form {spec.form}")
    )
    names = list(dict.fromkeys(name for form in forms for name in form.names()))
    message = f"no such column of {whose}; expected one of {', '.join(names)}"
    if unknown := [name for name in spec.mapped if name not in names]:
        raise SpecError([Problem(f"{path}.columns.{name}", message, nearest(name, names)) for name in unknown])


def _two_valued(form: Form, first: Sequence[Mapping[str, Any]], spec: DataSpec, path: str) -> str:
    """Return the name of the form. Raises SpecError if the thumbs of the rows have more than two values."""
    thumbs = ThumbValues(form, spec.mapped)
    for values in first:
        thumbs.add(values)
    if (problem := thumbs.problem(path)) is not None:
        raise SpecError([problem])
    return form.name


def first_examples(spec: DataSpec) -> list[DataExample]:
    """Return the examples of the first rows that can be read; none of logs, whose rows are joined first. `spec.form` is
    resolved."""
    form, examples = FORMS[spec.form], []
    for row in islice(rows(spec, lambda broken: None), RECOGNISED_FROM) if form.parts is None else ():
        with suppress(RowProblem):
            examples.append(form.example(spec.without_ignored(row.values), spec.mapped))
    return examples


def _reason(form: Form, values: Mapping[str, Any], spec: DataSpec) -> str:
    if form.parts is not None:
        return f"expected {form.summary}"
    try:
        form.example(values, spec.mapped)
    except RowProblem as problem:
        return str(problem)
    return "no row can be read"
