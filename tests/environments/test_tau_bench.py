"""tau-bench: tools, reward, simulated users, reading of the data; on a small data set of our own in its format.

The folder `tau_bench` beside this file has it. The published data is tested where `ESPALIER_TAU_BENCH` names its
folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from components.data.importing import DataImport
from components.data.spec import DataSpec
from components.environments.tau_bench import TauBench
from components.environments.tau_bench.__main__ import main
from components.environments.tau_bench.airline import AirlineTools
from components.environments.tau_bench.data import read_domain
from components.environments.tau_bench.database import EpisodeDatabase
from components.environments.tau_bench.retail import RetailTools
from components.environments.tau_bench.user import PATIENCE, STOP, SimulatedUser
from components.environments.tools import InvalidAction, call, run_tool
from components.errors import ResourceError, SpecError
from components.specs import Target
from tests.environments import checks
from tests.environments.test_service import server

DATA = str(Path(__file__).with_name("tau_bench"))
PUBLISHED = os.environ.get("ESPALIER_TAU_BENCH", "")
KINDS = {"retail": RetailTools, "airline": AirlineTools}
domains = pytest.mark.parametrize("domain", KINDS)


def toolset(domain):
    return KINDS[domain](EpisodeDatabase(read_domain(DATA, domain).tables))


def run(tools, name, **arguments):
    """Return the record of an answer, the text of another, or the message of an error."""
    try:
        text = run_tool(tools, name, arguments)
    except InvalidAction as error:
        return f"Error: {error}"
    return json.loads(text) if text[:1] in "{[" and text else text


def environment(domain="retail", **options):
    return TauBench(DATA, domain, **options)


def say(text):
    return {"role": "assistant", "content": text}


def scenario_of(world, name):
    everything = [*world.scenarios("train"), *world.scenarios("heldout")]
    return next(scenario for scenario in everything if scenario.id == name)


def last(world, name, actions):
    return checks.play(world, scenario_of(world, name), actions)[-1]


# --- both domains -----------------------------------------------------------------------------------------------------


@domains
def test_it_satisfies_the_environment_contract(domain):
    checks.check(lambda: environment(domain))


@domains
def test_every_published_tool_has_a_plain_schema(domain):
    names = {
        "retail": "cancel_pending_order exchange_delivered_order_items find_user_id_by_email find_user_id_by_name_zip "
        "get_order_details get_product_details get_user_details list_all_product_types modify_pending_order_address "
        "modify_pending_order_items modify_pending_order_payment modify_user_address return_delivered_order_items "
        "think calculate transfer_to_human_agents",
        "airline": "book_reservation calculate cancel_reservation get_reservation_details get_user_details "
        "list_all_airports search_direct_flight search_onestop_flight send_certificate think transfer_to_human_agents "
        "update_reservation_baggages update_reservation_flights update_reservation_passengers",
    }
    tools = {tool["function"]["name"]: tool["function"] for tool in environment(domain).tools()}
    assert set(tools) == set(names[domain].split())
    assert all(tool["description"] and tool["parameters"]["type"] == "object" for tool in tools.values())
    assert "$ref" not in json.dumps(list(tools.values()))


def test_arguments_of_a_booking_are_described_in_full():
    tools = {tool["function"]["name"]: tool["function"] for tool in environment("airline").tools()}
    parameters = tools["book_reservation"]["parameters"]
    assert parameters["required"] == list(parameters["properties"])
    assert parameters["properties"]["cabin"]["enum"] == ["basic_economy", "economy", "business"]
    assert parameters["properties"]["payment_methods"]["items"]["properties"] == {
        "payment_id": {"type": "string"},
        "amount": {"type": "number"},
    }


def test_published_splits_map_onto_training_and_held_out_scenarios():
    retail = environment()
    assert [scenario.id for scenario in retail.scenarios("train")] == [f"retail-train-{n}" for n in range(3)]
    assert [scenario.id for scenario in retail.scenarios("heldout")] == [f"retail-test-{n}" for n in range(3)]
    both = environment(heldout=("dev", "test")).scenarios("heldout")
    assert [scenario.id for scenario in both][:2] == ["retail-dev-0", "retail-test-0"]
    assert [(scenario.type, scenario.difficulty) for scenario in both[:3]] == [
        ("none", 1),
        ("several", 2),
        ("exchange_delivered_order_items", 1),
    ]


def test_a_domain_without_training_tasks_shares_the_held_out_ones():
    airline = environment("airline")
    assert [scenario.id[-1] for scenario in airline.scenarios("train")] == ["1", "3", "5"]
    assert [scenario.id[-1] for scenario in airline.scenarios("heldout")] == ["0", "2", "4"]
    whole = environment("airline", train_share=0)
    assert (len(whole.scenarios("train")), len(whole.scenarios("heldout"))) == (0, 6)


def test_tasks_that_require_nothing_can_be_dropped():
    kept, dropped = (environment(heldout=("dev",), nothing_required=way) for way in ("keep", "drop"))
    assert [scenario.id for scenario in kept.scenarios("heldout")] == ["retail-dev-0"]
    assert dropped.scenarios("heldout") == []
    assert dropped.scenarios("train") == kept.scenarios("train")
    assert last(kept, "retail-dev-0", [say("You cannot cancel it.")]).info["success"]


# --- retail -----------------------------------------------------------------------------------------------------------


def test_users_are_identified_by_email_or_name_and_zip():
    tools = toolset("retail")
    assert run(tools, "find_user_id_by_email", email="Ada.Quill@example.com") == "ada_quill_1"
    assert run(tools, "find_user_id_by_email", email="nobody@example.com") == "Error: user not found"
    assert run(tools, "find_user_id_by_name_zip", first_name="bo", last_name="MARSH", zip="00022") == "bo_marsh_2"
    assert (
        run(tools, "find_user_id_by_name_zip", first_name="Bo", last_name="Marsh", zip="1") == "Error: user not found"
    )


def test_records_are_shown_as_they_are_published():
    tools = toolset("retail")
    assert run(tools, "list_all_product_types") == {"Anvil": "800", "Lantern": "900"}
    for tool, table, noun, key in (
        ("get_order_details", "orders", "order", "#W2"),
        ("get_product_details", "products", "product", "900"),
        ("get_user_details", "users", "user", "bo_marsh_2"),
    ):
        assert run_tool(tools, tool, {f"{noun}_id": key}) == json.dumps(tools.find(table, key))
        assert run(tools, tool, **{f"{noun}_id": "none"}) == f"Error: {noun} not found"


def test_a_cancelled_order_is_refunded_to_the_gift_card_at_once():
    tools = toolset("retail")
    order = run(tools, "cancel_pending_order", order_id="#W3", reason="ordered by mistake")
    assert (order["status"], order["cancel_reason"]) == ("cancelled", "ordered by mistake")
    assert order["payment_history"][1] == {
        "transaction_type": "refund",
        "amount": 18.0,
        "payment_method_id": "gift_card_2002",
    }
    assert tools.find("users", "bo_marsh_2")["payment_methods"]["gift_card_2002"]["balance"] == 23.0
    again = run(tools, "cancel_pending_order", order_id="#W3", reason="ordered by mistake")
    assert again == "Error: non-pending order cannot be cancelled"
    assert "reason" in run(tools, "cancel_pending_order", order_id="#W1", reason="changed my mind")


def test_modified_items_change_order_price_and_status_once():
    tools = toolset("retail")
    change = {"order_id": "#W1", "payment_method_id": "gift_card_2001"}
    order = run(tools, "modify_pending_order_items", item_ids=["101", "201"], new_item_ids=["102", "202"], **change)
    assert [item["item_id"] for item in order["items"]] == ["102", "202"]
    assert [item["price"] for item in order["items"]] == [25.25, 95.3]
    assert order["status"] == "pending (item modified)"
    assert order["payment_history"][1]["amount"] == pytest.approx(39.95)
    assert tools.find("users", "ada_quill_1")["payment_methods"]["gift_card_2001"]["balance"] == 0.05
    again = run(tools, "modify_pending_order_items", item_ids=["102"], new_item_ids=["101"], **change)
    assert again == "Error: non-pending order cannot be modified"
    cancel = run(tools, "cancel_pending_order", order_id="#W1", reason="no longer needed")
    assert cancel == "Error: non-pending order cannot be cancelled"


def test_item_changes_are_checked_and_leave_the_database_alone(subtests):
    change = {"order_id": "#W1", "item_ids": ["101"], "new_item_ids": ["102"], "payment_method_id": "credit_card_1001"}
    for arguments, message in [
        ({"new_item_ids": ["104"]}, "new item 104 not found or available"),
        ({"new_item_ids": ["202"]}, "new item 202 not found or available"),
        ({"item_ids": ["999"]}, "item 999 not found"),
        ({"item_ids": ["101", "101"]}, "number of 101 not found"),
        ({"new_item_ids": ["102", "103"]}, "the number of items to be exchanged should match"),
        ({"payment_method_id": "paypal_3001"}, "payment method not found"),
    ]:
        with subtests.test(message):
            tools = toolset("retail")
            result = run(tools, "modify_pending_order_items", **change | arguments)
            assert result == f"Error: {message}"
            assert not any(tools.database.changes().values())
    paid = {"item_ids": ["201"], "new_item_ids": ["202"], "payment_method_id": "gift_card_2001"}
    order = run(toolset("retail"), "modify_pending_order_items", **change | paid)
    assert order["payment_history"][1]["amount"] == pytest.approx(35.2)


def test_gift_cards_must_cover_the_difference():
    tools = toolset("retail")
    change = {"order_id": "#W4", "item_ids": ["201"], "new_item_ids": ["202"]}
    poor = run(tools, "exchange_delivered_order_items", payment_method_id="gift_card_2002", **change)
    assert poor == "Error: insufficient gift card balance to pay for the price difference"
    rich = run(tools, "exchange_delivered_order_items", payment_method_id="paypal_3001", **change)
    assert rich["status"] == "exchange requested"
    assert rich["exchange_price_difference"] == 35.2
    assert [item["item_id"] for item in rich["items"]] == ["201", "101"], "the items arrive later"


def test_another_payment_method_pays_and_refunds_the_earlier_one():
    tools = toolset("retail")
    order = run(tools, "modify_pending_order_payment", order_id="#W6", payment_method_id="gift_card_2001")
    assert [entry["transaction_type"] for entry in order["payment_history"]] == ["payment", "payment", "refund"]
    assert tools.find("users", "ada_quill_1")["payment_methods"]["gift_card_2001"]["balance"] == 22.0
    tools = toolset("retail")
    for order, method, message in (
        ("#W6", "credit_card_1001", "the new payment method should be different from the current one"),
        ("#W1", "gift_card_2001", "insufficient gift card balance to pay for the order"),
        ("#W5", "paypal_3002", "non-pending order cannot be modified"),
    ):
        assert (
            run(tools, "modify_pending_order_payment", order_id=order, payment_method_id=method) == f"Error: {message}"
        )


def test_returns_go_to_the_original_payment_method_or_a_gift_card():
    tools = toolset("retail")
    items = {"order_id": "#W4", "item_ids": ["201", "101"]}
    order = run(tools, "return_delivered_order_items", payment_method_id="gift_card_2002", **items)
    assert order["return_items"] == ["101", "201"]
    assert (order["status"], order["return_payment_method_id"]) == ("return requested", "gift_card_2002")
    again = run(tools, "return_delivered_order_items", payment_method_id="gift_card_2002", **items)
    assert again == "Error: non-delivered order cannot be returned"
    tools = toolset("retail")
    tools.database.edit("users", "bo_marsh_2")["payment_methods"]["credit_card_9"] = {"source": "credit_card"}
    other = run(tools, "return_delivered_order_items", payment_method_id="credit_card_9", **items)
    assert other == "Error: payment method should be either the original payment method or a gift card"


# --- airline ----------------------------------------------------------------------------------------------------------

BOOKING = {
    "user_id": "dot_vane_1",
    "origin": "SFO",
    "destination": "JFK",
    "flight_type": "one_way",
    "cabin": "economy",
    "flights": [{"flight_number": "ZZ1", "date": "2024-05-20"}],
    "passengers": [{"first_name": "Dot", "last_name": "Vane", "dob": "1980-01-02"}],
    "payment_methods": [
        {"payment_id": "certificate_1", "amount": 80},
        {"payment_id": "gift_card_1", "amount": 100},
    ],
    "total_baggages": 2,
    "nonfree_baggages": 1,
    "insurance": "yes",
}


def test_flights_are_those_that_can_be_booked():
    tools = toolset("airline")
    route = {"origin": "SFO", "destination": "JFK"}
    assert run(tools, "search_direct_flight", date="2024-05-10", **route) == []
    (flight,) = run(tools, "search_direct_flight", date="2024-05-20", **route)
    assert (flight["flight_number"], flight["prices"]["economy"]) == ("ZZ1", 100)
    assert "dates" not in flight
    pairs = run(tools, "search_onestop_flight", date="2024-05-20", **route)
    assert [[leg["flight_number"] + " " + leg["date"][-2:] for leg in pair] for pair in pairs] == [
        ["ZZ2 20", "ZZ3 21"],
        ["ZZ4 20", "ZZ3 20"],
    ]


def test_a_booking_uses_up_certificates_and_gift_cards():
    tools = toolset("airline")
    record = run(tools, "book_reservation", **BOOKING)
    assert (record["reservation_id"], record["created_at"]) == ("HATHAT", "2024-05-15T15:00:00")
    assert record["flights"] == [{**BOOKING["flights"][0], "price": 100, "origin": "SFO", "destination": "JFK"}]
    user = tools.find("users", "dot_vane_1")
    assert user["reservations"][-1] == "HATHAT"
    assert "certificate_1" not in user["payment_methods"]
    assert user["payment_methods"]["gift_card_1"]["amount"] == 50
    cheap = {**BOOKING, "payment_methods": [{"payment_id": "credit_card_1", "amount": 180}]}
    assert run(tools, "book_reservation", **cheap)["reservation_id"] == "HATHAU"


def test_a_booking_is_checked_and_leaves_the_database_alone(subtests):
    for arguments, message in [
        ({"user_id": "none"}, "user not found"),
        ({"flights": [{"flight_number": "ZZ9", "date": "2024-05-20"}]}, "flight ZZ9 not found"),
        (
            {"flights": [{"flight_number": "ZZ1", "date": "2024-05-10"}]},
            "flight ZZ1 not available on date 2024-05-10",
        ),
        ({"flights": [{"flight_number": "ZZ1", "date": "2024-05-21"}]}, "not enough seats on flight ZZ1"),
        ({"payment_methods": [{"payment_id": "card", "amount": 180}]}, "payment method card not found"),
        (
            {"payment_methods": [{"payment_id": "gift_card_1", "amount": 180}]},
            "not enough balance in payment method gift_card_1",
        ),
        (
            {"payment_methods": [{"payment_id": "credit_card_1", "amount": 130}]},
            "payment amount does not add up, total price is 180, but paid 130",
        ),
    ]:
        with subtests.test(message=message):
            tools = toolset("airline")
            assert run(tools, "book_reservation", **BOOKING | arguments) == f"Error: {message}"
            assert not any(tools.database.changes().values())


def test_kept_flights_keep_their_price_unless_the_cabin_changes():
    tools = toolset("airline")
    flights = [{"flight_number": "ZZ1", "date": "2024-05-20"}]
    change = {"reservation_id": "AAA111", "flights": flights, "payment_id": "credit_card_1"}
    kept = run(tools, "update_reservation_flights", cabin="economy", **change)
    assert (kept["flights"][0]["price"], len(kept["payment_history"])) == (95, 1)
    business = run(tools, "update_reservation_flights", cabin="business", **change)
    assert business["payment_history"][-1] == {"payment_id": "credit_card_1", "amount": 410}
    assert business["cabin"] == "economy", "as in the recorded answers, the cabin of the record stays"
    for payment, message in (
        ("certificate_1", "certificate cannot be used to update reservation"),
        ("none", "payment method not found"),
        ("gift_card_1", "gift card balance is not enough"),
    ):
        change = {"reservation_id": "BBB222", "flights": flights, "payment_id": payment}
        assert run(tools, "update_reservation_flights", cabin="business", **change) == f"Error: {message}"


def test_bags_passengers_cancellation_and_certificates():
    tools = toolset("airline")
    bags = {"reservation_id": "AAA111", "total_baggages": 4, "payment_id": "gift_card_1"}
    assert (
        run(tools, "update_reservation_baggages", nonfree_baggages=4, **bags)
        == "Error: gift card balance is not enough"
    )
    record = run(tools, "update_reservation_baggages", nonfree_baggages=2, **bags)
    assert record["payment_history"][-1] == {"payment_id": "gift_card_1", "amount": 100}
    assert tools.find("users", "dot_vane_1")["payment_methods"]["gift_card_1"]["amount"] == 50
    one = [{"first_name": "Dot", "last_name": "Vane", "dob": "1980-01-02"}]
    fewer = run(tools, "update_reservation_passengers", reservation_id="AAA111", passengers=one)
    assert fewer == "Error: number of passengers does not match"
    cancelled = run(tools, "cancel_reservation", reservation_id="AAA111")
    assert [payment["amount"] for payment in cancelled["payment_history"]] == [190, 100, -190, -100]
    assert cancelled["status"] == "cancelled"
    first = run(tools, "send_certificate", user_id="eli_moss_2", amount=50)
    assert first == "Certificate certificate_3221322 added to user eli_moss_2 with amount 50."
    assert "3221323" in run(tools, "send_certificate", user_id="eli_moss_2", amount=50)


def test_calculate_rounds_to_two_decimals():
    cases = {
        "152 + 103": "255.0",
        "2 * ((350 - 122) + (499 - 127))": "1200.0",
        "10 / 3": "3.33",
        "135.24 - 153.23": "-17.99",
    }
    assert {expression: run(toolset("airline"), "calculate", expression=expression) for expression in cases} == cases


def test_calculate_answers_anything_else_with_an_error(subtests):
    for expression in ["__import__('os')", "1 / 0", "9 ** 99 ** 9", "", "1 +" * 900 + "1"]:
        with subtests.test(expression=expression[:60]):
            assert run(toolset("airline"), "calculate", expression=expression).startswith("Error: ")


# --- episodes and reward ----------------------------------------------------------------------------------------------


def test_the_database_is_compared_not_the_way_to_it():
    retail = environment()
    cancel = call("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"})
    look = call("get_order_details", {"order_id": "#W1"})
    assert last(retail, "retail-train-0", [look, look, cancel, say("Done.")]).info["success"]
    other = call("cancel_pending_order", {"order_id": "#W1", "reason": "ordered by mistake"})
    assert not last(retail, "retail-train-0", [other, *[say("Done.")] * PATIENCE]).info["success"]
    more = call("cancel_pending_order", {"order_id": "#W6", "reason": "no longer needed"})
    assert not last(retail, "retail-train-0", [cancel, more, *[say("Done.")] * PATIENCE]).info["success"]


def test_outputs_count_regardless_of_commas_only_in_messages_to_the_user():
    retail = environment()
    gold = retail.solve(scenario_of(retail, "retail-test-1"))[:-1]
    for text, informed in (("It is $155.40.", True), ("Together 1,55.4", True), ("Done.", False)):
        step = last(retail, "retail-test-1", [*gold, say(text)])
        assert (step.info["informed"], step.info["success"], step.done) == (informed, informed, informed)
    beside = [*gold[:-1], {**gold[-1], "content": "It is $155.40."}]
    assert not last(retail, "retail-test-1", beside).info["informed"], "text beside a call does not reach the user"


def test_an_episode_succeeds_only_once_it_has_ended():
    retail = environment()
    gold = retail.solve(scenario_of(retail, "retail-test-2"))
    steps = checks.play(retail, scenario_of(retail, "retail-test-2"), gold)
    assert [step.info["success"] for step in steps] == [False, True]
    assert [step.info["state"] for step in steps] == [True, True]
    early = last(retail, "retail-test-2", [gold[-1]])
    assert early.done
    assert not early.info["success"]


def test_calls_after_a_transfer_are_not_executed():
    retail = environment()
    calls = [*call("transfer_to_human_agents", {"summary": ""}, 0)["tool_calls"]]
    calls += call("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"}, 1)["tool_calls"]
    step = last(retail, "retail-train-0", [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert [message["content"] for message in step.observation] == ["Transfer successful", "Error: the episode is over"]
    assert not step.info["state"]


def test_a_failed_gold_action_changes_nothing_and_the_rest_counts():
    retail = environment()
    scenario = scenario_of(retail, "retail-train-0")
    wrong = {"name": "cancel_pending_order", "kwargs": {"order_id": "#W5", "reason": "no longer needed"}}
    changed = type(scenario)("failing", {**scenario.input, "actions": [wrong, *scenario.input["actions"]]}, "train")
    assert checks.solved(retail, changed)


def test_the_scripted_user_states_its_instruction_confirms_and_loses_patience():
    retail = environment()
    scenario = scenario_of(retail, "retail-train-0")
    messages = retail.reset(scenario)
    assert messages[0]["content"] == (Path(DATA) / "retail/policy.md").read_text().strip()
    assert scenario.input["instruction"] in messages[1]["content"]
    replies = [retail.step(say("Shall I?")).observation[0]["content"] for _ in range(PATIENCE)]
    assert replies == ["Yes, please go ahead."] * (PATIENCE - 1) + [f"I have to go. {STOP}"]


def test_a_model_plays_the_user_and_stops_the_conversation():
    with server(["I want to cancel an order.", "Yes.", f"Thanks. {STOP}"]) as (url, requests):
        retail = environment(user=SimulatedUser(url=url, model="m", temperature=1))
        scenario = scenario_of(retail, "retail-train-0")
        first = checks.asked(retail.reset(scenario))
        assert first[1] == {"role": "user", "content": "I want to cancel an order."}
        actions = [say("Shall I cancel #W1?"), retail.solve(scenario)[0], say("Done.")]
        steps = [checks.asked(retail.step(action)) for action in actions]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].info["success"]
    bodies = [request["body"] for request in requests]
    assert scenario.input["instruction"] in bodies[0]["messages"][0]["content"]
    assert [message["role"] for message in bodies[2]["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert bodies[2]["messages"][-1]["content"] == "Done."
    assert bodies[0]["temperature"] == 1


def test_a_saved_conversation_with_a_model_continues():
    with server(["Cancel #W1.", f"Bye {STOP}"]) as (url, requests):
        first, second = (environment(user=SimulatedUser(url=url, model="m")) for _ in range(2))
        scenario = scenario_of(first, "retail-train-0")
        checks.asked(first.reset(scenario))
        first.step(first.solve(scenario)[0])
        second.restore(scenario, json.loads(json.dumps(first.save())))
        step = asyncio.run(second.step(say("Done.")))
    assert step.info["success"]
    assert requests[-1]["body"]["messages"][2]["content"] == "Cancel #W1."


# --- data -------------------------------------------------------------------------------------------------------------


def test_stage_keys_have_the_content_of_the_data_not_its_path(tmp_path):
    def key(data, **options):
        target = {"_target_": f"{TauBench.__module__}.TauBench", "data": str(data), **options}
        return Target.model_validate(target).resolved()

    copy = shutil.copytree(DATA, tmp_path / "copy")
    assert key(DATA) == key(copy)
    policy = copy / "retail" / "policy.md"
    policy.write_text(policy.read_text() + "Be brief.\n")
    assert key(DATA) != key(copy)
    served = {"url": "http://a/v1", "model": "m"}
    assert key(DATA, user=served) == key(DATA, user={**served, "url": "http://b/v1"})
    assert key(DATA, user=served) != key(DATA, user={**served, "temperature": 1}) != key(DATA)


def broken(tmp_path, file, text):
    folder = shutil.copytree(DATA, tempfile.mkdtemp(dir=tmp_path), dirs_exist_ok=True)
    damaged = Path(folder, file)
    damaged.unlink() if text is None else damaged.write_text(text)
    return folder


def test_broken_data_is_reported_with_the_key(tmp_path, subtests):
    for file, text, error, message in [
        ("retail/orders.json", None, ResourceError, r"environment.data = .*orders.json: No such file"),
        ("retail/policy.md", None, ResourceError, r"environment.data = .*policy.md: No such file"),
        ("retail/users.json", "{", SpecError, r"environment.data: .*retail/users.json is not valid JSON"),
        ("retail/users.json", "[]", SpecError, r"retail/users.json is list; expected an object with a record"),
        ("retail/users.json", '{"a": 1}', SpecError, r"the record 'a' has no name; expected name, address"),
        ("retail/orders.json", '{"#W1": {"order_id": "#W1"}}', SpecError, r"the record '#W1' has no user_id"),
        ("retail/tasks_test.json", "{}", SpecError, r"tasks_test.json is dict; expected a list of tasks"),
        (
            "retail/tasks_test.json",
            '[{"user_id": "a"}]',
            SpecError,
            r"tasks_test.json: task 0: instruction: needs a value",
        ),
        (
            "retail/tasks_test.json",
            None,
            SpecError,
            r"environment.heldout: \['test'\]: retail has the published splits",
        ),
    ]:
        with subtests.test(message=message), pytest.raises(error, match=message):
            TauBench(broken(tmp_path, file, text))


def test_missing_folders_and_unknown_domains_are_reported(tmp_path):
    with pytest.raises(ResourceError, match=r"environment.data = .*nowhere: there is no folder .*nowhere/retail"):
        TauBench(str(tmp_path / "nowhere"))
    (tmp_path / "retail").mkdir()
    with pytest.raises(ResourceError, match=r"retail has no tasks; expected orders.json, products.json, users.json"):
        TauBench(str(tmp_path))
    with pytest.raises(SpecError, match=r"environment.domain: 'hotel': expected one of retail, airline"):
        TauBench(DATA, "hotel")
    with pytest.raises(SpecError, match=r"environment.heldout: \['dev'\]: airline has the published splits test"):
        TauBench(DATA, "airline", heldout=["dev"])


# --- recorded episodes ------------------------------------------------------------------------------------------------


def recorded(tmp_path):
    """Return a file of two recorded episodes in the published format: a success and a failure."""
    airline = environment("airline", train_share=0)
    scenario = airline.scenarios("heldout")[0]
    system, user = airline.reset(scenario)
    action = {**airline.solve(scenario)[0], "content": None}
    answer = airline.step(action).observation[0]
    end = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": STOP}]
    episodes = [
        {"task_id": 0, "reward": 1.0, "traj": [system, user, action, answer, *end], "trial": 0},
        {"task_id": 0, "reward": 0.0, "traj": [system, user, *end], "trial": 1},
    ]
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(episodes))
    return str(path)


def test_recorded_episodes_are_imported_with_tools_and_reward(tmp_path):
    out, folder = tmp_path / "rows.jsonl", tmp_path / "imported"
    folder.mkdir()
    arguments = ["--data", DATA, "--domain", "airline", "--recorded", recorded(tmp_path), "--out", str(out)]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["type"], row["reward"]) for row in rows] == [
        ("airline-test-0-0", "cancel_reservation", 1.0),
        ("airline-test-0-1", "cancel_reservation", 0.0),
    ]
    report = DataImport(DataSpec(path=str(out), form="messages"), tokens=None).write(folder)
    assert (report.rows, report.examples, report.dropped()) == (2, 2, 0)
    assert main([*arguments, "--min-reward", "1"]) == 0
    assert len(out.read_text().splitlines()) == 1
    assert main([*arguments, "--train-share", "0.5"]) == 0
    assert out.read_text() == "", "task 0 is held out"
    assert main([*arguments, "--train-share", "1.5"]) == 2


@pytest.mark.parametrize("text", ["{", "{}", '[{"task_id": 0}]'])
def test_a_file_of_another_form_is_refused(tmp_path, text, caplog):
    path = tmp_path / "recorded.json"
    path.write_text(text)
    arguments = ["--data", DATA, "--domain", "airline", "--recorded", str(path), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert f"--recorded {path}" in caplog.text


@pytest.mark.skipif(not PUBLISHED, reason="ESPALIER_TAU_BENCH names no folder with the published data of tau-bench")
def test_published_gold_actions_recorded_answers_and_rewards(capsys):
    from tests.conformance.tau_bench import main as conformance

    assert conformance(["--data", PUBLISHED, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {(row["domain"], row["split"]): row["reward_1"] for row in report["gold"]} == {
        ("retail", "train"): 500,
        ("retail", "dev"): 20,
        ("retail", "test"): 115,
        ("airline", "test"): 50,
    }
    recorded = report["recorded"]
    assert (recorded["equal"], recorded["equal_rewards"], recorded["equal_gold_digests"]) == (1164, 200, 182)
    assert report["displayed"]["equal"] == 462
