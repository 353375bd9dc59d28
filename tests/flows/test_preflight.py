"""Preflight of a run: mistakes in its solver, reward, judges and engines are reported before the first stage."""

from __future__ import annotations

import socket

import pytest

from components.errors import EnvironmentFailed, JudgeError, ResourceError, SpecError
from components.specs import Target, validate
from flows.experiment.compose import compose
from flows.experiment.starting_point import StartingPoint
from flows.planning import preflight
from flows.stages.base import Context
from tests.flows import preflight_rewards
from tests.refusals import wrong_refusals
from tests.rewards.judge_server import judge_server

REWARDS = preflight_rewards.__name__
SOLVED, UNSOLVED = "tests.flows.faulty_environment.Sums", "tests.flows.faulty_environment.Unsolved"
FREE_TEXT = "tests.flows.free_text.FreeText"


def check(root, *overrides, reward=None, **environment):
    spec = compose(["model=tiny", "size=tiny", "rounds=1", "warmup=none", f"root={root}", *overrides])
    changes = {"allow": ["tests"]}
    if environment:
        changes["environment"] = validate(Target, environment, allow=("tests",))
    if reward:
        changes["reward"] = validate(Target, {"_target_": f"{REWARDS}.{reward}"}, allow=("tests",))
    spec = spec.model_copy(update=changes)
    preflight.check(spec, Context.created(root), StartingPoint())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("preflight")


def test_a_reward_that_scores_an_episode_passes(root):
    for environment in (SOLVED, FREE_TEXT):
        for reward in ("success", "Deviations", "demands_an_answer"):
            check(root, reward=reward, _target_=environment)


def test_prompts_without_solutions_are_answered_in_their_place(root, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Name the number {number}.\n" for number in range(20)))
    dataset = "components.environments.dataset.environment.Dataset"
    check(root, _target_=dataset, path=str(path), heldout_share=0.5, cache=str(tmp_path))


BROKEN = [
    (SOLVED, "divides", r"the solution of scenario .*division by zero \(.*rewards\.py:\d+, in divid"),
    (FREE_TEXT, "divides", r"the answer '.*' of scenario .*ZeroDivisionError"),
    (SOLVED, "forgets", "the reward is None"),
]


def test_a_broken_reward_is_refused_with_file_and_line(root):
    for environment, reward, message in BROKEN:
        with pytest.raises(JudgeError, match=message):
            check(root, reward=reward, _target_=environment)


COSTS = [
    (
        ["algorithm.costs={invalid_actons: {limit: 1}}"],
        r"costs\.invalid_actons: .*turns.*Did you mean 'invalid_actions'",
    ),
    (
        ["algorithm.costs={reasoning_tokens: {limit: 1}}"],  # of a model without reasoning
        r"costs\.reasoning_tokens: no episode has a cost of this name; expected one of (?!.*reasoning_tokens)",
    ),
    (["algorithm.costs={tool_calls: {limit: 1}}"], r"costs\.tool_calls: no episode has a cost of this name"),
    (["reward=costs", "algorithm.costs={tool_cals: {limit: 1}}"], r"expected one of .*task.*Did you mean 'tool_calls'"),
]


def test_a_cost_that_no_episode_has_is_refused_with_the_names_that_exist(root):
    for overrides, message in COSTS:
        for warmup in ("none", "sft_short"):
            with pytest.raises(SpecError, match=message):
                check(root, "filter=everything", f"warmup={warmup}", *overrides)
    costs = "algorithm.costs={tool_calls: {limit: 1}, truncated: {limit: 1}, invalid_actions: {limit: 1}}"
    check(root, "filter=everything", "reward=costs", costs)


UNSOLVABLE = [
    ("solve", r"fails on each of 8 scenarios .*KeyError: 'answers' \(.*faulty_environment.py:\d+, in solve\)"),
    ("", r"solves none of 8 scenarios .*warmup.filter keeps none.*'success': False"),
]


def test_a_solver_that_always_fails_is_refused_if_it_must_demonstrate(root):
    for fault, message in UNSOLVABLE:
        with pytest.raises(EnvironmentFailed, match=message):
            check(root, "warmup=sft_short", _target_=UNSOLVED, fault=fault)
        check(root, _target_=UNSOLVED, fault=fault)  # the run needs no demonstrations


def test_each_judge_answers_one_question_which_is_cached(root):
    with judge_server() as server:
        judge = ["reward=ruler", "judge_model@reward.model=served", f"reward.model.url={server.url}"]
        for _ in range(2):
            check(root, *judge, "reward.model.model=judge")
        assert len(server.requests) == 1


def test_a_server_where_nobody_listens_is_refused(root):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # a path of its own: an earlier test's server, which answered this process, may have had the same port
        url = f"http://127.0.0.1:{free.getsockname()[1]}/nobody/v1"
        judge = [
            "reward=ruler",
            "judge_model@reward.model=served",
            f"reward.model.url={url}",
            "reward.model.model=gone",
        ]
        engine = ["inference=remote", f"inference.url={url}", "inference.model=gone"]
        cases = [(judge, "unreachable"), (engine, "unreachable")]
        assert wrong_refusals(cases, lambda overrides: check(root, *overrides), ResourceError) == []
