"""Scenarios from a seed: none twice, held-out ones that stay, and what there are too few of."""

from __future__ import annotations

from collections import Counter

import pytest

from components.environments.seeded import generate


def _task(rng, difficulty, split):
    return "even" if difficulty % 2 == 0 else "odd", {"number": 100 * difficulty + rng.randrange(20)}


def made(**changed):
    given = {"seed": 0, "train": 20, "heldout": 10, "difficulties": (1, 2)}
    return generate("numbers", _task, **{**given, **changed})


def test_no_task_occurs_twice_and_difficulties_take_turns():
    found = made()
    assert Counter(one.split for one in found) == {"train": 20, "heldout": 10}
    assert len({one.id for one in found}) == len({one.input["number"] for one in found}) == 30
    assert Counter((one.split, one.difficulty) for one in found) == {
        ("train", 1): 10,
        ("train", 2): 10,
        ("heldout", 1): 5,
        ("heldout", 2): 5,
    }
    assert {(one.type, one.difficulty) for one in found} == {("odd", 1), ("even", 2)}


def test_what_is_held_out_does_not_depend_on_what_is_trained_on():
    few, many = ([one for one in made(train=train, difficulties=(1,)) if one.split == "heldout"] for train in (1, 10))
    assert few == many
    assert made(seed=1)[0].input != made()[0].input


def test_there_are_only_so_many_tasks():
    with pytest.raises(ValueError, match="train = 31: there are too few distinct tasks of difficulty 1"):
        made(train=31, difficulties=(1,))


@pytest.mark.parametrize("difficulties", [(), (0,), (1, 6)])
def test_difficulties_go_from_one_to_five(difficulties):
    with pytest.raises(ValueError, match="expected one or more of"):
        made(difficulties=difficulties)
