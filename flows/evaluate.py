r"""`python -m flows.evaluate +experiment=NAME policies=[…] [overrides]`: comparison of policies on held-out scenarios.

    python -m flows.evaluate +experiment=quickstart policies=[base,latest]           before and after training
    python -m flows.evaluate +experiment=quickstart policies=[RUN@2,RUN@6,solver]    two steps of a run, and the optimum
    python -m flows.evaluate +experiment=quickstart policies=[base,random,openai/gpt-5-mini] samples=4 --json

Policies: `base` is the experiment's model without training. RUN is the final policy of an earlier run below the same
root (id, prefix of an id, experiment's name, or latest), RUN@STEP its policy after that step. `solver` plays the
environment's own solutions, `random` draws its actions. PROVIDER/MODEL is a prompted model of any provider that LiteLLM
supports; a mapping sets its engine: `policies=[base,'{model: openai/gpt-5-mini, key_variable: NAME}']`.

All policies play the scenarios of `evaluate.split`. The first one is the baseline of the paired differences. With
`samples=k` (or `evaluate.samples=k`) each plays a scenario k times, for pass@k and pass^k. Evaluations are stages, so
those that a run has already made come from the cache. The page is written below `<root>/evaluate/` and to MLflow.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts.roots import private_root
from flows.terminal.arguments import refuse_root_option
from flows.terminal.console import printable_lines
from flows.terminal.exit_codes import with_exit_codes
from flows.terminal.interrupt import leave
from flows.terminal.pages import write_new_page, write_page

if TYPE_CHECKING:
    from flows.evaluation.policies import NamedPolicy, PolicyName
    from flows.experiment.spec import ExperimentSpec

FOLDER = "evaluate"
MEASURES = ("success", "reward", "turns", "tokens", "seconds")
"""Measures in the table and in MLflow; pass_at_k and pass_hat_k follow if there are several samples."""


def evaluate(
    spec: ExperimentSpec,
    names: Sequence[PolicyName],
    samples: int = 1,
    *,
    overrides: Sequence[str] = (),
    html: Path | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Compare policies and return the result as JSON data. names: of the policies. samples: episodes per scenario;
    1: `evaluate.samples`. trust: read models that runs name. Raises SpecError, ResourceError, the stages' errors."""
    from components.pages.comparison import render_policies
    from components.rewards.llm.spec import asked_by
    from flows.evaluation import comparison, policies
    from flows.experiment import run_models
    from flows.experiment.prerequisites import check_used
    from flows.stages.base import Context
    from flows.stages.episodes import scenarios_of
    from flows.terminal.console import Console, hush, logging_to
    from flows.terminal.interrupt import Interruption

    samples = samples if samples > 1 else spec.evaluate.samples
    spec = comparison.sampled_spec(spec, samples)
    context = Context.at(spec.root, spec.store, lock_timeout=spec.compute.lock_timeout)
    spec = run_models.resolve(spec, context.store)
    resolved = policies.resolve(names, spec, context.store, trust)
    engines = [policy.spec.inference for policy in resolved if policy.actor == "policy"]
    check_used(spec, engines, asked_by(spec.evaluate.reward or spec.reward), ["evaluate"])
    hush()
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        stack.enter_context(redirect_stdout(sys.stderr))  # stdout carries the result only
        stack.callback(context.warm.close)
        scenarios = scenarios_of(spec.required_environment, spec.evaluate.split, context)[: spec.evaluate.scenarios]
        policies.check(resolved, scenarios)
        root = Path(spec.root)
        private_root(root)
        context.store.check()
        _check_weights(resolved, context)
        console = Console()
        log = root / "logs" / f"evaluate-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))

        from flows.execution.executor import Execution

        execution = Execution(spec, context, console, None, log)
        stack.callback(execution.close)
        evaluations = comparison.evaluate(execution, resolved, samples)
        artifacts = [artifact for artifact, _ in evaluations.values()]
        result = comparison.comparison(spec, resolved, artifacts, samples, overrides)
        data = comparison.figures(result, {name: status for name, (_, status) in evaluations.items()})
        text = render_policies(result)
        page = write_page(html, text) if html else write_new_page(root / FOLDER, spec.name, text)
        return {**data, "html": str(page), "mlflow_run": _track(spec, data, page)}


