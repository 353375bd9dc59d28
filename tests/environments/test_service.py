"""Service desks: policy breaches, the scripted customer, the customer played by a model."""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import contextmanager
from datetime import timedelta

import pytest

from components.environments.service.airline import Airline
from components.environments.service.airline_policy import distance
from components.environments.service.customer import (
    STOP,
    ScriptedCustomer,
    ServedCustomer,
    agrees,
    clear,
    prompt,
    says,
)
from components.environments.service.retail import Retail
from components.environments.service.retail_policy import TODAY
from components.environments.tools import call
from components.errors import EnvironmentFailed, EnvironmentUnavailable, ResourceError
from components.specs import Target
from tests.environments import checks
from tests.http_server import HttpServer

DESKS = {"retail": Retail, "airline": Airline}
both = pytest.mark.parametrize("kind", DESKS.values(), ids=DESKS)


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def first_scenario(desk, kind: str, **expected):
    """Return the first scenario of a type whose inputs are set (True) or empty (False) as expected."""
    return next(
        scenario
        for scenario in desk.scenarios("train")
        if scenario.type == kind and all(bool(scenario.input[name]) == value for name, value in expected.items())
    )


def last(desk, scenario, actions):
    return checks.play(desk, scenario, actions)[-1]


# --- both desks -------------------------------------------------------------------------------------------------------


@both
def test_solutions_succeed_with_the_scripted_customer(kind, subtests):
    for seed in [0, 5]:
        with subtests.test(seed=seed):
            desk = kind(seed, train=220, heldout=180)
            for scenario in [*desk.scenarios("train"), *desk.scenarios("heldout")]:
                solution = desk.solve(scenario)
                steps = checks.play(desk, scenario, solution)
                assert len(steps) == len(solution), "the customer left before the end"
                assert steps[-1].done
                assert steps[-1].info == {
                    "invalid_actions": 0, "success": True, "progress": 1.0, "state": True, "told": True, "ended": True,
                    "breaches": [],
                }  # fmt: skip
                assert not any(step.info["success"] for step in steps[:-1])


@both
def test_a_desk_for_some_requests_has_the_rules_and_tools_that_these_need_and_no_others(kind, subtests):
    whole = kind(train=18, heldout=0)
    for request in kind.requests:
        with subtests.test(request=request):
            desk = kind(train=40, heldout=0, requests=[request])
            offered = {tool["function"]["name"] for tool in desk.tools()}
            used: set[str] = set()
            for scenario in desk.scenarios("train"):
                solution = desk.solve(scenario)
                steps = checks.play(desk, scenario, solution)
                assert scenario.type == request
                assert steps[-1].info["success"]
                used |= {call["function"]["name"] for action in solution for call in action.get("tool_calls") or ()}
                # A refusal may name any of these rules; the policy states at least one.
                named = [[word for word in fact["words"] if word[0] in "AR"] for fact in scenario.input["facts"]]
                rules = {line.split()[0] for line in desk.system.split("\n")}
                assert all(rules.intersection(words) for words in named if words)
            assert used <= offered
            assert set(re.findall(r"\b[AR]\d+", desk.system)) <= rules, "the policy refers to a rule that it lacks"
            assert len(desk.system) < len(whole.system)
    missing = call("hand_over", {"reason": "x"})
    step = last(kind(train=9, heldout=0, requests=["cancel"]), whole.scenarios("train")[0], [missing])
    assert "no tool hand_over" in step.observation[0]["content"]
    with pytest.raises(ValueError, match="requests: refund is unknown; expected cancel, "):
        kind(requests=["refund"])


@both
def test_random_and_habitual_actions_fail(kind):
    desk = kind(train=108, heldout=18)
    names = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in desk.tools()}
    rules = [f"{kind.identity[0]}{number}" for number in range(1, 11)]

    def chance(draw: random.Random, messages: list[dict]) -> dict:
        text = " ".join(message["content"] or "" for message in messages[1:])
        words = [word.strip('".,:;{}[]()') for word in text.split()] or ["x"]
        if draw.random() < 0.4:
            asks = "May I have your name, postcode, date of birth and the number of the order or booking?"
            return say(draw.choice([asks, f"I cannot do that, rule {draw.choice(rules)}.", "Shall I go ahead?"]))
        name = draw.choice([name for name in names if name != "hand_over"])
        arguments = {
            argument: [draw.choice(words)]
            if schema.get("type") == "array"
            else draw.choice([*schema.get("enum", []), *words])
            for argument, schema in names[name].items()
        }
        return call(name, arguments)

    scenarios = desk.scenarios("train")
    assert checks.success_of(desk, scenarios, chance, turns=20) < 0.03
    for habit in (
        lambda draw, messages: call("hand_over", {"reason": "x"}),
        lambda draw, messages: say(f"I cannot do that, rule {draw.choice(rules)}."),
        lambda draw, messages: say("Done. Is there anything else?"),
    ):
        assert checks.success_of(desk, scenarios, habit, turns=8) < 0.13


