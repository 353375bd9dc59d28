"""Lines of a run on the console: one for each round, and the results at its end."""

from __future__ import annotations

from collections.abc import Callable

from components.artifacts import Artifact
from flows.execution.executor import Execution
from flows.reporting.report import drift_figures, round_figures
from flows.reporting.results import Results, ResultTable, with_interval
from flows.stages import selections
from flows.terminal.console import Console, duration, printable, shorten

SHOWN_ANSWERS = 2
"""Number of prompts whose answers the console shows; the report has all."""
ANSWER_WIDTH = 100
"""Maximum number of characters of a prompt or an answer on the console."""


def round_teller(execution: Execution) -> Callable[[int, dict[str, Artifact]], None]:
    """Return a function that prints one line about each finished round."""

    def print_round(number: int, artifacts: dict[str, Artifact]) -> None:
        row = round_figures(artifacts) | drift_figures(execution, number)
        # a loop may train on episodes of an earlier round
        labels = {stage: f"{stage}[{number}]" for stage in artifacts}
        done = {stage: execution.done[label] for stage, label in labels.items() if label in execution.done}
        refills = [stage for label, stage in execution.done.items() if f"[{number}+" in label]
        all_done = [*done.values(), *refills]
        parts = [f"round {number}/{execution.spec.rounds}"]
        parts += [f"{title} {row[name]:{form}}" for name, title, form in _ROUND if name in row]
        if "skipped" in row:
            parts.append("no learning signal: training skipped")
        filters = [stage.artifact.metrics for stage in all_done if stage.artifact.stage == "filter"]
        if text := selections.summary_text(selections.total(filters)):
            parts.append(text)
        if refills:
            parts.append(f"{sum(stage.artifact.stage == 'collect' for stage in refills)} refilled")
        if all(stage.status == "cached" for stage in all_done):
            parts.append("cached")
        else:
            total = sum(stage.waited for stage in all_done)
            times = ", ".join(f"{kind} {stage.seconds:.1f}" for kind, stage in done.items())
            parts.append(f"{duration(total)} ({times})")
        execution.console.line("  ".join(parts))
        if execution.tracker is not None:
            tracker, seconds = execution.tracker, sum(stage.waited for stage in all_done)
            tracker.outbox.put(lambda: tracker.log_metrics({"time/round": seconds}, number))

    return print_round


_ROUND = (
    ("reward", "reward", ".3f"),
    ("success", "success", ".3f"),
    ("second/success", "second attempts", ".3f"),
    ("other/success", "other player", ".3f"),
    ("teacher/success", "teacher", ".3f"),
    ("judge_shift", "judge drift", "+.3f"),
    ("judge_flips", "flips", ".3f"),
    ("kl", "KL", ".4f"),
    ("kl_k1", "KL by k1", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("margin", "margin", ".3f"),
    ("accuracy", "accuracy", ".2f"),
    ("sampling_tokens_per_s", "tokens/s sampled", ".0f"),
    ("tokens_per_s", "trained", ".0f"),
)


def show(results: Results, console: Console, mlflow_ui: str, prefect_ui: str | None) -> None:
    """Print the results of a run to stderr. mlflow_ui, prefect_ui: commands that show the run in a browser; None for a
    run without Prefect."""
    for table in results.tables():
        _show_table(console, table)
    for answer in results.answers[:SHOWN_ANSWERS]:
        console.line(f"prompt of a held-out row: {_line(answer.prompt)}")
        for label, text in (("data", answer.reference), ("before", answer.before), ("after", answer.after)):
            console.line(f"  {label + ':':8}{_line(text)}")
    for text in results.differences_text():
        console.line(text)
    ran = sum(status == "ran" for status in results.stages.values())
    cost = f", cost {results.cost:.4g}" if results.cost else ""
    cost += f", and {results.unpriced_calls} judge calls of unknown price" if results.unpriced_calls else ""
    for name, sign in (("pass_at_k", "@"), ("pass_hat_k", "^")):
        if name in results.passes:
            console.line(f"pass{sign}{results.samples}: {with_interval(results.passes[name])}")
    for name, value in results.reported.items():
        console.line(f"{name}: {value:.3f}")
    console.line(f"{len(results.stages)} stages, {ran} ran, in {duration(results.seconds)}{cost}")
    if results.export:
        registered = f" (registered as {results.release.model})" if results.release.model else ""
        console.line(f"model:   {results.export}{registered}")
    console.line(f"report:  {results.report}")
    console.line(f"MLflow:  {mlflow_ui}")
    if prefect_ui is not None:
        console.line(f"Prefect: {prefect_ui}")


def _show_table(console: Console, table: ResultTable) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=table.title, box=SIMPLE, title_justify="left")
    for number, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.table(shown)


def _line(text: str) -> str:
    """Return the beginning of a text as one line of the console."""
    return shorten(printable(" ".join(text.split())) or "(empty)", ANSWER_WIDTH)
