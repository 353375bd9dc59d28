"""Generated scenarios: uniqueness, stable held-out splits, too few distinct tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from components.environments.seeded import generate


def _task(rng, difficulty, split):
    return "even" if difficulty % 2 == 0 else "odd", {"number": 100 * difficulty + rng.randrange(20)}


def scenarios_with(**changed):
    options = {"seed": 0, "train": 20, "heldout": 10, "difficulties": (1, 2)}
    return generate("numbers", _task, **{**options, **changed})


def test_tasks_are_unique_and_difficulties_alternate():
    scenarios = scenarios_with()
    assert Counter(scenario.split for scenario in scenarios) == {"train": 20, "heldout": 10}
    assert (
        len({scenario.id for scenario in scenarios}) == len({scenario.input["number"] for scenario in scenarios}) == 30
    )
    assert Counter((scenario.split, scenario.difficulty) for scenario in scenarios) == {
        ("train", 1): 10,
        ("train", 2): 10,
        ("heldout", 1): 5,
        ("heldout", 2): 5,
    }
    assert {(scenario.type, scenario.difficulty) for scenario in scenarios} == {("odd", 1), ("even", 2)}


def test_heldout_scenarios_do_not_depend_on_train_size():
    few, many = (
        [scenario for scenario in scenarios_with(train=train, difficulties=(1,)) if scenario.split == "heldout"]
        for train in (1, 10)
    )
    assert few == many
    assert scenarios_with(seed=1)[0].input != scenarios_with()[0].input


def test_too_few_distinct_tasks_are_reported():
    with pytest.raises(ValueError, match="train = 31: there are too few distinct tasks of difficulty 1"):
        scenarios_with(train=31, difficulties=(1,))


def test_difficulties_range_from_one_to_five(subtests):
    for difficulties in [(), (0,), (1, 6)]:
        with subtests.test(difficulties=difficulties), pytest.raises(ValueError, match="expected one or more of"):
            scenarios_with(difficulties=difficulties)
