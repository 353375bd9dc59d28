"""Results of the recipes: docs/results/recipes.json, and the table on docs/results/recipes.md.

    python -m docs.recipes run NAME [NAME ...] [--seeds 0 1 2] [--root DIR] [--jobs N] [-- OVERRIDE ... [-- ...]]
    python -m docs.recipes flat NAME "REASON"
    python -m docs.recipes

`run` runs the experiments for each seed and each list of overrides (`-- -- X=1`: without, and with `X=1`), and records
each run when it ends; with the same root, an interrupted command continues. `flat` records why one learned nothing;
without arguments the page and its plot are written again. A record has one object for each run: `experiment`,
`model` (its name), `seed`, `metric`, `before`, `after`, `gain` with its paired `interval`, `seconds` (of all stages,
cached ones included), `peak_memory_gb` (of the recorded process, in which cached stages take none), `command`,
`commit`, `processor`, `jobs` (runs at the same time), and `flat`: null, or the reason why nothing was learned. A recipe
that learns from a file also has `file`: the commands that make it (docs/recipe_files.py). `invalid` and `valid_success`
are the share of episodes with an invalid action, and the success of the others, before and after; null where the
environment does not count invalid actions, and in rows that were recorded without them.
`before` is the policy that the recipe's last training phase starts from: after the supervised warmup, if there is one.
Runs with overrides are variants: they have the overrides in `overrides`, and a table of their own that compares them
with the experiment. `success_by_round`, `training_reward_by_round`, `guards` (those that triggered) and `reported`
(numbers of the recipe's own) are those of the result line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from statistics import fmean
from typing import Any

from components.evaluation.metrics import Estimate, seeds_difference, seeds_interval
from docs import baselines, recipe_files
from docs.generated import Generated, table
from docs.recipes_plot import plot
from docs.results import ROOT, commit, processor
from flows.experiment.compose import compose
from flows.experiment.composer import Composer

RECORD = ROOT / "docs" / "results" / "recipes.json"
UNEXPLAINED = "the interval of the gain includes 0"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run")
    run.add_argument("names", nargs="+")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--root", help="folder of the runs, which share the stages that they have in common")
    run.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on one CPU core if several")
    flat = commands.add_parser("flat")
    flat.add_argument("name")
    flat.add_argument("reason")
    own, *variants = split_at_dashes(arguments)
    options = parser.parse_args(own)
    failed: list[str] = []
    if options.command == "run":
        failed = run_all(options, variants or [[]])
    elif options.command == "flat":
        explain(options.name, options.reason)
    for page in PAGES:
        page.write()
    PLOT.write_text(plot(by_experiment()), encoding="utf-8")
    if failed:
        sys.exit(f"not recorded, because the run failed: {', '.join(failed)}")


def split_at_dashes(arguments: list[str]) -> list[list[str]]:
    """Return the arguments before the first `--`, and those after each."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def run_all(options: argparse.Namespace, variants: list[list[str]]) -> list[str]:
    """Run the experiments for the seeds with each list of overrides, and record each when it ends. Return those that
    failed."""
    options.commit = commit()
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            pool.submit(run_experiment, name, seed, options, overrides): shlex.join([name, f"seed={seed}", *overrides])
            for seed in options.seeds
            for name in options.names
            for overrides in variants
        }
        for done in as_completed(runs):
            if isinstance(done.exception(), subprocess.CalledProcessError):
                failed.append(runs[done])
            else:
                record(done.result())
    return failed


