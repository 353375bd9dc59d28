"""Import of data of one's own: rows to scored trajectories, each row checked, as a stream.

Memory is bounded: a row, a chunk of the writers, and the fingerprints of the rows (`fingerprints`). Each row fails at
most one check, the first of `import_report.CHECKS`. Rows that fail a check are left out (`on_problem: drop`), or end
the import after all rows were counted (`strict`).

Columns that the form does not read are searched for labels: a label that is not read makes bad answers look like good
ones, so a column is suspected if it has the name of a label, is true or false, or has two values. Memory is bounded:
some values of some columns.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.data.examples import DataExample, RowProblem
from components.data.fingerprints import MOST_FINGERPRINTS, Fingerprints, SimilarTexts
from components.data.forms import FORMS, score_form
from components.data.forms.answers import LABEL_COLUMNS, LABELS
from components.data.import_report import CheckResult, ImportReport, check_message
from components.data.logs.joining import form_rows
from components.data.row_checks import (
    Problems,
    TokenChecks,
    check_example,
    check_repeated,
    check_tokens,
    prompt_fingerprint,
)
from components.data.rows import BrokenRow, DataRow
from components.data.spec import DataSpec, SourceSpec
from components.data.thumb_values import ThumbValues
from components.errors import Problem, SpecError
from components.specs import nearest
from components.trajectories.store import scored_writer

log = logging.getLogger(__name__)

HELDOUT = "heldout"
"""Split and folder of the held-out rows."""


class DataImport:
    """One import. `spec.form` is resolved. problems: results of the checks of `tokens`, which are then not repeated.
    tools: those of rows that list none."""

    def __init__(
        self,
        spec: DataSpec,
        tokens: TokenChecks | None,
        on_row: Callable[[int], None] = lambda count: None,
        problems: Problems | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ):
        self._spec = spec
        self._form = FORMS[spec.form]
        self._tokens = tokens
        self._problems = problems or {}
        self._tools = tools
        self._on_row = on_row
        self._held_prompts = Fingerprints()
        self._unused = UnusedColumns()
        self._thumbs = ThumbValues(self._form, spec.mapped)
        self._ignored: set[str] = set()
        self._rewards: dict[str, float | None] = {}
        self.report = ImportReport(spec.form)

    def write(self, folder: Path) -> ImportReport:
        """Write the training examples to a folder, and held-out ones to its folder `heldout`. Raises SpecError if no
        example is left in a split, if too many were dropped, or, with `on_problem: strict`, if a row fails a check."""
        source = self._spec.heldout_source()
        with ExitStack() as stack:
            add = {"train": stack.enter_context(scored_writer(folder))}
            if self._spec.holds_out:
                (folder / HELDOUT).mkdir()
                add[HELDOUT] = stack.enter_context(scored_writer(folder / HELDOUT))
            for number, (split, example) in enumerate(self._examples(source), 1):
                self.report.comparable += split == "train" and self._is_comparable(example)
                for trajectory, score in example.scored(number, split):
                    add[split](trajectory, score)
                    self.report.episodes += split == "train"
                    self.report.rejected += split == "train" and not trajectory.success
                    if split == "train":
                        self.report.diversity.add(trajectory)
        self.report.unused = self._unused.counts()
        self._finish(HELDOUT in add)
        if dropped := self.report.first_dropped():
            log.warning("dropped %d of %d rows; the first is %s", self.report.dropped(), self.report.rows, dropped)
        for name, result in self.report.missing.items():
            first = result.examples[0]
            log.info("%d rows lack %s; the first is %s:%s: %s", result.count, name, *first.values())
        if self.report.unused:
            log.info("columns that the form %s does not read: %s", self._form.name, ", ".join(self.report.unused))
        return self.report

    def _is_comparable(self, example: DataExample) -> bool:
        """Return True if a row completes the first comparison of its prompt: answers of different rewards."""
        rewards = [candidate.reward for candidate in example.candidates]
        if len(rewards) > 1:
            return len(set(rewards)) > 1
        group = example.shared_scenario()
        if not group or rewards[0] is None:
            return False
        if group not in self._rewards:
            if len(self._rewards) < MOST_FINGERPRINTS:
                self._rewards[group] = rewards[0]
            return False
        earlier = self._rewards[group]
        if earlier is None or earlier == rewards[0]:
            return False
        self._rewards[group] = None  # counted
        return True

    def _examples(self, heldout: SourceSpec | None) -> Iterator[tuple[str, DataExample]]:
        """Yield the examples that pass the checks, each with its split; held-out sources come first."""
        if heldout is not None:
            for example in self._passing(heldout, leaks=False):
                self._held_prompts.add(prompt_fingerprint(example), self.report.heldout)
                self.report.heldout += 1
                yield HELDOUT, example
        share = self._spec.heldout or 0.0
        for example in self._passing(self._spec, leaks=heldout is not None):
            held = share > 0 and prompt_fingerprint(example) < share * 2**64
            self.report.heldout += held
            self.report.examples += not held
            yield HELDOUT if held else "train", example

    def _passing(self, source: SourceSpec, *, leaks: bool) -> Iterator[DataExample]:
        """Yield the examples of a source that pass the checks. leaks: check for held-out prompts."""
        fingerprints = Fingerprints()
        similar = SimilarTexts() if self._spec.near_duplicates != "ignore" else None

        def on_broken(broken: BrokenRow) -> None:
            self._count()
            self.report.checks["malformed"].add(broken, broken.reason)

        for number, row in enumerate(form_rows(self._form, source, on_broken), 1):
            self._count()
            try:
                self._ignored |= row.values.keys() & set(self._spec.ignore)
                values = self._spec.without_ignored(row.values)
                self._thumbs.add(values)
                example = self._form.example(values, self._spec.mapped, self._tools)
                example.place_reasoning(self._spec.reasoning)
                self._unused.add(values, example.input)
                check_example(example)
                if (recorded := self._problems.get(row.place)) is not None:
                    raise RowProblem(recorded[1], recorded[0])
                if self._tokens is not None:
                    check_tokens(example, self._tokens)
                if leaks and self._held_prompts.find(prompt_fingerprint(example)) is not None:
                    raise RowProblem("a held-out row has the same prompt", "leaked")
                check_repeated(example, number, fingerprints)
                self._check_similar(row, example, number, similar)
            except RowProblem as problem:
                self.report.checks[problem.check].add(row, str(problem))
                continue
            for name, reason in example.missing.items():
                self.report.missing.setdefault(name, CheckResult()).add(row, reason)
            yield example

    def _count(self) -> None:
        self.report.rows += 1
        self._on_row(self.report.rows)

    def _check_similar(self, row: DataRow, example: DataExample, number: int, similar: SimilarTexts | None) -> None:
        known = similar.add(example.text(), number) if similar is not None else None
        if known is not None:
            reason = f"almost the text of row {known} of those that can be read"
            if self._spec.near_duplicates == "problem":
                raise RowProblem(reason, "near_duplicate")
            self.report.similar.add(row, reason)

    def _finish(self, has_heldout: bool) -> None:
        """Raise SpecError if the import ends here."""
        report, strict = self.report, self._spec.on_problem == "strict"
        problems = []
        if strict or report.unusable() > self._spec.max_dropped * report.rows or not report.examples:
            problems = [
                Problem("data.path", check_message(name, result, strict=strict))
                for name, result in report.checks.items()
                if result.count
            ]
        if not strict and report.rows and report.unusable() > self._spec.max_dropped * report.rows:
            message = f"{self._spec.max_dropped:g}: {report.unusable()} of {report.rows} rows fail a check"
            problems.append(Problem("data.max_dropped", f"{message}. Correct the rows, or raise data.max_dropped"))
        if not report.examples:
            problems.append(Problem("data.path", "no row is left to train on"))
        problems += self._column_problems()
        if (thumbs := self._thumbs.problem()) is not None:
            problems.append(thumbs)
        if has_heldout and not report.heldout:
            text = "the held-out split is empty"
            if self._spec.heldout is not None:
                share = f"{self._spec.heldout:g}: a share of {report.rows} rows"
                text = (
                    f"{share}, but {text}; expected a larger share, such as data.heldout=0.5, data.heldout_path=FILE, "
                    "or data.heldout=0 to train on all rows and measure none"
                )
            problems.append(Problem(f"data.{self._heldout_key()}", text))
        if problems:
            raise SpecError(problems)

    def _column_problems(self) -> Iterator[Problem]:
        """Yield a problem for each unread column that may be a label, and for each ignored one that no row has."""
        for name in self._spec.ignore:
            if name not in self._ignored:
                yield Problem("data.ignore", f"{name!r}: no row has this column", nearest(name, self.report.unused))
        suspected = list(self._unused.suspected())
        keep = override("data.ignore", [*self._spec.ignore, *(column.name for column in suspected)])
        for column in suspected:
            mapped = {**self._spec.mapped, "label": column.name}
            advice = f"Leave {'it' if len(suspected) == 1 else 'them'} out: {keep}"
            if score_form(FORMS["thumbs"], [column.example], mapped):
                columns = override("data.columns", mapped)
                advice = f"If it says whether the answer is good: data.form=thumbs {columns}. {advice}"
            yield Problem(
                "data.columns",
                f"the form {self._form.name} does not read the column {column}, which may be a label: good and bad "
                f"answers would be trained on alike. {advice}",
            )

    def _heldout_key(self) -> str:
        names = ("heldout", "heldout_path", "heldout_split")
        return next(name for name in names if getattr(self._spec, name) is not None)


_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_][\w-]*", re.IGNORECASE | re.ASCII)
"""Text that needs no quotes."""


def override(key: str, value: Sequence[str] | Mapping[str, str]) -> str:
    """Return an override that sets a list or a mapping of texts, as a word of a shell's command line."""
    texts = {name: text if _PLAIN.fullmatch(text) else hydra_quoted(text) for name, text in _items(value)}
    if isinstance(value, Mapping):
        return shlex.quote(f"{key}={{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}")
    return shlex.quote(f"{key}=[{', '.join(texts.values())}]")


