"""`python -m flows.data FILE [overrides]`: inspection of a data file before any run.

    python -m flows.data train.jsonl
    python -m flows.data train.jsonl +experiment=dpo model=qwen3_0_6b data.form=preference --rows 3
    python -m flows.data data.dataset=openai/gsm8k data.config=main data.limit=1000

The file is imported as `flows.run flow=offline data.path=FILE` imports it, into a temporary folder. The command shows
its form, its columns, the counts and the checks, success by environment, the diversity of types and lengths, and the
first rows as they are trained on: in SFT form, the tokens with those that have a loss in colour, or without a terminal
in double brackets; and in RL form, the tokens of the prompt only. No model is loaded but its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import Problem, SpecError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.console import hush, printable, shorten
from flows.terminal.exit_codes import with_exit_codes
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from rich.text import Text

    from components.algorithms.spec import AlgorithmSpec
    from components.data.spec import DataSpec
    from components.trajectories.chat import ChatFormat
    from components.trajectories.schema import Trajectory
    from flows.experiment.spec import ExperimentSpec

MEASURED = 10_000
"""Number of episodes whose tokens are counted."""
SHOWN_TOKENS = 600
"""Maximum number of tokens of a row that are shown as text; JSON has all."""
STYLES = {True: ("bold green", "bold cyan"), False: ("dim", "")}
"""Colours of tokens with and without a loss; neighbours differ."""

Piece = tuple[str, bool]
"""Text of a token, and whether it has a loss."""


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 if a run would refuse the data, if the chosen algorithm cannot learn from
    it, or for an invalid configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.data",
        description="Inspects a data file before any run: form, columns, checks, diversity, and rows as trained on.",
    )
    parser.add_argument("words", nargs="+", metavar="FILE|key=value", help="files, and overrides as for flows.run")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="number of rows to show (default: 2)")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if options.rows < 0:
        parser.error(f"--rows {options.rows}: expected 0 or more")
    from components.data.importing import hydra_quoted
    from flows.experiment.compose import compose

    files = [word for word in options.words if "=" not in word]
    source = [f"data.path=[{', '.join(map(hydra_quoted, files))}]"] if files else []
    overrides = [word for word in options.words if "=" in word]
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    if files and "data.path" in keys:
        text = f"set together with FILE ({', '.join(files)}): expected one of them; several files are several words"
        raise SpecError([Problem("data.path", text)])
    spec = compose(["flow=offline", *source, *overrides], config_dir=options.config_dir)
    hush()
    with redirect_stdout(sys.stderr):  # stdout carries the result only
        data = inspect(spec, options.rows, chosen=not keys.isdisjoint(("algorithm", "experiment")))
    if options.json:
        print(json.dumps(data))
    else:
        _show(data)
    return 2 if data["problems"] else 0


def inspect(spec: ExperimentSpec, shown: int, *, chosen: bool) -> dict[str, Any]:
    """Return the inspection of the data of an experiment as JSON data. shown: number of rows with their tokens. chosen:
    True if the algorithm is the user's choice, and not the default."""
    from components.data.diversity import quantiles
    from components.data.importing import DataImport
    from components.data.row_checks import TokenChecks
    from components.models.weights import load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat
    from flows.experiment.data import resolve, tools_of_rows
    from flows.stages.base import Context

    data, model = resolve(spec.data).spec, spec.model.base()
    chat = ChatFormat(load_tokenizer(prepare(model, Context.created(spec.root, spec.store).cache)))
    tokens = TokenChecks(chat, model.max_length)
    tokens.require_place(data.reasoning)
    importer, problems = DataImport(data, tokens, tools=tools_of_rows(data, spec.environment)), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            importer.write(Path(folder))
        except SpecError as error:
            problems = [str(problem) for problem in error.problems]
        lengths, rows = _tokenized(Path(folder), chat, shown)
    report = importer.report.to_json()
    if lengths:
        report["diversity"]["tokens"] = quantiles(lengths)
    facts = {"columns": _columns(data), "algorithms": _algorithms(report), "model": model.name}
    if chosen and report["examples"]:
        problems = [*map(str, _learning_problems(spec, report)), *problems]
    return {**report, **facts, "rows_shown": rows, "problems": problems}


