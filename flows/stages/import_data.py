"""Import stage: data of one's own as episodes to train on, with scores, and a report of the checks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact, Draft
from components.data.spec import DataSpec
from components.errors import ResourceError, SpecError
from components.json_text import read_json
from components.models.spec import ModelSpec
from components.trajectories.schema import SCHEMA_VERSION
from flows.stages.base import PROGRESS_SECONDS, Context, Inputs, Sharding, Stage, StagePart, StageSpec
from flows.stages.selections import counted, reasons

if TYPE_CHECKING:
    from components.data.row_checks import TokenChecks


class ImportStage(StageSpec):
    section: str = "data"
    """Key of the data in the configuration, for messages; not part of the key."""
    data: DataSpec
    """Source and settings; `form` is resolved, and the place of the source is not part of the key."""
    content: str
    """Digest of the rows to train on."""
    heldout_content: str | None = None
    """Digest of the held-out rows, if they have a source of their own."""
    model: ModelSpec
    """Model whose tokenizer and maximum length the rows are checked against."""
    tools: list[dict[str, Any]] = []
    """Tools of rows that list none, in OpenAI's JSON format."""

    def key_part(self) -> dict[str, Any]:
        names = ("source", "name", "revision", "max_length")
        model = {name: getattr(self.model, name) for name in names}
        model |= self.model.template_settings | self.model.content()
        contents = {"content": self.content, "heldout_content": self.heldout_content}
        tools = {"tools": self.tools} if self.tools else {}
        return {"data": self.data.meaning(), "model": model, **contents, **tools}


def import_data(spec: ImportStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `trajectories.parquet`, `scores.parquet`, `selection.parquet`, the same for held-out rows in `heldout/`,
    and `report.json`. Raises SpecError if no row is left, if too many rows fail a check, or, with `on_problem: strict`,
    if a row fails one; and ResourceError if the source changed after the start of the run."""
    with _named(spec):
        _refuse_change(spec)
        return _write(spec, _tokens(spec, context), draft, context)


def import_shard(
    spec: ImportStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart
) -> dict[str, float]:
    """Write `problems.json`: the rows of a part that fail the checks against the tokenizer, which take most of the
    time. Checks that compare rows are left to the join."""
    from components.data.row_checks import problems_of_part

    with _named(spec):
        _refuse_change(spec)
        on_row = _reporter(spec, context)
        tokens = _tokens(spec, context)
        problems = problems_of_part(spec.data, tokens, part.index, part.count, on_row, spec.tools)
    (draft.path / "problems.json").write_text(json.dumps(problems) + "\n", encoding="utf-8")
    return {"problems": float(len(problems))}


def join_import(
    spec: ImportStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the files of `import` with the results of its shards."""
    problems: dict[str, list[str]] = {}
    for shard in shards:
        problems |= read_json(shard.path / "problems.json")
    with _named(spec):
        _refuse_change(spec)
        return _write(spec, None, draft, context, problems)


@contextmanager
def _named(spec: ImportStage) -> Iterator[None]:
    """Write the keys of the data in messages as the configuration has them."""
    fields = ("path",) if spec.section == "feedback" else DataSpec.model_fields  # `feedback` has the others in `data`
    keys = re.compile(rf"\bdata\.({'|'.join(fields)})\b")

    def renamed(text: str) -> str:
        return keys.sub(rf"{spec.section}.\1", text)

    try:
        yield
    except SpecError as error:
        named = [replace(it, path=renamed(it.path), message=renamed(it.message)) for it in error.problems]
        raise SpecError(named) from None
    except ResourceError as error:
        raise ResourceError(renamed(str(error))) from None


def _refuse_change(spec: ImportStage) -> None:
    from components.data.sources import content_digest

    heldout = spec.data.heldout_source()
    sources = [(spec.data, spec.content), *([(heldout, spec.heldout_content)] if heldout is not None else [])]
    if any(content_digest(source) != content for source, content in sources):
        raise ResourceError("data.path: the source changed after the start of the run. Run the same command again")


def _tokens(spec: ImportStage, context: Context) -> TokenChecks:
    from components.data.row_checks import TokenChecks
    from components.models.weights import load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat

    tokens = TokenChecks(ChatFormat(load_tokenizer(prepare(spec.model, context.cache))), spec.model.max_length)
    tokens.require_place(spec.data.reasoning)
    return tokens


def _reporter(spec: ImportStage, context: Context) -> Callable[[int], None]:
    """Return a function that reports the number of rows regularly."""
    reported = time.monotonic()

    def on_row(count: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            context.progress(count, max(count, spec.data.limit or 0))

    return on_row


def _write(
    spec: ImportStage,
    tokens: TokenChecks | None,
    draft: Draft,
    context: Context,
    problems: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, float]:
    from components.data.importing import DataImport

    report = DataImport(spec.data, tokens, _reporter(spec, context), problems, spec.tools).write(draft.path)
    context.progress(report.rows, report.rows)
    (draft.path / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    return report.metrics()


def summary_text(metrics: Mapping[str, float]) -> str:
    """Return the form and the counts of an import as text: `form thumbs: used 90 of 100 rows; dropped
    6 too_long, 4 empty`."""
    if "examples" not in metrics:
        return ""
    form = next((name.removeprefix("form/") for name in metrics if name.startswith("form/")), "unknown")
    used = f"form {form}: used {metrics['examples']:.0f} of {metrics['rows']:.0f} rows"
    heldout = f", {metrics['heldout']:.0f} held out" if metrics.get("heldout") else ""
    counts = counted(reasons(metrics))
    dropped = f"; dropped {counts}" if counts else ""
    similar = f"; near duplicates among the used rows: {metrics['similar']:.0f}" if metrics.get("similar") else ""
    return f"{used}{heldout}{dropped}{similar}"


def count_rows(spec: ImportStage, inputs: Mapping[str, Artifact | None], context: Context) -> int:
    """Return the number of rows, also of held-out ones. The sources are read once for it, without any check."""
    from components.data.sources import rows

    heldout = spec.data.heldout_source()
    sources = [spec.data, *([heldout] if heldout is not None else [])]
    return sum(1 for source in sources for _ in rows(source, lambda broken: None))


STAGE = Stage(
    "import",
    8,
    ImportStage,
    "dataset",
    SCHEMA_VERSION,
    import_data,
    files={
        "trajectories.parquet": "episodes to train on",
        "scores.parquet": "their scores",
        "selection.parquet": "all of them, kept",
        "heldout/": "the same of held-out rows",
        "report.json": "form, counts, and example rows of each check",
    },
    optional=("heldout/",),
    volatile=("report.json",),
    order=5,
    unit="rows",
    sharding=Sharding(import_shard, join_import, count_rows),
    summary=summary_text,
    lineage="input",
)
