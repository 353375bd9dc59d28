"""Shop: solvable, not by chance, and judged by the final state and the answer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest

from components.environments.protocol import Environment, Solver
from components.environments.worlds.shop import TOOLS, Shop
from components.trajectories.schema import Scenario

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "heldout")


def call(name: str, *, raw: str | None = None, **arguments) -> dict:
    """Return an assistant message with one call."""
    function = {"name": name, "arguments": json.dumps(arguments) if raw is None else raw}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def play(shop: Shop, scenario: Scenario, actions: list[dict]):
    """Play the actions until the episode ends; return the last step."""
    shop.reset(scenario)
    for action in actions:
        step = shop.step(action)
        if step.done:
            break
    return step


def first(shop: Shop, right: str) -> Scenario:
    """Return the first scenario in which this action is right."""
    return next(scenario for scenario in shop.scenarios("train") if scenario.input["right"] == right)


@pytest.fixture(scope="module")
def shop() -> Shop:
    return Shop()


def test_it_keeps_the_protocols(shop):
    assert isinstance(shop, Environment)
    assert isinstance(shop, Solver)
    assert shop.scenarios("test") == []
    assert len(shop.scenarios("train")) == 512
    assert len(shop.scenarios("heldout")) == 128


def test_the_solver_solves_everything(subtests):
    for seed in [0, 17]:
        with subtests.test(seed=seed):
            shop = Shop(seed)
            for split in SPLITS:
                for scenario in shop.scenarios(split):
                    solution = shop.solve(scenario)
                    step = play(shop, scenario, solution)
                    assert step.done
                    assert step.info == {"success": True, "state": True, "told": True, "invalid_actions": 0}
                    assert 3 <= len(solution) <= 4


def test_random_actions_rarely_succeed(shop):
    """Play an agent that makes valid calls with existing orders and items at random, and answers at random."""
    rng = random.Random(0)
    wins = 0
    for scenario in shop.scenarios("train"):
        orders = list(scenario.input["orders"])
        values = {
            "order": orders,
            "item": [order["item"] for order in scenario.input["orders"].values()],
            "address": [scenario.input["address"], "1 Oak Street"],
        }
        actions = []
        for tool in rng.choices(TOOLS, k=rng.randrange(1, 4)):
            required = tool["function"]["parameters"]["required"]
            actions.append(call(tool["function"]["name"], **{name: rng.choice(values[name]) for name in required}))
        answer = rng.choice(["Sorry, that is not possible.", f"A new {values['item'][0]} is on its way.", "Done."])
        wins += play(shop, scenario, [*actions, say(answer)]).info["success"]
    assert wins / 512 < 0.05


def test_always_using_one_tool_mostly_fails(shop):
    """Always using the same tool fails in most tasks, and the request alone does not determine the right tool."""
    for habit in ("refund", "exchange", "decline"):
        wins = 0
        for scenario in shop.scenarios("train"):
            order = scenario.input["order"]
            target = scenario.input["orders"][order]
            answer = f"Sorry. {target['price']} dollars. {target['item']}."
            wins += play(shop, scenario, [call(habit, order=order), say(answer)]).info["success"]
        assert wins / 512 < 0.45
    for kind in ("refund", "exchange", "address"):
        rights = Counter(scenario.input["right"] for scenario in shop.scenarios("train") if scenario.type == kind)
        assert max(rights.values()) / sum(rights.values()) < 0.75


def test_splits_share_nothing(subtests):
    for seed in [0, 3]:
        with subtests.test(seed=seed):
            shop = Shop(seed)
            numbers = {}
            for split in SPLITS:
                scenarios = shop.scenarios(split)
                assert all(scenario.split == split for scenario in scenarios)
                assert len({scenario.id for scenario in scenarios}) == len(scenarios)
                numbers[split] = [number for scenario in scenarios for number in scenario.input["orders"]]
                assert len(set(numbers[split])) == len(numbers[split])
            assert not set(numbers["train"]) & set(numbers["heldout"])


def test_every_type_and_difficulty_occurs(shop):
    for split in SPLITS:
        kinds = Counter((scenario.type, scenario.difficulty) for scenario in shop.scenarios(split))
        assert {kind for kind, _ in kinds} == {"refund", "exchange", "address"}
        assert {difficulty for _, difficulty in kinds} == {1, 2, 3, 4, 5}
        assert {scenario.input["right"] for scenario in shop.scenarios(split)} == {
            "refund",
            "exchange",
            "change_address",
            "decline",
        }


def digest(shop: Shop) -> str:
    data = [asdict(scenario) for split in SPLITS for scenario in shop.scenarios(split)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def test_scenarios_are_the_same_in_every_process():
    code = "from tests.environments.test_shop import digest, Shop; print(digest(Shop(5, train=50, heldout=20)))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hashseed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hashseed in ("1", "2")
    }
    assert digests == {digest(Shop(5, train=50, heldout=20))}
    assert digest(Shop(5, train=50, heldout=20)) != digest(Shop(6, train=50, heldout=20))


def test_the_request_names_the_order_and_not_the_answer(shop):
    for scenario in shop.scenarios("train"):
        (system, user) = shop.reset(scenario)
        assert (system["role"], user["role"]) == ("system", "user")
        assert scenario.input["order"] in user["content"]
        assert scenario.input["address"] in user["content"]
        for hidden in ("dollars", "shipped", "packed", "final sale", "exchange only"):
            assert hidden not in user["content"]


def test_success_needs_the_right_action_and_the_right_answer(shop):
    for right in ("refund", "exchange", "change_address", "decline"):
        scenario = first(shop, right)
        solution = shop.solve(scenario)
        silent = play(shop, scenario, [*solution[:-1], say("Done.")]).info
        assert (silent["state"], silent["told"], silent["success"]) == (True, False, False)
        idle = play(shop, scenario, [solution[-1]]).info
        assert (idle["state"], idle["told"], idle["success"]) == (False, True, False)


def test_the_fact_counts_as_whole_words(shop):
    scenario = first(shop, "refund")
    order = scenario.input["order"]
    *deeds, _ = shop.solve(scenario)
    price = scenario.input["orders"][order]["price"]
    for answer, told in (
        (f"It was {price} dollars.", True),
        (f"${price}.", True),
        (f"Order B{price}7 is refunded.", False),
        (f"1{price} dollars.", False),
    ):
        assert play(shop, scenario, [*deeds, say(answer)]).info["told"] is told


def test_another_order_must_not_be_touched(shop):
    scenario = first(shop, "refund")
    *deeds, answer = shop.solve(scenario)
    other = next(number for number in scenario.input["orders"] if number != scenario.input["order"])
    for tool in ("refund", "exchange", "decline"):
        assert not play(shop, scenario, [*deeds, call(tool, order=other), answer]).info["success"]
    assert not play(shop, scenario, [*deeds, call("change_address", order=other, address="x"), answer]).info["success"]
    assert play(shop, scenario, [*deeds, call("find_order", order=other), answer]).info["success"]


def test_a_wrong_action_cannot_be_undone(shop):
    scenario = first(shop, "exchange")
    *deeds, answer = shop.solve(scenario)
    step = play(shop, scenario, [call("refund", order=scenario.input["order"]), *deeds, answer])
    assert not step.info["state"]
    assert step.info["invalid_actions"] == 1


def test_the_address_must_be_the_one_asked_for(shop):
    scenario = first(shop, "change_address")
    wrong = call("change_address", order=scenario.input["order"], address="1 Elsewhere")
    info = play(shop, scenario, [wrong, say(f"It will go to {scenario.input['address']}.")]).info
    assert (info["state"], info["told"]) == (False, True)


def test_what_tools_answer(shop):
    scenario = first(shop, "refund")
    order = scenario.input["order"]
    target = scenario.input["orders"][order]
    shop.reset(scenario)

    def answer(action) -> str:
        (message,) = shop.step(action).observation
        assert (message["role"], message["tool_call_id"]) == ("tool", "c")
        return message["content"]

    assert answer(call("find_order", order=order)) == f"{target['item']}, {target['price']} dollars, delivered"
    assert answer(call("check_policy", item=target["item"])) == f"{target['item']}: refund or exchange"
    assert answer(call("refund", order=order)) == f"{target['price']} dollars refunded"
    assert answer(call("exchange", order=order)) == f"error: {order} is closed"


BAD = [
    (call("find_order"), "error: find_order takes order"),
    (call("find_order", raw="{"), "error: find_order takes order"),
    (call("find_order", raw=""), "error: find_order takes order"),
    (call("find_order", raw='["K1"]'), "error: find_order takes order"),
    (call("find_order", raw="[" * 100_000), "error: find_order takes order"),
    (call("find_order", order=7), "error: find_order takes order"),
    (call("find_order", order=None), "error: find_order takes order"),
    (call("find_order", order="K1", item="lamp"), "error: find_order takes order"),
    (call("change_address", order="K1"), "error: change_address takes address, order"),
    (call("find_order", order="K1"), "error: no order K1"),
    (call("check_policy", item="unicorn"), "error: no item unicorn"),
    (call("delete_shop"), "error: no tool delete_shop"),
    (call(""), "error: no tool "),
]


def test_bad_calls_are_answered_and_counted(shop, subtests):
    for action, answer in BAD:
        with subtests.test(action=action):
            scenario = first(shop, "refund")
            shop.reset(scenario)
            step = shop.step(action)
            assert step.observation[0]["content"] == answer
            assert not step.done
            assert step.info["invalid_actions"] == 1
            # It is no obstacle to doing the right thing afterwards.
            assert play(shop, scenario, [action, *shop.solve(scenario)]).info["success"]


def test_several_calls_in_one_message(shop):
    scenario = first(shop, "refund")
    *deeds, answer = shop.solve(scenario)
    calls = [{**message["tool_calls"][0], "id": f"c{index}"} for index, message in enumerate(deeds)]
    shop.reset(scenario)
    step = shop.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert [message["tool_call_id"] for message in step.observation] == ["c0", "c1", "c2"]
    assert shop.step(answer).info["success"]


def test_an_episode_leaves_its_scenario_as_it_was(shop):
    scenario = first(shop, "change_address")
    before = deepcopy(scenario.input)
    play(shop, scenario, shop.solve(scenario))
    assert scenario.input == before
    assert play(shop, scenario, shop.solve(scenario)).info["success"]


def test_too_many_scenarios_are_refused():
    with pytest.raises(ValueError, match="there are order numbers for 20000 scenarios"):
        Shop(train=19_000, heldout=1_001)
