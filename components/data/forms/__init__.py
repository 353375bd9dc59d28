"""Forms of rows and their recognition. A module holds the forms of one kind: conversations, answers to prompts,
comparisons of answers, steps, labelled steps, episodes, logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.examples import RowProblem
from components.data.forms.answers import GROUND_TRUTH, PROMPT_COMPLETION, THUMBS
from components.data.forms.base import Form
from components.data.forms.comparisons import PREFERENCE, RANKING
from components.data.forms.conversations import AGENTTRAJ, MESSAGES, SHAREGPT
from components.data.forms.logs import LOGS
from components.data.forms.served import SERVED
from components.data.forms.step_labels import STEP_LABELS
from components.data.forms.steps import STEPS
from components.data.forms.trajectories import TRAJECTORIES

__all__ = ["FORMS", "Form", "recognise", "score_form"]

FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        TRAJECTORIES,
        SERVED,
        *LOGS,
        STEP_LABELS,
        STEPS,
        AGENTTRAJ,
        PREFERENCE,
        RANKING,
        THUMBS,
        SHAREGPT,
        MESSAGES,
        PROMPT_COMPLETION,
        GROUND_TRUTH,
    )
}
"""Forms by name. The order is that of recognition: the form with more columns of its own comes first."""


def recognise(rows: Sequence[Mapping[str, Any]], mapped: Mapping[str, str]) -> str | None:
    """Return the name of the form that reads the most of some rows, the first of equal ones; None if no form reads any.
    mapped: the user's columns by our names."""
    counts = {name: score_form(form, rows, mapped) for name, form in FORMS.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else None


def score_form(form: Form, rows: Sequence[Mapping[str, Any]], mapped: Mapping[str, str]) -> int:
    """Return the number of rows that a form reads."""
    if not set(mapped) <= set(form.names()):
        return 0
    count = 0
    for values in rows:
        try:
            if form.parts is not None:
                count += form.parts(values) is not None
                continue
            form.example(values, mapped)
            count += 1
        except RowProblem as problem:
            count += problem.fits
        except (LookupError, TypeError, AttributeError, ValueError):
            assert form.parts is not None
    return count