def run_experiment(experiment: str, seed: int, options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Run an experiment with a seed, and return its row."""
    recipe_files.make(experiment, options.root)
    line = arguments(experiment, seed, overrides)
    place = [f"root={options.root}"] if options.root else []
    threads = {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
    run = subprocess.run(
        [sys.executable, "-m", "flows.run", *line, *place],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **threads},
    )
    row = row_of(json.loads(run.stdout.splitlines()[-1]), experiment, overrides)
    return row | {
        "model": compose(line).model.name,
        "jobs": options.jobs,
        "commit": options.commit,
        "processor": processor(),
    }


def arguments(experiment: str, seed: int, overrides: list[str]) -> list[str]:
    """Return the arguments of the run of an experiment with a seed."""
    return [f"+experiment={experiment}", f"seed={seed}", *recipe_files.arguments(experiment), *overrides]


def record(row: dict[str, Any]) -> None:
    """Replace the row of this experiment, its overrides and its seed in the record."""
    write([*(other for other in rows() if _key(other) != _key(row)), row])


def _key(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return row["experiment"], row["overrides"], row["seed"]


def row_of(result: dict[str, Any], experiment: str, overrides: list[str]) -> dict[str, Any]:
    """Return the row of a run from its result line."""
    trained_further = not {"evaluate[final]", "evaluate[feedback]"}.isdisjoint(result["stages"])
    warmed_up = result["success_sft"] is not None and trained_further
    before = result["success_sft"] if warmed_up else result["success_start"]
    interval = result["gain_interval"]
    return {
        "experiment": experiment,
        "overrides": overrides,
        "seed": result["seed"],
        "metric": "held-out success",
        "before": before,
        "after": result["success"],
        "gain": result["gain"],
        "interval": interval,
        "seconds": round(result["seconds"] + result["cached_seconds"], 2),
        "peak_memory_gb": result["peak_memory_gb"],
        "success_by_round": result["success_by_round"],
        "training_reward_by_round": result["training_reward_by_round"],
        "guards": result["guards"],
        "reported": result["reported"],
        "command": shlex.join(["python", "-m", "flows.run", *arguments(experiment, result["seed"], overrides)]),
        **({"file": commands} if (commands := recipe_files.commands(experiment)) else {}),
        **{name: _before_after(result, name) for name in ("invalid", "valid_success")},
        "flat": None if interval is not None and interval[0] > 0 else UNEXPLAINED,
    }


def _before_after(result: dict[str, Any], name: str) -> list[float] | None:
    before = result.get(f"{name}_before")
    return None if before is None else [before, result[name]]


def explain(experiment: str, reason: str) -> None:
    """Record why the runs of an experiment whose gain is not above 0 learned nothing."""
    write([row | {"flat": reason} if row["experiment"] == experiment and row["flat"] else row for row in rows()])


def rows() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.is_file() else []


def write(new: list[dict[str, Any]]) -> None:
    """Write the record, sorted by experiment, overrides and seed."""
    new.sort(key=_key)
    RECORD.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def summary_table() -> str:
    """Return a table of the means over the seeds of each experiment, with intervals of the gain over and within
    them."""
    gains = ["Before", "After", "Gain [95 % over seeds]", "Seeds with gain"]
    head = ["Experiment", "Model", "Seeds", *gains, "Random", "Invalid", "Success without invalid", "Minutes", "Memory"]
    cells = []
    for experiment, runs in by_experiment().items():
        cells.append(
            [
                f"`{experiment}`",
                ", ".join(sorted({f"`{row['model']}`" for row in runs})),
                str(len(runs)),
                f"{fmean(row['before'] for row in runs):.2f}",
                f"{fmean(row['after'] for row in runs):.2f}",
                _gain(runs),
                f"{sum(row['flat'] is None for row in runs)} of {len(runs)}",
                random_success(experiment),
                _means(runs, "invalid"),
                _means(runs, "valid_success"),
                f"{fmean(row['seconds'] for row in runs) / 60:.1f}",
                f"{max(row['peak_memory_gb'] for row in runs):.1f} GB",
            ]
        )
    reasons = {row["experiment"]: row["flat"] for row in rows() if row["flat"] and not row["overrides"]}
    flat = "".join(f"\n- `{name}`: {reason}" for name, reason in reasons.items())
    return table(head, cells) + (f"\nSeeds without gain:\n{flat}\n" if flat else "")


def random_success(experiment: str) -> str:
    """Return the success of random legal actions on the held-out scenarios of an experiment, from the record of a task
    with the same environment; a dash where none is recorded."""
    for row in baselines.rows():
        random = row["policies"]["random"]
        if random and environment_of(row["experiment"]) == environment_of(experiment):
            return f"{random['success']:.2f}"
    return "–"


@cache
def environment_of(experiment: str) -> dict[str, Any]:
    """Return the configuration of the environment of a recipe, whose packages need not be installed."""
    composer = Composer()
    data, _ = composer.point(composer.parse([f"+experiment={experiment}", *recipe_files.arguments(experiment)])[0])
    return dict((data or {})["environment"])


def _means(runs: list[dict[str, Any]], name: str) -> str:
    """Return the means over the seeds of a measure before and after, as text."""
    recorded = [row[name] for row in runs if row.get(name)]
    return " → ".join(f"{fmean(values):.2f}" for values in zip(*recorded, strict=True)) or "–"


def results_table() -> str:
    """Return the table of the recorded results."""
    head = ["Experiment", "Seed", "Before", "After", "Gain [95 %]", "Seconds", "Runs at once", "Commit"]
    cells = [
        [
            " ".join([f"`{row['experiment']}`", *(f"`{override}`" for override in row["overrides"])]),
            str(row["seed"]),
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['gain']:+.3f} [{row['interval'][0]:+.3f}, {row['interval'][1]:+.3f}]",
            f"{row['seconds']:.0f}",
            str(row["jobs"]),
            row["commit"],
        ]
        for row in rows()
    ]
    processors = ", ".join(sorted({row["processor"] for row in rows()}))
    return f"{table(head, cells)}\nProcessors: {processors or 'none'}.\n"


def variants_table() -> str:
    """Return a table of the experiments that have variants: each setting with its means over the seeds, and the
    difference of the variant to the experiment, paired by seed, with intervals over and within the seeds."""
    groups: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for row in rows():
        groups.setdefault((row["experiment"], *row["overrides"]), {})[row["seed"]] = row
    cells = []
    for name in sorted({setting[0] for setting in groups if len(setting) > 1}):
        own = groups.get((name,), {})
        for setting, runs in sorted((item for item in groups.items() if item[0][0] == name), key=lambda item: item[0]):
            shared = sorted(own.keys() & runs.keys())
            for measure, values in _measures(list(runs.values())).items():
                base = _measures([own[seed] for seed in shared]).get(measure, [])
                mine = _measures([runs[seed] for seed in shared]).get(measure, [])
                paired = len(setting) > 1 and len(base) == len(mine) == len(shared) > 0
                difference = _signed(seeds_difference(list(zip(base, mine, strict=True)))) if paired else ""
                title = " ".join(f"`{part}`" for part in setting)
                mean = fmean(value for value, _ in values)
                cells.append([title, measure, str(len(values)), f"{mean:.3f}", difference])
    return table(["Setting", "Measure", "Seeds", "Mean", "Difference to the experiment [95 % over seeds]"], cells)


def files_table() -> str:
    """Return a table of the experiments that learn from a file: its form, and means over the seeds."""
    head = ["Experiment", "`--form`", "Seeds", "Before", "After", "Gain [95 % over seeds]"]
    groups, cells = by_experiment(), []
    for experiment, file in recipe_files.RECIPES.items():
        if file.form == recipe_files.CHOICES:
            continue
        runs = groups.get(experiment, [])
        means = [f"{fmean(row[name] for row in runs):.2f}" for name in ("before", "after")] if runs else ["", ""]
        gain = _gain(runs) if runs else "not recorded"
        cells.append([f"`{experiment}`", f"`{file.form}`", str(len(runs)), *means, gain])
    return table(head, cells)


def guards_table() -> str:
    """Return a table of the experiment `reward_hacking`: training reward and held-out success by round for each seed,
    and the guards that triggered."""
    cells = []
    for row in rows():
        if row["experiment"] != "reward_hacking" or row["overrides"]:
            continue
        evaluated = {0: row["before"], **{int(n): success for n, success in row["success_by_round"].items()}}
        rewards = {int(n): reward for n, reward in row["training_reward_by_round"].items()}
        for number, success in evaluated.items():
            names = [f"`{guard['guard']}`" for guard in row["guards"] if guard["step"] == number]
            reward = rewards.get(max(number, 1))
            shown = "" if reward is None else f"{reward:.3f}"
            cells.append([str(row["seed"]), str(number), shown, f"{success:.3f}", ", ".join(names)])
    return table(["Seed", "Round", "Training reward", "Held-out success", "Guard"], cells)


def _measures(runs: list[dict[str, Any]]) -> dict[str, list[Estimate]]:
    """Return held-out success, and the numbers that the recipe reports, of each run by name. The interval of the gain
    is also that of the success after it; the reported numbers have none."""
    names = dict.fromkeys(name for run in runs for name in run["reported"])
    reported: dict[str, list[Estimate]] = {
        name: [(run["reported"][name], None) for run in runs if name in run["reported"]] for name in names
    }
    success: list[Estimate] = [(run["after"], [run["before"] + bound for bound in run["interval"]]) for run in runs]
    return {"held-out success": success, **reported}


def _gain(runs: list[dict[str, Any]]) -> str:
    return _signed(seeds_interval([run["gain"] for run in runs], [run["interval"] for run in runs]))


def _signed(mean: dict[str, Any]) -> str:
    """Return a mean of differences over seeds with its interval as text."""
    bounds = "" if mean["low"] is None else f" [{mean['low']:+.2f}, {mean['high']:+.2f}]"
    return f"{mean['mean']:+.2f}{bounds}"


def by_experiment() -> dict[str, list[dict[str, Any]]]:
    """Return the rows by experiment, without variants, ordered by mean success after training, best first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows():
        if not row["overrides"]:
            groups.setdefault(row["experiment"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: -fmean(row["after"] for row in item[1])))


PAGE = Generated("results/recipes.md", "recipes-table", results_table)
SUMMARY = Generated("results/recipes.md", "recipes-summary", summary_table)
VARIANTS = Generated("results/recipes.md", "recipes-variants", variants_table)
GUARDS = Generated("results/recipes.md", "recipes-guards", guards_table)
FILES = Generated("guides/own_data.md", "recipes-files", files_table)
PLOT = RECORD.with_name("recipes.svg")

PAGES = (SUMMARY, VARIANTS, GUARDS, PAGE, FILES)

if __name__ == "__main__":
    main(sys.argv[1:])