def _items(value: Sequence[str] | Mapping[str, str]) -> Iterable[tuple[Any, str]]:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def hydra_quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's grammar. Backslashes are escapes only before a quote."""
    escaped = re.sub(r"(?<!\\)(\\*+)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


MOST_COLUMNS = 1000
"""Maximum number of columns that are counted."""
_LONGEST = 80
_BOOLEAN = {"true", "false"}


@dataclass(slots=True)
class UnusedColumn:
    """Content of one column."""

    name: str
    example: Mapping[str, Any]
    """First row that has a value."""
    count: int = 0
    """Rows that have a value."""
    values: set[str] = field(default_factory=set)
    """First distinct values as text in lower case, at most three; a list or an object counts as three."""

    def add(self, value: Any) -> None:
        """Count a value."""
        self.count += 1
        if isinstance(value, list | dict):
            self.values |= {"list", "of", "values"}
        elif len(self.values) < 3:
            self.values.add(str(value).strip().lower()[:_LONGEST])

    def suspected(self, rows: int) -> bool:
        """Return True if the column may be a label. rows: rows with and without a value."""
        if self.name.lower() in LABEL_COLUMNS or self.values <= _BOOLEAN:
            return True
        if len(self.values) == 1:
            return self.count < rows and self.values <= LABELS.keys()
        return len(self.values) == 2 and self.count > 2

    def __str__(self) -> str:
        values = " and ".join(map(repr, sorted(self.values))) if len(self.values) < 3 else "more than two values"
        return f"{self.name!r} ({values})"


class UnusedColumns:
    """Columns of the rows of one import that its form does not read."""

    def __init__(self) -> None:
        self._columns: dict[str, UnusedColumn] = {}
        self._rows = 0

    def add(self, row: Mapping[str, Any], unread: Mapping[str, Any]) -> None:
        """Count a row. unread: its columns that were not read; empty text is no value."""
        self._rows += 1
        for name, value in unread.items():
            if value == "" or (name not in self._columns and len(self._columns) >= MOST_COLUMNS):
                continue
            self._columns.setdefault(name, UnusedColumn(name, row)).add(value)

    def counts(self) -> dict[str, int]:
        """Return the number of rows with a value by column."""
        return {name: column.count for name, column in self._columns.items()}

    def suspected(self) -> Iterator[UnusedColumn]:
        """Yield the columns that may be labels."""
        return (column for column in self._columns.values() if column.suspected(self._rows))
