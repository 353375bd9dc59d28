"""Record and page of the recipes' results."""

from __future__ import annotations

import argparse
import json
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from docs import recipe_files, recipes
from docs.recipes_plot import plot
from flows.experiment.compose import compose


def row(experiment: str, seed: int, after: float, low: float, *overrides: str, **reported: float) -> dict:
    result = {
        "seed": seed,
        "success_start": 0.0,
        "success_sft": 0.4,
        "success": after,
        "stages": {"evaluate[start]": "ran", "evaluate[sft]": "ran", "evaluate[final]": "ran"},
        "success_by_round": {},
        "training_reward_by_round": {},
        "guards": [],
        "reported": reported,
        "gain": after - 0.4,
        "gain_interval": [low, low + 0.1],
        "seconds": 50.0,
        "cached_seconds": 10.0,
        "peak_memory_gb": 1.0,
    }
    machine = {"jobs": 1, "commit": "abc", "processor": "2 × CPU"}
    return recipes.row_of(result, experiment, list(overrides)) | {"model": "small"} | machine


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "RECORD", tmp_path / "recipes.json")
    for seed, after in enumerate((0.5, 0.6, 0.7)):
        recipes.record(row("better", seed, after, 0.01))
    recipes.record(row("same", 0, 0.41, -0.04))
    return tmp_path / "recipes.json"


def test_a_second_run_of_a_seed_replaces_its_row(stored):
    recipes.record(row("better", 1, 0.65, 0.01))
    rows = json.loads(stored.read_text())
    assert [(r["experiment"], r["seed"], r["after"]) for r in rows] == [
        ("better", 0, 0.5),
        ("better", 1, 0.65),
        ("better", 2, 0.7),
        ("same", 0, 0.41),
    ]


def test_a_gain_whose_interval_includes_zero_is_flat_and_can_be_explained(stored):
    assert [r["flat"] for r in json.loads(stored.read_text())] == [None, None, None, recipes.UNEXPLAINED]
    recipes.explain("same", "too few rounds")
    recipes.explain("better", "ignored, because each seed gained")
    assert [r["flat"] for r in json.loads(stored.read_text())] == [None, None, None, "too few rounds"]


def test_the_summary_has_means_with_intervals_over_the_seeds(stored):
    better, same = recipes.summary_table().splitlines()[2:4]
    # mean 0.2, standard deviation 0.1, t = 4.303: half width 0.248
    assert better.startswith("| `better` | `small` | 3 | 0.40 | 0.60 | +0.20 [-0.05, +0.45] | 3 of 3 |")
    assert same.startswith("| `same` | `small` | 1 | 0.40 | 0.41 | +0.01 | 0 of 1 |")


def test_variants_are_compared_with_their_experiment_by_seed_and_stay_out_of_the_summary(stored):
    recipes.record(row("same", 1, 0.5, -0.04, forgetting=0.1))
    for seed, after in ((0, 0.21), (1, 0.1), (2, 0.9)):
        recipes.record(row("same", seed, after, -0.04, "replay=null", "ewc=null", forgetting=0.5))
    lines = recipes.variants_table().splitlines()[2:]
    assert lines[0].startswith("| `same` | held-out success | 2 | 0.455 |")
    assert lines[1].startswith("| `same` | forgetting | 1 | 0.100 |")
    # differences of seeds 0 and 1: -0.2 and -0.4; t = 12.706, standard error 0.1
    assert lines[2] == "| `same` `replay=null` `ewc=null` | held-out success | 3 | 0.403 | -0.30 [-1.57, +0.97] |"
    assert lines[3] == "| `same` `replay=null` `ewc=null` | forgetting | 3 | 0.500 |  |"
    assert len(recipes.by_experiment()["same"]) == 2
    command = next(r["command"] for r in recipes.rows() if r["overrides"])
    assert command == "python -m flows.run +experiment=same seed=0 replay=null ewc=null"