def _check_weights(policies: Sequence[NamedPolicy], context: Any) -> None:
    """Raise ResourceError if the weights of a model are missing."""
    from components.models.weights import check_weights

    for policy in policies:
        if policy.needs_weights:
            check_weights(policy.spec.model, context.cache)


def _track(spec: ExperimentSpec, data: dict[str, Any], page: Path) -> str:
    """Log the figures of each policy and the page to MLflow as a run of the experiment. Return the MLflow run's id."""
    from components.tracking.mlflow_tracker import Tracker

    tags = {"seed": str(spec.seed), "policies": ", ".join(data["policies"])}
    values: dict[str, float | None] = {}
    for name, figures in data["policies"].items():
        group = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # MLflow allows no other characters
        values |= {f"{group}/{measure}": figures.get(measure) for measure in (*_measures(data), "cost", "failed")}
    for name, difference in data["differences"].items():
        group = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        values |= {f"{group}/{measure}_gain": paired["difference"] for measure, paired in difference.items() if paired}
    with Tracker.open(Path(spec.root), spec.tracking, spec.name, tags=tags, run_name="evaluate") as run:
        run.log_metrics({name: value for name, value in values.items() if value is not None})
        run.log_report(page.read_text(encoding="utf-8"), "policies.html")
        return run.run_id


def _measures(data: dict[str, Any]) -> tuple[str, ...]:
    return MEASURES if data["samples"] == 1 else (*MEASURES, "pass_at_k", "pass_hat_k")


def show(data: dict[str, Any]) -> str:
    """Return the result as text."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    names = list(_measures(data))
    table = Table(title=_title(data), box=SIMPLE, title_justify="left")
    table.add_column("policy")
    for name in [*names, "cost", "failed"]:
        table.add_column(name.replace("_at_k", f"@{data['samples']}").replace("_hat_k", f"^{data['samples']}"))
    for name, figures in data["policies"].items():
        cells = [_cell(figures[measure], figures[f"{measure}_interval"]) for measure in names]
        failed = f"{figures['failed']} of {figures['episodes']}"
        table.add_row(Text(name), *cells, _cell(figures["cost"], None), failed)
    with out.capture() as text:
        out.print(table)
    lines = [line.rstrip() for line in text.get().splitlines()]
    for name, difference in data["differences"].items():
        for measure, paired in difference.items():
            lines.append(f"{name} against {data['baseline']}: {measure} {_gain(paired)}")
    return "\n".join([*lines, f"page: {data['html']}"]) + "\n"


def _title(data: dict[str, Any]) -> str:
    sampled = f", {data['samples']} episodes each" if data["samples"] > 1 else ""
    return (
        f"{data['experiment']}: {data['scenarios']} scenarios of {data['split']}{sampled}, "
        f"temperature {data['temperature']:g}"
    )


def _cell(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if interval is None else f"{value:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"


def _gain(paired: dict[str, Any] | None) -> str:
    if paired is None:
        return "not comparable: no scenario was finished by both"
    interval = "" if paired["interval"] is None else " [{:+.3g}, {:+.3g}]".format(*paired["interval"])
    return f"{paired['difference']:+.3g}{interval} on {paired['scenarios']} shared scenarios"


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if a stage fails; 2 for a user error; 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.evaluate", description="Compares policies on the same held-out scenarios."
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="policies=[base,RUN,RUN@STEP,random,solver,PROVIDER/MODEL], samples=K, and as for flows.run: "
        "+experiment=NAME key=value",
    )
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--trust", action="store_true", help="also read model folders that the record of a RUN names")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    out = sys.stdout
    from flows.evaluation.policies import own_keys
    from flows.experiment.compose import check
    from flows.terminal.overrides import mask_overrides

    names, samples, remaining = own_keys(options.overrides)
    spec = check(remaining, config_dir=options.config_dir, named=True)[0]
    result = evaluate(
        spec, names, samples, overrides=mask_overrides(options.overrides), html=options.html, trust=options.trust
    )
    print(json.dumps(result) if options.json else printable_lines(show(result).splitlines()), file=out, flush=True)
    return 0


if __name__ == "__main__":
    leave(main)