@both
def test_difficulty_increases_the_number_of_actions(kind):
    desk = kind(train=360, heldout=18)
    lengths: dict[int, list[int]] = {}
    for scenario in desk.scenarios("train"):
        lengths.setdefault(scenario.difficulty, []).append(len(desk.solve(scenario)))
    mean = {level: sum(values) / len(values) for level, values in lengths.items()}
    assert set(mean) == {1, 2, 3, 4, 5}
    assert mean[1] < mean[3] < mean[5]
    assert {scenario.type for scenario in desk.scenarios("train")} == {
        scenario.type for scenario in desk.scenarios("heldout")
    }


@both
def test_many_scenarios_require_a_refusal(kind):
    scenarios = kind(train=440, heldout=18).scenarios("train")
    assert 0.2 < sum(scenario.input["customer"]["refusals"] > 0 for scenario in scenarios) / len(scenarios) < 0.6
    assert 0.35 < sum(bool(scenario.input["changes"]) for scenario in scenarios) / len(scenarios) < 0.8


@both
def test_a_change_without_consent_is_a_breach(kind):
    desk = kind(train=220, heldout=18)
    for scenario in [candidate for candidate in desk.scenarios("train") if candidate.input["changes"]][:40]:
        solution = desk.solve(scenario)
        silent = [message for message in solution if "Shall I go ahead?" not in message["content"]]
        info = last(desk, scenario, silent).info
        assert not info["success"]
        assert any(breach.startswith(f"{desk.consent}: ") for breach in info["breaches"])
        vague = [say("Shall I go ahead?") if "Shall I" in message["content"] else message for message in solution]
        assert any(breach.startswith(f"{desk.consent}: ") for breach in last(desk, scenario, vague).info["breaches"])


@both
def test_access_before_verification_is_a_breach(kind):
    desk = kind(train=220, heldout=18)
    for scenario in [candidate for candidate in desk.scenarios("train") if candidate.input["verified"]][:40]:
        early = [call("view_customer", {"customer": "C1"}), *desk.solve(scenario)]
        info = last(desk, scenario, early).info
        assert info["breaches"] == [f"{desk.identity}: looked at an account before verifying"]
        assert (info["state"], info["told"], info["success"], info["progress"]) == (True, True, False, 0.0)


@both
def test_access_to_another_account_is_a_breach(kind):
    desk = kind(train=220, heldout=18)
    scenario = first_scenario(desk, "other")
    *before, refusal = desk.solve(scenario)
    info = last(desk, scenario, [*before, call("view_customer", {"customer": "C2"}), refusal]).info
    assert f"{desk.identity}: looked at somebody else's account" in info["breaches"]


@both
def test_hand_over_without_reason_is_a_breach(kind):
    desk = kind(train=220, heldout=18)
    hand_over = call("hand_over", {"reason": "help"})
    for scenario in desk.scenarios("train"):
        info = last(desk, scenario, [hand_over]).info
        assert info["success"] == scenario.input["hand_over"] == (scenario.type in ("danger", "child"))
        assert info["ended"]
        assert bool(info["breaches"]) == (not info["success"])


@both
def test_refusal_with_the_wrong_rule_fails(kind):
    desk = kind(train=220, heldout=18)
    for scenario in [candidate for candidate in desk.scenarios("train") if candidate.input["customer"]["refusals"]][
        :30
    ]:
        wrong = f"{kind.identity[0]}2"
        text = [
            say(message["content"].replace(f"rule {rule}", f"rule {wrong}")) if message["content"] else message
            for message in desk.solve(scenario)
            for rule in [
                next((fact for fact in scenario.input["facts"][0]["words"] if fact in message["content"]), "-")
            ]
        ]
        info = last(desk, scenario, text).info
        assert (info["told"], info["success"]) == (False, False)
        every = say("I cannot: " + ", ".join(f"{kind.identity[0]}{n}" for n in range(1, 11)))
        assert not last(desk, scenario, [*desk.solve(scenario)[:2], every]).info["told"]


