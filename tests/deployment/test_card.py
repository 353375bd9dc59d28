"""Model card: its text, its purity, and the code that it shows."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from components.deployment.card import ModelCard
from components.deployment.export import export_merged as export
from components.evaluation.metrics import paired_difference, summarise
from components.inference.app import AppOptions
from components.inference.server import serve_model
from components.models.spec import ModelSpec
from components.trajectories.schema import Trajectory
from tests.deployment.tiny import TINY

EXPERIMENT: dict[str, Any] = {
    "name": "shop",
    "seed": 3,
    "root": "runs",
    "environment": {"_target_": "components.environments.worlds.shop.Shop", "difficulty": 2},
    "algorithm": {"name": "grpo", "learning_rate": 1e-4},
    "collect": {"scenarios": 8, "concurrency": 64, "timeout": 600.0},
    "evaluate": {"split": "heldout", "temperature": 0.0},
    "compute": {"default": "local"},
    "tracking": {"uri": None},
}


def model_card(form: Any, **facts: Any) -> str:
    return ModelCard(**facts).text(form)


def episodes(held_out: list[Trajectory], successes: int) -> list[Trajectory]:
    first = {trajectory.group: trajectory for trajectory in held_out}
    return [
        Trajectory(
            trajectory.id,
            trajectory.scenario,
            0,
            trajectory.histories,
            outcome={"success": index < successes},
            metrics={"turns": 2.0},
            reward=float(index < successes),
        )
        for index, trajectory in enumerate(first.values())
    ]


@pytest.fixture
def arguments(held_out) -> dict[str, Any]:
    start, final = episodes(held_out, 1), episodes(held_out, 3)
    return {
        "name": "shop-agent",
        "form": "merged",
        "model": ModelSpec(name="smollm2-135m-instruct", source="package"),
        "experiment": EXPERIMENT,
        "step": 4,
        "stage_key": "ab" * 32,
        "inputs": {"policy": "cd" * 32, "evaluation": "ef" * 32},
        "results": {"start": summarise(start), "after GRPO": summarise(final)},
        "differences": {"start to after GRPO": paired_difference(start, final)},
    }


def test_card_names_the_policy_and_its_selection(arguments):
    assert "The policy as it stood after round 4.\n" in model_card(**arguments)
    assert "chosen" not in model_card(**arguments)
    best = arguments | {"step": 0, "experiment": {**EXPERIMENT, "deploy": {"policy": "best"}}}
    card = model_card(**best)
    assert "as it stood at the start of the rounds. It was chosen as the best on the held-out scenarios." in card
    assert "- The policy was chosen by these same scenarios" in card
    offline = arguments | {"step": 0, "experiment": {**EXPERIMENT, "rounds": 0}}
    assert "The policy as it stood at the end of the training, which had no rounds.\n" in model_card(**offline)


def test_the_card_names_the_attention_that_transformers_would_not_choose(arguments):
    for form in ("merged", "adapter"):
        assert '("."' + ', attn_implementation="eager")' in model_card(
            **arguments | {"form": form, "attention": "eager"}
        )
        assert "attn_implementation" not in model_card(**arguments | {"form": form})


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)


def test_the_front_matter_is_what_the_hub_reads(arguments):
    data = HubCard(model_card(**arguments)).data
    assert data.base_model == "smollm2-135m-instruct"
    assert data.library_name == "transformers"
    assert [(result.metric_type, result.metric_value) for result in data.eval_results] == [
        ("success", 0.75),
        ("reward", 0.75),
    ]
    assert data.eval_results[0].dataset_split == "heldout"


def test_results_stand_in_a_table_with_intervals(arguments):
    card = model_card(**arguments)
    success = arguments["results"]["start"]["success"]
    assert f"| start | 4 | 0.250 [{success['low']:.3f}, {success['high']:.3f}] |" in card
    assert re.search(r"\| after GRPO \| 4 \| 0\.750 \[.*\] \| 0\.750 \[.*\] \| 2\.000 \[.*\] \| 0 \|", card)
    assert "Success, start to after GRPO: +0.500 [" in card
    assert "on the same 4 scenarios; 2 got better, 0 worse" in card


def test_missing_value_is_a_dash(arguments):
    unscored = summarise([])
    assert "| start | 0 | – | – | – | 0 |" in model_card(**arguments | {"results": {"start": unscored}})
    assert "Nothing was measured." in model_card(**arguments | {"results": {}, "differences": {}})


def test_it_says_where_the_model_comes_from(arguments):
    card = model_card(**arguments)
    for part in ("ab" * 32, "cd" * 32, "ef" * 32, "trained with GRPO", "LoRA of rank 16", "seed 3", "4 scenarios"):
        assert part in card
    (config,) = blocks(card, "yaml")
    expected = {name: part for name, part in EXPERIMENT.items() if name not in ("root", "compute", "tracking")}
    assert yaml.safe_load(config) == expected | {"collect": {"scenarios": 8}}


def test_placement_is_not_in_the_card(arguments):
    elsewhere = EXPERIMENT | {
        "root": "/data/someone/runs",
        "compute": {"default": "process"},
        "collect": {"scenarios": 8, "concurrency": 2, "timeout": 5.0},
        "tracking": {"uri": "http://tracking"},
    }
    assert model_card(**arguments) == model_card(**arguments | {"experiment": elsewhere})


def test_paths_of_the_machine_are_cut_to_their_names(arguments, tmp_path, monkeypatch):
    local = arguments | {
        "model": ModelSpec(name="/data/someone/my-model"),
        "experiment": EXPERIMENT | {"model": {"name": "/data/someone/my-model"}},
    }
    card = model_card(**local)
    assert "/data" not in card
    assert "`my-model`" in card
    assert HubCard(card).data.base_model is None  # the Hub reads it as the id of a repository
    (tmp_path / "team" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, expected in (("team/model", None), ("team/other", "team/other")):
        assert HubCard(model_card(**local | {"model": ModelSpec(name=name)})).data.base_model == expected


def test_the_code_in_the_card_runs(arguments, base_dir, adapter_dir, tmp_path, monkeypatch, capsys):
    card = model_card(**arguments | {"model": TINY})
    export(base_dir, adapter_dir, tmp_path / "out", card)
    load, ask = blocks((tmp_path / "out" / "README.md").read_text(), "python")
    monkeypatch.chdir(tmp_path / "out")
    exec(load, {})
    with serve_model(
        tmp_path / "out", name="shop-agent", max_length=512, app=AppOptions(default_max_tokens=8)
    ) as server:
        names: dict[str, Any] = {}
        exec(ask.replace("http://127.0.0.1:8000/v1", server.url), names)
        names["client"].close()
    assert isinstance(names["client"], openai.OpenAI)
    assert capsys.readouterr().out
    (command,) = blocks(card, "sh")
    assert command.startswith("python -m components.inference.server ")
