"""Reward functions in the form of TRL's trainers and HelloAgents."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from components.errors import SpecError
from components.rewards import judge as judging
from components.rewards.composition.combined import Combined, Part
from components.rewards.composition.composed import NOT_APPLICABLE
from components.rewards.rules.columns import Columns
from components.specs import Target
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory
from tests.rewards import functions

ALLOW = {"context": {"allow": ["tests"]}}


def sample_episode(sample, text, **outcome):
    history = History(
        [Message("system", "Add."), Message("user", "2 + 2?"), Message("assistant", text, span=(4, 4 + 2 + sample))]
    )
    history.token_ids = list(range(100, 100 + 6 + sample))
    return Trajectory(
        f"s/{sample}", Scenario("s", {"answer": 4, "task": "math"}, "train"), sample, [history], outcome=outcome
    )


GROUP = [sample_episode(0, "It is 4."), sample_episode(1, "It is 5.")]


def judged(reward, group=GROUP, **options):
    return list(judging.judge(reward, group, **options))


def rewards(reward, group=GROUP):
    return [score.reward for score in judged(reward, group)]


def test_a_function_of_helloagents_works_as_it_is():
    assert rewards(Columns(functions.accuracy_reward, columns={"ground_truth": "input.answer"})) == [1.0, 0.0]


def test_a_function_of_trl_works_as_it_is():
    group = [sample_episode(0, "<think>a</think><answer>4</answer>"), sample_episode(1, "4")]
    assert rewards(Columns(functions.format_reward_func, form="messages"), group) == [1.0, 0.0]
    assert rewards(Columns(functions.reward_len)) == [2.0, 3.0]


def test_it_is_given_what_trl_gives():
    recorded = {}

    def function(prompts, completions, completion_ids, **kwargs):
        recorded.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    group = [sample_episode(0, "4", success=True), sample_episode(1, "5", note="wrong")]
    judged(Columns(function), group)
    assert recorded.pop("log_extra")
    assert recorded.pop("log_metric")
    assert recorded == {
        "prompts": ["Add.\n\n2 + 2?"] * 2,
        "completions": ["4", "5"],
        "completion_ids": [[104, 105], [104, 105, 106]],
        "answer": [4, 4],
        "task": ["math", "math"],
        "success": [True, None],
        "note": [None, "wrong"],
    }


def test_messages_are_those_of_openai_with_the_answers_of_tools():
    history = History(
        [
            Message("user", "Where?"),
            Message("assistant", "", [ToolCall("c", "find", "{}")]),
            Message("tool", "here", tool_call_id="c"),
            Message("assistant", "Here."),
        ]
    )
    recorded = []

    def function(prompts, completions):
        recorded.extend([*prompts, *completions])
        return [0.0]

    judged(Columns(function, form="messages"), [Trajectory("s/0", Scenario("s", {}, "train"), 0, [history])])
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    assert recorded == [
        [{"role": "user", "content": "Where?"}],
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "here", "tool_call_id": "c"},
            {"role": "assistant", "content": "Here."},
        ],
    ]


def test_trl_gives_the_same_arguments_to_the_same_function():
    """Compare with TRL: `_calculate_rewards` of its trainer, on the same group."""
    from types import SimpleNamespace

    from trl.trainer.grpo_trainer import GRPOTrainer

    taken = []

    def function(prompts, completions, completion_ids, answer, **kwargs):
        taken.append((prompts, completions, completion_ids, answer, sorted(kwargs)))
        return [float(len(text) + value) for text, value in zip(completions, answer, strict=True)]

    ours = rewards(Columns(function))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["function"],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
        _metrics={"train": {}},
        model=SimpleNamespace(training=True),
        _step=0,
    )
    inputs = [{"prompt": "p", "answer": 4, "task": "math"}] * 2
    calculate = GRPOTrainer._calculate_rewards.__wrapped__
    prompts, completions, ids, *_ = taken[0]
    theirs = calculate(trainer, inputs, prompts, completions, ids)
    assert theirs[:, 0].tolist() == ours
    assert taken[1][:4] == taken[0][:4]
    assert set(taken[1][4]) - set(taken[0][4]) == {"trainer_state"}


def test_an_async_function_is_awaited_many_at_once():
    reward = Columns(functions.slow_reward)
    assert reward.waits
    assert rewards(reward) == [12.0 + 8 + 4, 12.0 + 8 + 4]
    both = Combined({"a": Part(reward=reward), "b": Part(reward=Columns(functions.reward_len))})
    assert both.waits
    assert rewards(both) == [26.0, 27.0]


def test_none_means_that_it_does_not_apply():
    group = [sample_episode(0, "4"), sample_episode(1, "5")]
    group[1] = Trajectory("t/0", Scenario("t", {"task": "code"}, "train"), 0, group[1].histories)
    reward = Columns(functions.math_only)
    first, second = judged(reward, group)
    assert first.reward == 1.0
    assert (second.reward, second.failure.kind) == (None, NOT_APPLICABLE)
    assert second.failure.message == "math_only returned None: it does not apply"
    whole = Combined({"all": Part(reward=lambda trajectory: 0.5), "math": Part(reward=reward, optional=True)})
    assert rewards(whole, group) == [1.5, 0.5]


def test_what_it_logs_is_kept_with_the_scores():
    first, second = judged(Columns(functions.logging_reward))
    assert first.components == {"mean_answer": 4.0, "length": 8.0}
    assert (first.explanation, second.explanation) == ("extracted: a", "extracted: b")


def test_configuration_fills_what_it_names():
    def target(**more):
        data = {"_target_": "components.rewards.rules.columns.Columns", **more}
        return Target.model_validate(data, **ALLOW)

    path = "tests.rewards.functions.scaled"
    built = target(function={"_target_": path, "scale": 2, "offset": 0.5}).build()
    assert rewards(built) == [16.5, 16.5]
    short = target(function="tests.rewards.functions.reward_len")
    assert rewards(short.build()) == [2.0, 3.0]
    assert target(function={"_target_": "tests.rewards.functions.Callable", "bonus": 3}).build().score_group(GROUP)
    with pytest.raises(ValidationError, match=r"function\.scael"):
        target(function={"_target_": path, "scael": 2})
    with pytest.raises(ValidationError, match="valid number"):
        target(function={"_target_": path, "offset": "x"})


def test_the_source_of_the_function_is_in_the_key():
    reward = {"_target_": "components.rewards.rules.columns.Columns", "function": "tests.rewards.functions.reward_len"}
    key = Target.model_validate(reward, **ALLOW).resolved()
    assert key["function"]["_target_"] == "tests.rewards.functions.reward_len"
    assert len(key["function"]["source_sha256"]) == 64
    parts = {"a": {"reward": reward, "weight": 2}}
    nested = {"_target_": "components.rewards.composition.combined.Combined", "parts": parts}
    key = Target.model_validate(nested, **ALLOW).resolved()
    assert len(key["parts"]["a"]["reward"]["function"]["source_sha256"]) == 64


def test_what_a_function_does_wrong_leaves_its_group_unscored(subtests):
    for answer, said in [
        (lambda completions, **_: 1 / 0, "division by zero"),
        (lambda completions, **_: [1.0], "returned 1 values for 2 completions"),
        (lambda completions, **_: [1.0] * 3, "returned 3 values for 2 completions"),
        (lambda completions, **_: "10", "returned '10' (str), expected a list of numbers"),
        (lambda completions, **_: 1.0, "returned 1.0 (float), expected a list of numbers"),
        (lambda completions, **_: None, "returned None (NoneType)"),
        (lambda completions, **_: {"a": 1.0, "b": 2.0}, "(dict), expected a list of numbers"),
        (lambda completions, solution: [1.0, 1.0], "asks for solution; the columns are answer, task. To name one"),
        (lambda completions, log_extra: log_extra("x", [1]) or [1.0, 1.0], "log_extra x has 1 values for 2"),
        (lambda completions, log_metric: log_metric("x", math.nan) or [1.0, 1.0], "log_metric x is nan"),
    ]:
        with subtests.test(said=said):
            for score in judged(Columns(answer)):
                assert score.reward is None
                assert said in score.failure.message


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "is nan, expected a finite number"), ("1.0", "'1.0' (str)"), (math.inf, "is inf")]
)
def test_a_value_that_is_no_finite_number_leaves_its_episode_unscored(value, said):
    first, second = judged(Columns(lambda completions, **_: [0.5, value]))
    assert first.reward == 0.5
    assert second.reward is None
    assert said in second.failure.message


def test_a_function_that_hands_out_a_coroutine_unawares_is_told():
    (score, _) = judged(Columns(lambda completions, **_: functions.slow_reward(completions, completions, [1])))
    assert "returned a coroutine; expected `async def`" in score.failure.message


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, iter])
def test_numbers_may_come_in_any_row(make):
    assert rewards(Columns(lambda completions, **_: make([0.5, 1.0]))) == [0.5, 1.0]


def test_a_function_that_cannot_be_called_so_is_refused(subtests):
    for options, path, said in [
        ({"function": functions.with_state}, "reward.function", "asks for trainer_state, which only a trainer has"),
        ({"function": lambda trajectory: 1.0}, "reward.function", "takes no completions"),
        ({"function": lambda completions, /: [1.0]}, "reward.function", "takes completions by position"),
        (
            {"function": functions.reward_len, "columns": {"prompts": "input.x"}},
            "reward.columns.prompts",
            "built-in column",
        ),
        ({"function": functions.reward_len, "columns": {"x": "trainer.step"}}, "reward.columns.x", "no field"),
        ({"function": functions.scaled, "columns": {"x": "input.x"}}, "reward.columns.x", "has no parameter x"),
    ]:
        with subtests.test(said=said):
            with pytest.raises(SpecError) as caught:
                Columns(**options)
            assert caught.value.problems[0].path == path
            assert said in caught.value.problems[0].message


def test_a_state_that_it_can_do_without_is_not_given():
    assert rewards(Columns(functions.with_state_if_any)) == [0.0, 0.0]


def test_given_as_the_reward_itself_it_is_told_where_it_goes(subtests):
    for nested in [False, True]:
        for name in ["accuracy_reward", "math_only", "slow_reward"]:
            with subtests.test(name, nested=nested):
                data = {"_target_": f"tests.rewards.functions.{name}"}
                if nested:
                    data = {
                        "_target_": "components.rewards.composition.combined.Combined",
                        "parts": {"a": {"reward": data}},
                    }
                with pytest.raises(ValidationError) as caught:
                    Target.model_validate(data, **ALLOW)
                (error,) = caught.value.errors()
                assert error["loc"] == ("parts", "a", "reward", "_target_") if nested else ("_target_",)
                assert f"expected reward=columns reward.function=tests.rewards.functions.{name}" in error["msg"]