@both
def test_unnecessary_changes_fail(kind):
    """The same change in another place leaves another database."""
    desk = kind(train=220, heldout=18)
    name, table = ("change_address", "orders") if kind is Retail else ("add_bags", "bookings")
    for scenario in [candidate for candidate in desk.scenarios("train") if not candidate.input["changes"]][:20]:
        key = next(iter(scenario.input["database"][table]))
        arguments = {"order": key, "address": "1 X"} if kind is Retail else {"booking": key, "bags": 1}
        info = last(desk, scenario, [call(name, arguments), *desk.solve(scenario)]).info
        assert not info["state"]
        assert not info["success"]
        assert info["breaches"]


@both
def test_arbitrary_arguments_do_not_raise(kind):
    desk = kind(train=11, heldout=18)
    scenario = desk.scenarios("train")[0]
    desk.reset(scenario)
    strange = ["", "C1", "x" * 5000, "W1", "lamp-1", "P1", "2031-99-99", "\ud83d\x00", "-", "NG1"]
    draw = random.Random(0)
    for tool in desk.tools() * 8:
        function = tool["function"]
        if function["name"] == "hand_over":
            continue
        arguments = {
            name: 10**30 if schema.get("type") == "integer" else [draw.choice(strange)] if schema.get("type") == "array"
            else draw.choice([*schema.get("enum", strange)])
            for name, schema in function["parameters"]["properties"].items()
        }  # fmt: skip
        step = desk.step(call(function["name"], arguments))
        assert len(step.observation[0]["content"]) < 1500
        json.dumps(step.info)
    assert not desk.done


# --- rules that one desk has ------------------------------------------------------------------------------------------


def database_of(desk):
    """Return a copy of the first scenario's database."""
    return json.loads(json.dumps(desk.scenarios("train")[0].input["database"]))


def broken(desk, database, tool: str, **arguments) -> set[str]:
    """Return the rules, except consent, that a change to a database breaks for its first customer, who is verified."""
    desk.reset(desk.scenarios("train")[0])
    desk.open(database)
    desk.verified = "C1"
    getattr(desk, tool)(**arguments)
    return {breach.partition(":")[0] for breach in desk.breaches} - {desk.consent}


def delivered(database, day: str):
    """Deliver the first order on a day; return the arguments that return one of its lines."""
    key, order = next(iter(database["orders"].items()))
    order |= {"state": "delivered", "delivered": day}
    return {"order": key, "variants": [order["lines"][0]["variant"]], "payment": order["payment"]}


def test_returns_have_a_window_and_clearance_has_none(subtests):
    desk = Retail(train=11, heldout=18)
    for tier, days, clearance, rules in [
        ("plain", 30, False, set()),
        ("plain", 31, False, {"R4"}),
        ("plus", 45, False, set()),
        ("plus", 46, False, {"R4"}),
        ("plus", 3, True, {"R5"}),
        ("plain", 90, True, {"R4", "R5"}),
    ]:
        with subtests.test(tier=tier, days=days):
            database = database_of(desk)
            database["customers"]["C1"]["tier"] = tier
            arguments = delivered(database, str(TODAY - timedelta(days)))
            database["products"][arguments["variants"][0].rpartition("-")[0]]["clearance"] = clearance
            assert broken(desk, database, "return_items", **arguments) == rules


def test_money_does_not_go_to_another_card():
    desk = Retail(train=11, heldout=18)
    database = database_of(desk)
    arguments = delivered(database, "2031-05-18")
    database["customers"]["C1"]["payments"]["P1"] = {"kind": "card", "ending": "1"}
    assert broken(desk, database, "return_items", **{**arguments, "payment": "P1"}) == {"R7"}


def test_only_open_orders_are_changed(subtests):
    desk = Retail(train=11, heldout=18)
    for state, rules in {"open": set(), "packed": {"R3"}, "shipped": {"R3"}, "delivered": {"R3"}}.items():
        with subtests.test(state):
            database = database_of(desk)
            key, order = next(iter(database["orders"].items()))
            order["state"] = state
            assert broken(desk, database, "change_address", order=key, address="1 Elm") == rules


