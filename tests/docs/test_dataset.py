"""The dataset environment of docs/guides/own_environment.md, and the experiments that use it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from components.environments.protocol import Environment
from components.specs import Target, validate
from flows.experiment.compose import compose
from flows.experiment.spec import ExperimentSpec
from tests.docs.pages import ROOT, blocks, commands

OWN_ENVIRONMENT = ROOT / "docs" / "guides" / "own_environment.md"
COMING_FROM = ROOT / "docs" / "coming_from"
TRL_REWARD = "def accuracy(completions, answer, **kwargs):\n    return [1.0 for _ in completions]\n"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Write the environment of the page and a dataset, and make the package importable."""
    (block,) = [block for block in blocks(OWN_ENVIRONMENT) if block.file]
    assert block.file == "answers/environment.py"
    (tmp_path / "answers").mkdir()
    (tmp_path / block.file).write_text(block.text)
    write_questions(tmp_path / "questions.jsonl", 128)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "answers"]:
        del sys.modules[name]


def write_questions(path: Path, count: int, answer: str = "blue") -> None:
    rows = [{"question": f"What is the color of thing {number}?", "answer": answer} for number in range(count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def target(file: str) -> Target:
    return validate(Target, {"_target_": "answers.environment.Questions", "file": file}, allow=["answers"])


def test_an_edited_file_changes_the_key_and_a_moved_one_does_not(home):
    before = target("questions.jsonl").resolved()
    (home / "moved.jsonl").write_bytes((home / "questions.jsonl").read_bytes())
    assert target("moved.jsonl").resolved() == before
    write_questions(home / "questions.jsonl", 128, answer="red")
    after = target("questions.jsonl").resolved()
    assert after["file"] != before["file"]
    assert {**after, "file": None} == {**before, "file": None}


def test_it_plays_an_episode_of_a_held_out_row(home):
    environment: Environment = target("questions.jsonl").build()
    assert [len(environment.scenarios(split)) for split in ("train", "heldout", "other")] == [64, 64, 0]
    scenario = environment.scenarios("heldout")[0]
    (message,) = environment.reset(scenario)
    assert message["content"] == "What is the color of thing 64?"
    assert environment.step({"role": "assistant", "content": "It is blue."}).info == {"success": True}


def experiment(home: Path, page: str, *overrides: str) -> ExperimentSpec:
    """Compose the experiment file of a page."""
    (block,) = [block for block in blocks(COMING_FROM / page, "yaml") if "Questions" in block.text]
    assert block.text.startswith("# @package _global_\n")
    folder = home / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "answers.yaml").write_text(block.text)
    return compose(["+experiment=answers", *overrides], config_dir=home / "conf")


def test_the_experiment_of_trl_trains_all_weights_with_its_reward(home):
    (home / "answers" / "rewards.py").write_text(TRL_REWARD)
    (defaults,) = [
        line.partition("`")[2].partition("`")[0]
        for line in (COMING_FROM / "trl.md").read_text().splitlines()
        if line.startswith("Defaults differ: ")
    ]
    spec = experiment(home, "trl.md", *defaults.split())
    assert spec.model.lora is None
    assert (spec.algorithm.learning_rate, spec.algorithm.scale, spec.algorithm.dual_clip) == (1e-6, "group", None)
    (command,) = commands(COMING_FROM / "trl.md")
    assert command.endswith("--config-dir ~/mine/conf +experiment=answers")


def test_the_experiment_of_verl_names_its_data_and_reward(home):
    (reward,) = [block.text for block in blocks(COMING_FROM / "verl.md", "python")]
    (home / "answers" / "rewards.py").write_text(reward)
    (command,) = [block.text for block in blocks(COMING_FROM / "verl.md", "text") if "+experiment=NAME" in block.text]
    overrides = [word for word in command.split() if "=" in word and not word.startswith(("+", "PYTHONPATH"))]
    spec = experiment(home, "verl.md", *[word for word in overrides if not word.startswith("inference=")])
    assert (spec.reward.target, spec.model.lora.rank) == ("answers.rewards.accuracy", 16)
    assert (spec.collect.scenarios, spec.algorithm.minibatches, spec.algorithm.learning_rate) == (64, 4, 1e-5)
