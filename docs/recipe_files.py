"""Files that some recipes are shown to learn from, made by commands.

`shop`: conversations of SmolLM2 with the customers of the shop, after its warmup of seed 0. `flows.runs export` writes
them in the form that a recipe reads. `games`: games of tic-tac-toe that a warmed-up policy of seed 0 plays;
`docs.simulated_annotator` writes choices between two games of a scenario.

`python -m docs.recipes run dpo` makes the file, unless this process has, and runs the recipe on it with the arguments
of RECIPES, for each seed: the policies of seeds 1 and 2 learn from episodes of another policy.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from threading import Lock

from docs.results import ROOT

CHOICES = "choices"
"""Form of the answers of a simulated annotator."""
ANSWERS = "answers.jsonl"
"""File of these answers."""
ACCURACY = "0.9"
"""Share of these answers that are correct."""


@dataclass(frozen=True)
class SourceRun:
    """Run whose scored episodes are exported."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of flows.run beside the name."""
    round: int
    """Round whose episodes are exported."""


@dataclass(frozen=True)
class RecipeFile:
    """File that a recipe learns from, and how."""

    source: SourceRun
    form: str
    """Form of the export, or CHOICES."""
    arguments: tuple[str, ...]
    """Arguments of the recipe beside the path."""

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the repository."""
        return f"runs/{self.source.name}/{self.form}"

    @property
    def path(self) -> str:
        """Argument of the recipe that names the file."""
        return f"feedback.path={self.folder}/{ANSWERS}" if self.form == CHOICES else f"data.path={self.folder}"

    def export(self, run: str) -> list[str]:
        """Return the module that writes the file from a run, and its arguments."""
        if self.form == CHOICES:
            stage = ["--stage", f"collect[{self.source.round}]", "--accuracy", ACCURACY]
            return ["docs.simulated_annotator", run, *stage, "--out", f"{self.folder}/{ANSWERS}"]
        stage = ["--stages", f"judge[[]{self.source.round}]"]
        return ["flows.runs", "export", run, "--form", self.form, *stage, "--out", self.folder]

    def commands(self) -> list[str]:
        """Return the commands that make the file."""
        run = ["python", "-m", "flows.run", *self.source.arguments, f"name={self.source.name}"]
        return [shlex.join(run), shlex.join(["python", "-m", *self.export(self.source.name)])]


GAMES = SourceRun(
    "games",
    ("+experiment=tic_tac_toe", "rounds=1", "collect.scenarios=2048", "collect.group_size=4"),
    1,
)
SHOP = SourceRun("shop", ("+experiment=quickstart", "rounds=1", "collect.scenarios=64", "deploy=none"), 1)
EPISODES = (
    "environment=shop",
    "agent.max_turns=5",
    "agent.max_tokens=24",
    "evaluate.scenarios=96",
    "evaluate.concurrency=128",
    "deploy=none",
)
"""Evaluation of `quickstart`, in which the policy after the file is compared with that before it."""


def _shop(form: str, *arguments: str) -> RecipeFile:
    return RecipeFile(SHOP, form, (*EPISODES, *arguments))


RECIPES = {
    "dpo": _shop("preference", "warmup=sft"),
    "ipo": _shop("preference", "warmup=sft"),
    "orpo": _shop("preference", "warmup=sft"),
    "kto": _shop("thumbs", "warmup=sft"),
    "ranking": _shop("ranking", "warmup=sft"),
    "feedback": RecipeFile(GAMES, CHOICES, ()),
    "sft": _shop("messages"),
}
"""Files by recipe, and the arguments without which there is nothing to evaluate."""
_EXPORT = Lock()


def arguments(experiment: str) -> list[str]:
    """Return the arguments that a recipe needs to learn from its file; none for a recipe without a file."""
    file = RECIPES.get(experiment)
    return [] if file is None else [file.path, *file.arguments]


def commands(experiment: str) -> list[str]:
    """Return the commands that make the file of a recipe; none for a recipe without a file."""
    file = RECIPES.get(experiment)
    return [] if file is None else file.commands()


def make(experiment: str, root: str | None) -> None:
    """Make the file of a recipe, in place of an earlier one. root: folder of the runs, as `root` of flows.run."""
    file = RECIPES.get(experiment)
    if file is not None:
        with _EXPORT:
            _export(file, root)


@cache
def _export(file: RecipeFile, root: str | None) -> None:
    shutil.rmtree(ROOT / file.folder, ignore_errors=True)
    _output(*file.export(_run(file.source, root)), root=root)


@cache
def _run(source: SourceRun, root: str | None) -> str:
    """Run the source and return the id of the run."""
    result = _output("flows.run", *source.arguments, f"name={source.name}", root=root)
    return str(json.loads(result.splitlines()[-1])["run_id"])


def _output(module: str, *values: str, root: str | None) -> str:
    """Run a command and return its output."""
    command = [sys.executable, "-m", module, *values, *([f"root={root}"] if root else [])]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