def test_what_can_be_cancelled(subtests):
    desk = Airline(train=11, heldout=18)
    for booking, flight, rules in [
        ({"fare": "light", "booked": "2031-09-09"}, {}, set()),
        ({"fare": "light", "booked": "2031-09-08"}, {}, {"A3"}),
        ({"fare": "light", "booked": "2031-09-08"}, {"cancelled": True}, set()),
        ({"fare": "flex", "booked": "2031-08-08"}, {}, set()),
        ({"fare": "flex", "booked": "2031-08-08"}, {"date": "2031-09-09"}, {"A3"}),
        ({"fare": "flex", "booked": "2031-08-08"}, {"date": "2031-09-10"}, set()),
    ]:
        with subtests.test(booking=booking, flight=flight):
            database = database_of(desk)
            key, first = next(iter(database["bookings"].items()))
            first.update(booking)
            database["flights"][first["flight"]].update(flight)
            assert broken(desk, database, "cancel_booking", booking=key) == rules


def test_bags_have_their_price(subtests):
    desk = Airline(train=11, heldout=18)
    for level, cabin, had, more, dollars, rules in [
        ("base", "economy", 0, 1, 35, set()),
        ("silver", "economy", 0, 3, 35, set()),
        ("gold", "economy", 1, 3, 0, set()),
        ("gold", "business", 3, 3, 0, set()),
        ("base", "business", 2, 2, 70, set()),
        ("base", "economy", 4, 3, 105, {"A6"}),
    ]:
        with subtests.test(level=level, cabin=cabin, had=had):
            database = database_of(desk)
            database["customers"]["C1"]["level"] = level
            key, first = next(iter(database["bookings"].items()))
            first.update(cabin=cabin, bags=had, passengers=["A B", "C D"])
            assert broken(desk, database, "add_bags", booking=key, bags=more) == rules
            assert desk.database["bookings"][key]["paid"] - first["paid"] == dollars


def test_distance_counts_letters():
    distances = [distance(*pair) for pair in (("anna", "anna"), ("ana", "anna"), ("mira", "mara"), ("", "abc"))]
    assert distances == [0, 1, 1, 3]


# --- the customer -----------------------------------------------------------------------------------------------------

SCRIPT = {
    "opening": "I want to cancel an order.",
    "goal": "I want it cancelled.",
    "temper": "cross",
    "facts": {"name": "Ada Abel.", "order": "It is W12."},
    "wishes": [
        {"terms": ["W12", "90"], "yes": False, "reply": "No, too much. Then half.", "words": "half"},
        {"terms": ["W12", "45"], "yes": True, "reply": "Yes, please.", "words": "half"},
    ],
    "refusals": 0,
    "insists": "But!",
}


def customer(**changed) -> ScriptedCustomer:
    return ScriptedCustomer({**SCRIPT, **changed}, {"name": "names?", "order": "orders?|number"})


def hear(listener: ScriptedCustomer, text: str, *, done: bool = False, missing: tuple[str, ...] = ()) -> str:
    return listener.answer(text, done=done, missing=list(missing))


def test_customer_discloses_only_requested_facts():
    listener = customer()
    assert hear(listener, "May I have your name?") == "Ada Abel."
    assert hear(listener, "Which order is it? I can also see the weather.") == "It is W12."
    assert hear(listener, "Your order matters to us.").startswith("What is that supposed to mean?")
    assert hear(listener, "What is your name?") == "As I said: Ada Abel."


def test_customer_accepts_offers_by_terms_and_in_order():
    listener = customer()
    assert hear(listener, "Order W12, 45 dollars. Shall I go ahead?").startswith("Not so fast.")
    assert hear(listener, "Order W12, 90 dollars. Shall I go ahead?") == "No, too much. Then half."
    assert hear(listener, "Order W12, 450 dollars. Shall I go ahead?").startswith("Not so fast.")
    assert hear(listener, "Order W12, 45 dollars. Shall I go ahead?") == "Yes, please."
    assert hear(listener, "Done.", done=True) == f"Thank you, that is all. {STOP}"


def test_customer_patience_is_limited():
    listener = customer()
    answers = [hear(listener, "Hm.") for _ in range(3)]
    assert [STOP in answer for answer in answers] == [False, False, True]