def _columns(data: DataSpec) -> dict[str, str]:
    """Return our names of the columns of the first rows; empty text for a column that is not read. The rows of a log
    have none."""
    from components.data.form_resolution import RECOGNISED_FROM
    from components.data.forms import FORMS
    from components.data.sources import rows

    form, columns = FORMS[data.form], dict[str, str]()
    for row in islice(rows(data, lambda broken: None) if form.parts is None else (), RECOGNISED_FROM):
        columns |= {name: columns.get(name, "") for name in row.values} | form.reading(row.values, data.mapped)
    return columns


def _algorithms(report: Mapping[str, Any]) -> list[str]:
    """Return the algorithms that learn from the data, with the filter that they need."""
    from components.algorithms.choices import ALGORITHMS

    able = [kind for kind in ALGORITHMS if _learns(kind, report)]
    filtered = " with filter=successful" if report["rejected"] else ""
    return [
        kind.model_fields["name"].default + (filtered if "corrections" in kind.feedback_kinds else "") for kind in able
    ]


def _learns(algorithm: type[AlgorithmSpec] | AlgorithmSpec, report: Mapping[str, Any]) -> bool:
    """Return True if the data has what an algorithm learns from: accepted answers if it imitates, as for corrections,
    any answers if it learns from scores, else comparable ones."""
    kinds = algorithm.feedback_kinds
    if "corrections" in kinds:
        return bool(report["episodes"] > report["rejected"])
    return bool(report["episodes"] if "scores" in kinds else "choices" in kinds and report["comparable"])


