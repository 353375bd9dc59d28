"""The tool of HelloAgents' course: its parameters are experiments."""

from __future__ import annotations

import json
import shlex

import pytest

from components.errors import ResourceError, SpecError
from flows.agent_tools import course
from flows.agent_tools.course import RLTrainingTool
from flows.experiment.compose import compose
from flows.history.records import Records, RunRecord, StageRecord


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tool(tmp_path):
    return RLTrainingTool(tmp_path / "runs")


def training(questions, algorithm: str, **changes):
    given = {"model_name": "tiny", "output_dir": "./models/out", "max_samples": 5, "num_epochs": 3, "batch_size": 2}
    return {"action": "train", "algorithm": algorithm, "use_lora": True, "dataset": str(questions), **given, **changes}


def shown(tool, parameters):
    """The spec of the command that is shown."""
    python, _, module, *overrides = shlex.split(tool.show(parameters))
    assert (python, module) == ("python", "flows.run")
    return compose(overrides)


def test_supervised_training_is_a_warmup_on_solutions(tool, questions):
    spec = shown(tool, training(questions, "sft"))
    assert (spec.name, spec.rounds, spec.model.name) == ("models-out", 0, "tiny")
    assert (spec.warmup.demonstrations, spec.warmup.algorithm.epochs, spec.warmup.algorithm.batch_size) == (5, 3, 2)


def test_grpo_trains_on_each_question_once_in_an_epoch(tool, questions):
    spec = shown(tool, training(questions, "grpo", num_generations=4, learning_rate=1e-5, use_lora=False))
    assert (spec.algorithm.name, spec.algorithm.learning_rate, spec.warmup) == ("grpo", 1e-5, None)
    assert (spec.rounds, spec.collect.scenarios, spec.collect.group_size) == (8, 2, 4)  # 5 questions, 3 epochs, 2 each
    assert spec.model.lora is None


@pytest.mark.parametrize(
    ("parameters", "target", "arguments"),
    [
        ({}, "outcome.Outcome", {}),
        (
            {"reward_type": "length_penalty", "max_length": 64, "penalty_weight": 0.01},
            "length.Length",
            {"alpha": 0.01, "target": 64},
        ),
        ({"reward_type": "step", "step_bonus": 0.2}, "length.Steps", {"beta": 0.2}),
    ],
)
def test_a_reward_of_the_course_is_an_option_of_reward(tool, questions, parameters, target, arguments):
    created = json.loads(tool.run({"action": "create_reward", **parameters}))
    reward = shown(tool, training(questions, "grpo", **parameters)).reward
    assert reward.target.endswith(target)
    assert arguments.items() <= reward.arguments.items()
    shown_reward = created["experiment"].partition("flows.run ")[2]
    assert shown_reward in tool.show(training(questions, "grpo", **parameters))


def test_a_dataset_is_read_as_the_environment_does(tool, questions):
    data = json.loads(tool.run({"action": "load_dataset", "format": "rl", "max_samples": 5, "dataset": str(questions)}))
    assert (data["num_samples"], data["format"], len(data["samples"])) == (5, "rl", 3)


def test_a_training_from_an_output_folder_is_a_fork_of_its_run(tool, questions, tmp_path):
    sft = training(questions, "sft", output_dir="./models/sft")
    overrides = shlex.split(tool.show(sft))[3:]
    request = {"stage": "train", "spec": {}, "inputs": {}, "seed": 0}
    stage = StageRecord("train[sft]", 0, request, 1, "a" * 64, "b" * 64, "checkpoint", "ran", 1.0)
    run = RunRecord("c" * 32, "models-sft", 0, 1.0, "FINISHED", 2.0, overrides=overrides, stages=[stage])
    (tmp_path / "runs").mkdir(mode=0o700)
    Records(tmp_path / "runs").folder.mkdir()
    Records(tmp_path / "runs").write(run)
    command = tool.show(training(questions, "grpo", model_name="./models/sft", output_dir="./models/grpo"))
    assert f"model=tiny warmup=none fork={run.id}" in command
    evaluation = tool.show({"action": "evaluate", "model_path": "./models/sft", "max_samples": 3})
    assert evaluation.startswith("python -m flows.evaluate name=models-sft warmup=none environment=dataset")
    assert f"'policies=[base,{run.short}]'" in evaluation


def test_a_mistake_is_refused_with_its_remedy(tool, questions, tmp_path):
    for parameters, text in (
        ({"action": "trian"}, "expected one of load_dataset, create_reward, train, evaluate"),
        (training(questions, "ppo"), "'ppo': expected one of sft, grpo"),
        (training(questions, "sft", num_epoch=1), "Did you mean 'num_epochs'?"),
        ({"action": "evaluate", "model_path": "./nowhere"}, "has this output_dir"),
    ):
        with pytest.raises(SpecError) as refusal:
            tool.run(parameters)
        assert text in str(refusal.value)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(ResourceError, match="holds files of something else"):
        course.check_output(tmp_path / "thesis")