def test_customer_rejects_an_unjustified_refusal():
    listener = customer(wishes=[SCRIPT["wishes"][1]])
    assert hear(listener, "I cannot do that.") == "Which of your rules says so?"
    assert hear(listener, "I cannot do that, rule R3.").startswith("I do not think that is right.")
    assert STOP in hear(listener, "I cannot do that, rule R3.")


def test_customer_accepts_a_repeated_justified_refusal():
    listener = customer(wishes=[], refusals=2)
    assert hear(listener, "I cannot do that, rule R3.", done=True) == "But!"
    assert hear(listener, "I cannot do that, rule R3.", done=True) == f"Thank you, that is all. {STOP}"


def test_a_refusal_has_many_forms(subtests):
    for text in [
        "I'm sorry, but under rule R3 this order can no longer be cancelled.",
        "Unfortunately R3 does not let me do that.",
        "I can’t: R3.",
        "This is not possible (R3). Is there anything else I can help with?",
    ]:
        with subtests.test(text=text):
            assert STOP in hear(customer(wishes=[], refusals=1), text, done=True)


def test_asking_has_many_forms(subtests):
    for text in [
        "Could you provide your full name?",
        "To begin, please tell me the name on the account.",
        "Sure! I need your name.",
        "Welcome to our shop.\nWhat's your name",
    ]:
        with subtests.test(text=text):
            assert hear(customer(), text) == "Ada Abel."


def test_customer_asks_for_missing_facts():
    listener = customer(wishes=[])
    assert hear(listener, "Done.", done=True, missing=("How much?",)) == "How much?"
    assert STOP in hear(listener, "It is 5.", done=True)


def test_saved_customer_resumes():
    listener, other = customer(), customer()
    hear(listener, "May I have your name?")
    hear(listener, "W12 for 90 dollars?")
    other.restore(json.loads(json.dumps(listener.save())))
    for text in ("Your name?", "W12 for 45 dollars, shall I go ahead?", "Hm.", "Hm."):
        assert hear(listener, text) == hear(other, text)


def test_words():
    assert says("It costs $1,250 in all.", "1250")
    assert says("from lamp-2.", "lamp-2")
    assert not says("W1234", "123")
    assert not says("lamp-23", "lamp-2")
    assert all(says(f"That is {amount} dollars.", "45") for amount in ("45", "$45", "45.00", "**45**", "(45)"))
    assert not any(
        says(f"That is {text}.", "45") for text in ("45.20", "1.45", "10:45", "45:10", "2031-45-01", "x-45", "-4")
    )
    assert [agrees(reply) for reply in ("Yes, please.", "No. Okay?", "Sure, no problem", "I do not know", "Fine")] == [
        True, False, True, False, False,
    ]  # fmt: skip
    assert clear("R3 and R4: 1 2 3")
    assert not clear("R1 R2 R3")
    assert not clear(" ".join(str(n) for n in range(20)))


# --- a customer played by a model -------------------------------------------------------------------------------------


@contextmanager
def server(answers):
    """Yield the URL and the requests of a chat completions server; answers are texts or statuses."""
    requests: list[dict] = []
    queue = list(answers)

    def answer(method, path, body, headers):
        requests.append({"body": json.loads(body), "path": path, "key": headers.get("Authorization")})
        text = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(text, str):
            return 200, {"choices": [{"message": {"content": text}}]}
        return text, {"error": "sk-secret"}

    with HttpServer(answer) as http_server:
        yield f"{http_server.url}/v1", requests


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("components.environments.language_model.PAUSE", 0.0)


