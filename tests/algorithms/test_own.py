"""An algorithm of a user's package: that of docs/guides/own_algorithm.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.algorithms.choices import ALGORITHMS
from components.errors import SpecError
from components.specs import validate
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.plan import main as plan
from flows.stages.train import TrainStage
from tests.algorithms.builders import MODEL, batch, train, write_start
from tests.docs.pages import ROOT, commands, own_package, words
from tests.flows.test_online_rl import DATA

PAGE = ROOT / "docs" / "guides" / "own_algorithm.md"
TARGET = "stock.reinforce.Reinforce"


@pytest.fixture
def home(tmp_path) -> Iterator[Path]:
    """Write the files of the page, and make their package importable."""
    with own_package(PAGE, tmp_path, "stock"):
        yield tmp_path


def experiment(root: Path, target: str = TARGET, **algorithm) -> ExperimentSpec:
    data = {**DATA, "root": str(root), "allow": ["stock"], "warmup": None}
    return validate(ExperimentSpec, {**data, "algorithm": {"_target_": target, **algorithm}})


def test_it_is_an_algorithm_of_the_experiment(home):
    algorithm = experiment(home, batch_size=4).algorithm
    assert (algorithm.name, algorithm.batch_size, algorithm.learning_rate) == ("reinforce", 4, 1e-4)
    assert type(algorithm) not in ALGORITHMS
    data = json.loads(experiment(home, batch_size=4).model_dump_json(by_alias=True))
    assert data["algorithm"]["_target_"] == TARGET
    assert validate(ExperimentSpec, data).algorithm == algorithm


def test_mistakes_are_reported_as_those_of_built_in_algorithms(home):
    with pytest.raises(SpecError) as caught:
        experiment(home, batch_sise=4, learning_rate=-1.0)
    problems = {problem.path: problem for problem in caught.value.problems}
    assert problems["algorithm.batch_sise"].nearest == "algorithm.batch_size"
    assert "expected more than 0" in problems["algorithm.learning_rate"].message


def test_an_unknown_name_of_an_algorithm_is_one_problem_with_the_nearest_name(tmp_path):
    with pytest.raises(SpecError) as caught:
        validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "algorithm": {"name": "grppo", "learning_rate": 1.0}})
    (problem,) = caught.value.problems
    assert (problem.path, problem.nearest) == ("algorithm.name", "grpo")
    assert problem.message.startswith("'grppo': expected one of ")


def test_only_an_algorithm_of_an_allowed_package_is_accepted(home):
    for target, message in (
        ("stock.reinforce.Reinforc", "'Reinforc' does not exist in stock.reinforce"),
        ("stock.reinforce.Trainer", "is not a subclass of"),
        ("stock.reinforce_trainer.train", "is not a subclass of components.algorithms.spec.AlgorithmSpec"),
        ("components.algorithms.spec.AlgorithmSpec", "does not define build"),
        ("other.Algorithm", "outside the allowed packages"),
    ):
        with pytest.raises(SpecError, match=message):
            experiment(home, target)


def key_part(root: Path) -> dict:
    request = Requests(experiment(root)).train({}, 1, start=None, reference=None)
    return validate(TrainStage, request.spec, allow=request.allow).key_part()["algorithm"]


def test_its_source_is_part_of_the_stage_key(home):
    before = key_part(home)
    assert before["_target_"] == TARGET
    trainer = home / "mine" / "stock" / "reinforce_trainer.py"
    trainer.write_text(trainer.read_text().replace("reward - baseline", "reward"))
    after = key_part(home)
    assert after["source_sha256"] != before["source_sha256"]
    assert {**after, "source_sha256": None} == {**before, "source_sha256": None}


def test_it_trains_a_step(home, base_dir, tmp_path):
    start = write_start(base_dir, tmp_path / "start")
    (tmp_path / "out").mkdir()
    (tmp_path / "scratch").mkdir()
    logs: list[dict[str, float]] = []
    options = {"start": start, "out": tmp_path / "out", "scratch": tmp_path / "scratch", "seed": 0}
    train(experiment(home, batch_size=9).algorithm, MODEL, base_dir, batch(), on_step=logs.append, **options)
    assert [log["step"] for log in logs] == [1.0]
    assert json.loads((tmp_path / "out" / "trainer.json").read_text())["algorithm"] == "reinforce"
    weights = "adapter/adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() != (start / weights).read_bytes()


def test_the_command_of_the_page_runs_and_the_plan_finds_the_run(home, command, capsys):
    (line,) = commands(PAGE)
    arguments = [word.replace("~", str(home)) for word in words(line)[3:]]
    code, out, errors = command(*arguments, f"root={home}/runs")
    assert code == 0, errors
    assert json.loads(out.splitlines()[-1])["stages"]["train[1]"] == "ran"
    plan([*arguments, f"root={home}/runs"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["train[1]"]]
    assert "cached" in line