def test_the_guards_of_reward_hacking_stand_beside_its_rewards_and_evaluations(stored):
    hacked = row("reward_hacking", 0, 0.1, -0.4)
    hacked["success_by_round"] = {"2": 0.5, "4": 0.1}
    hacked["training_reward_by_round"] = {"1": 0.7, "2": 0.8, "3": 0.9, "4": 1.0}
    hacked["guards"] = [{"guard": "reward_hacking", "step": 4, "message": "rose, but fell"}]
    recipes.record(hacked)
    assert recipes.guards_table().splitlines()[2:] == [
        "| 0 | 0 | 0.700 | 0.400 |  |",
        "| 0 | 2 | 0.800 | 0.500 |  |",
        "| 0 | 4 | 1.000 | 0.100 | `reward_hacking` |",
    ]


def test_the_start_of_a_recipe_without_rounds_is_the_untrained_model(stored):
    result = {
        **row("bc", 0, 0.4, 0.3),
        "cached_seconds": 0.0,
        "success_start": 0.0,
        "success_sft": 0.4,
        "success": 0.4,
        "stages": {"evaluate[sft]": "ran"},
    }
    assert recipes.row_of(result | {"gain_interval": [0.3, 0.5]}, "bc", [])["before"] == 0.0


def test_the_row_of_a_recipe_from_a_file_has_the_commands_that_make_the_file(stored):
    dpo = row("dpo", 1, 0.5, 0.01)
    assert (dpo["before"], dpo["seconds"]) == (0.4, 60.0)
    assert dpo["overrides"] == []
    assert dpo["command"].startswith(
        "python -m flows.run +experiment=dpo seed=1 data.path=runs/shop/preference environment=shop"
    )
    assert [command.split()[2:4] for command in dpo["file"]] == [
        ["flows.run", "+experiment=quickstart"],
        ["flows.runs", "export"],
    ]
    assert "file" not in row("same", 0, 0.5, 0.01)


def test_the_model_of_a_row_is_that_of_its_command(monkeypatch):
    output = json.dumps(
        {
            **row("dpo", 0, 0.5, 0.01),
            "success_start": 0.0,
            "success_sft": 0.4,
            "success": 0.5,
            "stages": [],
            "gain_interval": None,
            "cached_seconds": 0.0,
        }
    )
    monkeypatch.setattr(recipe_files, "make", lambda experiment, root: None)
    monkeypatch.setattr(subprocess, "run", lambda line, **options: subprocess.CompletedProcess(line, 0, stdout=output))
    options = argparse.Namespace(root=None, jobs=1, commit="abc")
    assert recipes.run_experiment("dpo", 0, options, [])["model"] == "smollm2-135m-instruct"


@pytest.mark.parametrize("experiment", recipe_files.RECIPES)
def test_the_arguments_of_a_recipe_from_a_file_compose(experiment):
    spec = compose([f"+experiment={experiment}", *recipe_files.arguments(experiment)])
    read = spec.feedback.path if spec.feedback is not None else spec.data.path
    assert read.startswith(recipe_files.RECIPES[experiment].folder)
    assert (spec.warmup is None) == (experiment == "sft")


def test_the_plot_has_two_marks_for_each_run(stored):
    tree = ElementTree.fromstring(plot(recipes.by_experiment()))
    assert len(tree.findall("{http://www.w3.org/2000/svg}circle")) == 2 * 4


def test_the_page_shows_the_record():
    for page in recipes.PAGES:
        assert page.current() == page.stored(), "run `python -m docs.recipes`"
    assert recipes.PLOT.read_text() == plot(recipes.by_experiment()), "run `python -m docs.recipes`"


def test_a_run_that_fails_is_named_and_the_others_are_recorded(stored, monkeypatch):
    def run_experiment(name, seed, options, overrides):
        if name == "broken":
            raise subprocess.CalledProcessError(1, name)
        return row(name, seed, 0.8, 0.1)

    monkeypatch.setattr(recipes, "run_experiment", run_experiment)
    monkeypatch.setattr(recipes, "commit", lambda: "abc")
    options = argparse.Namespace(names=["broken", "new"], seeds=[0, 1], jobs=2)
    assert sorted(recipes.run_all(options, [[]])) == ["broken seed=0", "broken seed=1"]
    assert [(r["experiment"], r["seed"]) for r in recipes.rows() if r["experiment"] in ("broken", "new")] == [
        ("new", 0),
        ("new", 1),
    ]