def test_a_model_plays_the_customer(monkeypatch):
    monkeypatch.setenv("CUSTOMER_KEY", "sk-secret")
    with server(["Ada.", 503, "Yes, go ahead.", f"Bye {STOP}"]) as (url, requests):
        user = {"url": url + "/", "model": "m", "key_variable": "CUSTOMER_KEY"}
        desk = Target.model_validate({"_target_": f"{Retail.__module__}.Retail", "train": 36, "user": user}).build()
        scenario = next(candidate for candidate in desk.scenarios("train") if candidate.input["changes"])
        first = desk.reset(scenario)[1]["content"]
        steps = [
            asyncio.run(desk.step(say(text))) for text in ("Your name?", desk.scenario.input["customer"]["goal"], "Bye")
        ]
        assert [step.observation[0]["content"] for step in steps] == ["Ada.", "Yes, go ahead.", f"Bye {STOP}"]
        assert [step.done for step in steps] == [False, False, True]
    assert len(requests) == 4
    body = requests[0]["body"]
    assert (requests[0]["path"], requests[0]["key"]) == ("/v1/chat/completions", "Bearer sk-secret")
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert body["seed"] == requests[-1]["body"]["seed"]
    assert [message["role"] for message in body["messages"]] == ["system", "assistant", "user"]
    assert body["messages"][1]["content"] == first
    assert len(requests[-1]["body"]["messages"]) == 7


def test_solution_succeeds_with_an_agreeing_model():
    desk = Retail(train=110, heldout=18)
    scenario = next(candidate for candidate in desk.scenarios("train") if len(candidate.input["changes"]) == 1)
    solution = desk.solve(scenario)
    texts = [message for message in solution if message["content"]]
    answers = ["Yes." if "Shall I" in message["content"] else "Hm." for message in texts]
    with server([*answers[:-1], f"Bye {STOP}"]) as (url, _):
        served = Retail(train=110, heldout=18, user=ServedCustomer(url=url, model="m"))
        served.reset(scenario)
        for action in solution:
            step = checks.asked(served.step(action))
    assert step.done
    assert step.info["success"]


def test_server_error_fails_the_episode_and_rejected_key_the_run(monkeypatch):
    monkeypatch.setenv("CUSTOMER_KEY", "sk-secret")
    for answers, error, words in (
        ([500], EnvironmentFailed, "returned no reply: HTTP 500"),
        ([400], EnvironmentFailed, "HTTP 400"),
        ([""], EnvironmentFailed, "no message in"),
        ([401], ResourceError, "rejects model 'm' or its key"),
    ):
        with server(answers) as (url, requests):
            user = ServedCustomer(url=url, model="m", key_variable="CUSTOMER_KEY")
            desk = Airline(train=11, heldout=18, user=user)
            desk.reset(desk.scenarios("train")[0])
            with pytest.raises(error, match=words) as caught:
                asyncio.run(desk.step(say("Hello")))
            assert "sk-secret" not in str(caught.value)
            assert len(requests) == (4 if answers in ([500], [""]) else 1)


def test_transient_model_failure_is_classified_as_away():
    with server([503]) as (url, _):
        served = ServedCustomer(url=url, model="m")
        with pytest.raises(EnvironmentUnavailable, match="returned no reply: HTTP 503"):
            asyncio.run(served.ask([], seed=0, max_tokens=4))
    with pytest.raises(EnvironmentUnavailable, match="returned no reply: ConnectError"):  # the server has closed
        asyncio.run(served.ask([], seed=0, max_tokens=4))
    with server([500]) as (url, _), pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(ServedCustomer(url=url, model="m").ask([], seed=0, max_tokens=4))
    assert type(caught.value) is EnvironmentFailed


def test_missing_key_is_named(monkeypatch):
    monkeypatch.delenv("CUSTOMER_KEY", raising=False)
    desk = Retail(train=11, heldout=18, user=ServedCustomer(url="http://x/v1", model="m", key_variable="CUSTOMER_KEY"))
    with pytest.raises(ResourceError, match="CUSTOMER_KEY is not set"):
        desk.reset(desk.scenarios("train")[0])


def test_invalid_user_is_rejected(subtests):
    for user in ["llm", {"url": "x", "model": "m"}, {"url": "http://a:b@c", "model": "m"}, {"url": "http://c"}]:
        with subtests.test(user=user), pytest.raises(ValueError):
            Target.model_validate({"_target_": f"{Retail.__module__}.Retail", "user": user})


def test_stage_key_contains_the_model_not_its_server():
    def key(**user):
        target = {"_target_": f"{Retail.__module__}.Retail", "user": {"url": "http://a/v1", "model": "m", **user}}
        return Target.model_validate(target).resolved()

    assert key() == key(url="http://b/v1") == key(key_variable="K")
    assert key() != key(model="n")


def test_prompt_contains_the_script():
    text = prompt(Retail(train=22, heldout=18).scenarios("train")[0].input["customer"])
    assert STOP in text
    assert "tell only when you are asked" in text