def _learning_problems(spec: ExperimentSpec, report: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of an algorithm that learns nothing from the data, or imitates rejected answers."""
    from components.filters.everything import Everything
    from flows.experiment.data_kinds import imitates_rejected, learns_nothing

    if not _learns(spec.algorithm, report):
        yield learns_nothing(spec.algorithm)
    elif spec.algorithm.imitates and report["rejected"] and spec.filter.factory() is Everything:
        yield imitates_rejected(spec.algorithm, report["rejected"])


def _tokenized(folder: Path, chat: ChatFormat, shown: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the tokens of the first episodes, and the first scenarios as they are trained on."""
    from components.algorithms.sft.trainer import histories
    from components.trajectories.store import read_scored

    names = ("trajectories.parquet", "scores.parquet", "selection.parquet")
    lengths: list[int] = []
    scenarios: dict[str, dict[str, Any]] = {}
    for trajectory in islice(read_scored(*(folder / name for name in names)), MEASURED):
        trained = [(row["input_ids"], set(row["targets"])) for row in histories(chat, trajectory)]
        lengths.append(sum(len(ids) for ids, _ in trained))
        if trajectory.group not in scenarios and len(scenarios) == shown:
            continue
        row = scenarios.setdefault(trajectory.group, {"rl": _prompt(chat, trajectory), "sft": []})
        sft = [list(_pieces(chat, ids, targets)) for ids, targets in trained]
        row["sft"].append({"id": trajectory.id, "reward": trajectory.reward, "tokens": sft})
    return lengths, list(scenarios.values())


def _prompt(chat: ChatFormat, trajectory: Trajectory) -> dict[str, Any]:
    """Return the tokens of a prompt, from which a policy generates, and the names of the values that rewards read."""
    from components.data.forms.writing import prompt_length
    from components.trajectories.convert import to_openai

    messages = trajectory.histories[0].messages
    prompt = [to_openai(message) for message in messages[: prompt_length(messages)]]
    ids = chat.prompt_ids(prompt, trajectory.tools)
    return {"tokens": list(_pieces(chat, ids, set())), "input": list(trajectory.scenario.input)}


def _pieces(chat: ChatFormat, ids: Sequence[int], targets: set[int]) -> Iterator[Piece]:
    for place, token in enumerate(ids):
        yield chat.tokenizer.decode([token], skip_special_tokens=False), place in targets


def _show(data: Mapping[str, Any]) -> None:
    """Print the inspection."""
    from rich.console import Console
    from rich.table import Table

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    colour = out.is_terminal and not out.no_color

    def table(*rows: Sequence[str]) -> None:
        grid = Table(*rows[0], box=None, pad_edge=False, header_style="bold")
        for row in rows[1:]:
            grid.add_row(*(printable(cell) for cell in row))
        out.print(grid, "")

    out.print(
        f"form {data['form']}: {data['examples']} of {data['rows']} rows to train on ({data['episodes']} episodes, "
        f"{data['rejected']} rejected, {data['comparable']} prompts with answers of different rewards), "
        f"{data['heldout']} held out, {data['dropped']} dropped",
        f"algorithms: {', '.join(data['algorithms']) or 'none'}",
        "",
        sep="\n",
    )
    table(("column", "read as"), *((name, ours or "input of the task") for name, ours in data["columns"].items()))
    failed = [(name, result) for name, result in data["checks"].items() if result["count"]]
    if data["similar"]["count"]:
        failed.append(("near_duplicate (used)", data["similar"]))
    firsts = [(name, str(result["count"]), _first(result["examples"][0])) for name, result in failed]
    table(("check", "rows", "first"), *firsts or [("all", "0", "no row fails a check")])
    environments = data["environments"].items()
    shares = [(name, str(row["trajectories"]), f"{row['success']:.0%}") for name, row in environments]
    table(("environment", "trajectories", "success"), *shares)
    if diversity := data["diversity"]:
        out.print(
            f"types: {len(diversity['types'])}, as diverse as {diversity['effective_types']:g} equally frequent ones"
        )
        lengths = {name: diversity[name] for name in ("turns", "characters", "tokens") if name in diversity}
        first = next(iter(lengths.values()))
        table(("length", *first), *((name, *(f"{value:g}" for value in row.values())) for name, row in lengths.items()))
    for number, row in enumerate(data["rows_shown"], 1):
        for sft in row["sft"]:
            for tokens in sft["tokens"]:
                learned = sum(trained for _, trained in tokens)
                out.print(
                    f"row {number}, SFT form: reward {sft['reward']}, {len(tokens)} tokens, {learned} with a loss",
                    style="bold",
                )
                out.print(_text(tokens, colour), "", soft_wrap=True, sep="\n")
        rl = row["rl"]
        read = f"; rewards read {', '.join(map(printable, rl['input']))}" if rl["input"] else ""
        out.print(f"row {number}, RL form: prompt of {len(rl['tokens'])} tokens{read}", style="bold")
        out.print(_text(rl["tokens"], colour), "", soft_wrap=True, sep="\n")
    for problem in data["problems"]:
        out.print(f"a run is refused: {printable(problem)}", soft_wrap=True)


def _first(row: Mapping[str, Any]) -> str:
    return shorten(f"{row['source']}:{row['number']}: {row['reason']}", 120)


def _text(tokens: Sequence[Piece], colour: bool) -> Text:
    """Return tokens as text: in colours, or separated by `|` and those with a loss in double brackets."""
    from rich.text import Text

    text, inside = Text(), False
    for place, (piece, trained) in enumerate(tokens[:SHOWN_TOKENS]):
        marks = (
            ("]]" if inside and not trained else "[[" if trained and not inside else "|") if place or trained else ""
        )
        shown = "↵\n".join(map(printable, piece.split("\n")))
        text.append(shown if colour else marks + shown, STYLES[trained][place % 2] if colour else "")
        inside = trained
    text.append("]]" if inside and not colour else "")
    if len(tokens) > SHOWN_TOKENS:
        text.append(f" … {len(tokens) - SHOWN_TOKENS} more tokens")
    return text


if __name__ == "__main__":
    leave(main)
