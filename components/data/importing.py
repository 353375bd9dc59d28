"""Import of data of one's own: rows to scored trajectories, each row checked, as a stream.

Memory is bounded: a row, a chunk of the writers, and the fingerprints of the rows (`fingerprints`). Each row fails at
most one check, the first of CHECKS. Rows that fail a check are left out (`on_problem: drop`), or end the import after
all rows were counted (`strict`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from components.data.examples import DataExample, RowProblem
from components.data.fingerprints import MOST_FINGERPRINTS, Fingerprints, SimilarTexts, fingerprint
from components.data.forms import FORMS, Form, recognise, score_form
from components.data.sources import BrokenRow, DataRow, rows
from components.data.spec import DataSpec, SourceSpec
from components.data.tokens import TokenChecks
from components.data.unused_columns import UnusedColumns
from components.errors import Problem, SpecError
from components.specs import nearest
from components.trajectories.store import scored_writer

log = logging.getLogger(__name__)

CHECKS = {
    "malformed": "cannot be read, or lack a part of the form",
    "empty": "have an empty prompt, message or answer",
    "no_learnable_token": "have no assistant message to train on",
    "unknown_tool": "call a tool that is not among their tools",
    "tokenizer": "have text that the tokenizer or the chat template of the model cannot express",
    "too_long": "are longer than model.max_length",
    "leaked": "have the prompt of a held-out row",
    "duplicate": "repeat an earlier row",
    "near_duplicate": "almost repeat an earlier row",
}
"""Checks in their order, with what the rows that fail them have in common."""
HELDOUT = "heldout"
RECOGNISED_FROM = 50
"""Number of rows that a form is recognised from."""
EXAMPLES = 5
"""Number of rows that a report lists for each check."""


@dataclass
class CheckResult:
    """Rows that fail one check."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    """First rows: source, number and reason."""

    def add(self, row: DataRow | BrokenRow, reason: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append({"source": row.source, "number": row.number, "reason": reason})


COUNTS = ("rows", "examples", "heldout", "episodes", "rejected", "comparable")
"""Fields of a report that are counts."""


@dataclass
class ImportReport:
    """Counts of an import."""

    form: str
    rows: int = 0
    """Rows read, training and held-out, broken ones included."""
    examples: int = 0
    """Rows that are trained on."""
    heldout: int = 0
    """Rows that are held out."""
    episodes: int = 0
    """Trajectories that are trained on; a preference pair has two."""
    rejected: int = 0
    """Trajectories of these with a reward of at most 0.5, such as the rejected answer of a pair."""
    comparable: int = 0
    """Prompts that are trained on with answers of different rewards: pairs, ranked answers, and conversations with a
    common id and prompt."""
    similar: CheckResult = field(default_factory=CheckResult)
    """Rows that almost repeat an earlier row and are used."""
    unused: dict[str, int] = field(default_factory=dict)
    """Rows with a value by column, of the columns that the form does not read."""
    checks: dict[str, CheckResult] = field(default_factory=lambda: {name: CheckResult() for name in CHECKS})

    def dropped(self) -> int:
        """Return the number of rows that were left out."""
        return self.rows - self.examples - self.heldout

    def unusable(self) -> int:
        """Return the number of rows that were left out for another reason than a repetition, which loses nothing."""
        return self.dropped() - sum(self.checks[name].count for name in ("duplicate", "near_duplicate"))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        checks = {name: asdict(result) for name, result in self.checks.items()}
        counts = {name: getattr(self, name) for name in COUNTS}
        notes = {"similar": asdict(self.similar), "unused": self.unused}
        return {"form": self.form, **counts, "dropped": self.dropped(), "checks": checks, **notes}

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        counts = {f"dropped/{name}": float(result.count) for name, result in self.checks.items() if result.count}
        own = {name: float(getattr(self, name)) for name in COUNTS}
        own |= {"dropped": float(self.dropped()), "similar": float(self.similar.count)}
        return {**own, **counts, f"form/{self.form}": float(self.examples)}

    def first_dropped(self) -> str:
        """Return the first row that was dropped, with its place and the reason; empty if none was."""
        failed = [(name, result.examples[0]) for name, result in self.checks.items() if result.count]
        places = [(row["source"], row["number"], f"{_place(row)}: {row['reason']} ({name})") for name, row in failed]
        return min(places)[2] if places else ""


def resolve_form(spec: DataSpec, path: str = "data") -> str:
    """Return the form of the data: `spec.form`, or the recognised one. path: key of the spec, for messages. Raises
    SpecError for a form that does not fit the first rows, and ResourceError if the source cannot be read."""
    broken: list[BrokenRow] = []
    read = islice(rows(spec, lambda row: None if broken else broken.append(row)), RECOGNISED_FROM)
    first = [spec.without_ignored(row.values) for row in read]
    names = ", ".join(dict.fromkeys(name for values in first for name in values)) or "none"
    if not first:
        reason = (
            f"no row can be read; the first is {broken[0]}"
            if broken
            else f"{', '.join(spec.paths) or spec.dataset} is empty"
        )
        raise SpecError([Problem(f"{path}.path" if spec.path is not None else f"{path}.dataset", reason)])
    if spec.form != "auto":
        form = FORMS[spec.form]
        unknown = [name for name in spec.mapped if name not in form.names()]
        if unknown:
            names = ", ".join(form.names())
            message = f"no such column of the form {form.name}; expected one of {names}"
            raise SpecError(
                [Problem(f"{path}.columns.{name}", message, nearest(name, form.names())) for name in unknown]
            )
        if not score_form(form, first, spec.mapped):
            reason = _reason(form, first[0], spec)
            message = f"{spec.form}: does not fit the rows ({reason}). Columns: {names}"
            raise SpecError([Problem(f"{path}.form", message)])
        return spec.form
    name = recognise(first, spec.mapped)
    if name is None:
        fitting = [form for form in FORMS.values() if form.fits(first[0], spec.mapped)]
        reasons = "; ".join(f"{form.name}: {_reason(form, first[0], spec)}" for form in fitting)
        if fitting:
            message = f"auto: no form reads the first rows, which have the columns {names} ({reasons})"
            raise SpecError([Problem(f"{path}.form", message)])
        forms = "; ".join(f"{form.name} ({', '.join(form.columns)})" for form in FORMS.values())
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
    return name


def _reason(form: Form, values: Mapping[str, Any], spec: DataSpec) -> str:
    try:
        form.example(values, spec.mapped)
    except RowProblem as problem:
        return str(problem)
    return "no row can be read"


Problems = Mapping[str, Sequence[str]]
"""Check and reason of each row that fails a check of the tokenizer, by place."""


def problems_of_part(
    spec: DataSpec, tokens: TokenChecks, index: int, count: int, on_row: Callable[[int], None]
) -> dict[str, tuple[str, str]]:
    """Return check and reason, by place, of the rows that fail a check of `tokens`, among every `count`th row from
    number `index`. `spec.form` is resolved."""
    form = FORMS[spec.form]
    problems: dict[str, tuple[str, str]] = {}
    held = spec.heldout_source()
    for source in [spec, *([held] if held is not None else [])]:
        for number, row in enumerate(rows(source, lambda broken: None)):
            if number % count != index:
                continue
            on_row(number + 1)
            try:
                example = form.example(spec.without_ignored(row.values), spec.mapped)
                check_example(example)
                _check_tokens(example, tokens)
            except RowProblem as problem:
                problems[row.place] = problem.check, str(problem)
    return problems


class DataImport:
    """One import. `spec.form` is resolved. problems: results of the checks of `tokens`, which are then not repeated."""

    def __init__(
        self,
        spec: DataSpec,
        tokens: TokenChecks | None,
        on_row: Callable[[int], None] = lambda count: None,
        problems: Problems | None = None,
    ):
        self._spec = spec
        self._form = FORMS[spec.form]
        self._tokens = tokens
        self._problems = problems or {}
        self._on_row = on_row
        self._held_prompts = Fingerprints()
        self._unused = UnusedColumns()
        self._ignored: set[str] = set()
        self._rewards: dict[str, float | None] = {}
        self.report = ImportReport(spec.form)

    def write(self, folder: Path) -> ImportReport:
        """Write the training examples to a folder, and held-out ones to its folder `heldout`. Raises SpecError if no
        example is left in a split, if too many were dropped, or, with `on_problem: strict`, if a row fails a check."""
        source = self._spec.heldout_source()
        with ExitStack() as stack:
            add = {"train": stack.enter_context(scored_writer(folder))}
            if source is not None or self._spec.heldout is not None:
                (folder / HELDOUT).mkdir()
                add[HELDOUT] = stack.enter_context(scored_writer(folder / HELDOUT))
            for number, (split, example) in enumerate(self._examples(source), 1):
                self.report.comparable += split == "train" and self._is_comparable(example)
                for trajectory, score in example.scored(number, split):
                    add[split](trajectory, score)
                    self.report.episodes += split == "train"
                    self.report.rejected += split == "train" and not trajectory.success
        self.report.unused = self._unused.counts()
        self._finish(HELDOUT in add)
        if dropped := self.report.first_dropped():
            log.warning("dropped %d of %d rows; the first is %s", self.report.dropped(), self.report.rows, dropped)
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
                self._held_prompts.add(_prompt(example), self.report.heldout)
                self.report.heldout += 1
                yield HELDOUT, example
        share = self._spec.heldout or 0.0
        for example in self._passing(self._spec, leaks=heldout is not None):
            held = share > 0 and _prompt(example) < share * 2**64
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

        for number, row in enumerate(rows(source, on_broken), 1):
            self._count()
            try:
                self._ignored |= row.values.keys() & set(self._spec.ignore)
                values = self._spec.without_ignored(row.values)
                example = self._form.example(values, self._spec.mapped)
                self._unused.add(values, example.input)
                check_example(example)
                if (recorded := self._problems.get(row.place)) is not None:
                    raise RowProblem(recorded[1], recorded[0])
                if self._tokens is not None:
                    _check_tokens(example, self._tokens)
                if leaks and self._held_prompts.find(_prompt(example)) is not None:
                    raise RowProblem("a held-out row has the same prompt", "leaked")
                _check_repeated(example, number, fingerprints)
                self._check_similar(row, example, number, similar)
            except RowProblem as problem:
                self.report.checks[problem.check].add(row, str(problem))
                continue
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
                Problem("data.path", _check_message(name, result, strict=strict))
                for name, result in report.checks.items()
                if result.count
            ]
        if not strict and report.rows and report.unusable() > self._spec.max_dropped * report.rows:
            message = f"{self._spec.max_dropped:g}: {report.unusable()} of {report.rows} rows fail a check"
            problems.append(Problem("data.max_dropped", f"{message}. Correct the rows, or raise data.max_dropped"))
        if not report.examples:
            problems.append(Problem("data.path", "no row is left to train on"))
        problems += self._column_problems()
        if has_heldout and not report.heldout:
            problems.append(Problem(f"data.{self._heldout_key()}", "the held-out split is empty"))
        if problems:
            raise SpecError(problems)

    def _column_problems(self) -> Iterator[Problem]:
        """Yield a problem for each unread column that may be a label, and for each ignored one that no row has."""
        for name in self._spec.ignore:
            if name not in self._ignored:
                yield Problem("data.ignore", f"{name!r}: no row has this column", nearest(name, self.report.unused))
        for column in self._unused.suspected():
            mapped = {**self._spec.mapped, "label": column.name}
            keep = f"data.ignore={[*self._spec.ignore, column.name]}".replace("'", "")
            advice = f"Leave it out: {keep}"
            if score_form(FORMS["thumbs"], [column.example], mapped):
                columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in mapped.items())
                advice = (
                    f"If it says whether the answer is good: data.form=thumbs 'data.columns={{{columns}}}'. {advice}"
                )
            yield Problem(
                "data.columns",
                f"the form {self._form.name} does not read the column {column}, which may be a label: good and bad "
                f"answers would be trained on alike. {advice}",
            )

    def _heldout_key(self) -> str:
        names = ("heldout", "heldout_path", "heldout_split")
        return next(name for name in names if getattr(self._spec, name) is not None)


def check_example(example: DataExample) -> None:
    """Raise RowProblem if an example has an empty message, nothing to train on, or a call of an unknown tool."""
    tools = {tool["function"]["name"] for tool in example.tools}
    for candidate in example.candidates:
        trained = 0
        for number, message in enumerate(candidate.messages):
            if not message.content.strip() and not message.tool_calls and message.role in ("user", "assistant"):
                raise RowProblem(f"message {number} ({message.role}) is empty", "empty")
            trained += message.role == "assistant" and message.trained
            for call in message.tool_calls:
                if call.name not in tools:
                    names = ", ".join(sorted(tools)) or "none"
                    raise RowProblem(f"message {number} calls {call.name}; the tools are: {names}", "unknown_tool")
        if not trained:
            raise RowProblem("no assistant message is trained on", "no_learnable_token")


def _check_tokens(example: DataExample, tokens: TokenChecks) -> None:
    for candidate in example.candidates:
        tokens.check(candidate, example.tools)


def _check_repeated(example: DataExample, number: int, fingerprints: Fingerprints) -> None:
    known = fingerprints.add(fingerprint(example.content()), number)
    if known is not None:
        raise RowProblem(f"repeats row {known} of those that can be read", "duplicate")


def _prompt(example: DataExample) -> int:
    """Return the fingerprint of an example's prompt, uniform in [0, 2^64)."""
    text = "\0".join(part for message in example.prompt() for part in message)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']}:{row['number']}"


def _check_message(name: str, result: CheckResult, *, strict: bool) -> str:
    """Return a check's count and examples as a message."""
    rows_shown = "; ".join(f"{_place(row)} ({row['reason']})" for row in result.examples)
    more = f"; and {result.count - len(result.examples)} more" if result.count > len(result.examples) else ""
    advice = ". Correct them, or leave them out with data.on_problem=drop" if strict else ""
    return f"{name}: {result.count} rows {CHECKS[name]}: {rows_shown}{more}{advice}"
