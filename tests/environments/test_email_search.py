"""Mailbox search: searches, comparison of answers by value, and sources."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import date

import pytest

from components.environments.tools import call
from components.environments.worlds.email_search import EmailSearch
from components.environments.worlds.email_search.answers import is_right, is_unknown
from components.environments.worlds.email_search.mailbox import mailbox
from components.environments.worlds.email_search.questions import MAKERS, TODAY
from tests.environments import checks

SMALL = {"mails": 2500, "train": 100, "heldout": 40, "train_mailboxes": 2}


@pytest.fixture(scope="module")
def emails() -> EmailSearch:
    return EmailSearch(**SMALL)


def first(emails: EmailSearch, kind: str):
    return next(scenario for scenario in emails.scenarios("train") if scenario.type == kind)


def answer(text: str, *sources: str) -> dict:
    return call("answer", {"text": text, "sources": list(sources)})


def observation_of(step) -> str:
    return step.observation[0]["content"]


def test_the_solver_finds_every_answer_with_more_steps_at_higher_difficulty(subtests):
    for seed in [0, 5]:
        with subtests.test(seed=seed):
            emails = EmailSearch(**{**SMALL, "seed": seed, "train": 160})
            lengths: dict[int, list[int]] = {}
            for split in checks.SPLITS:
                for scenario in emails.scenarios(split):
                    steps = checks.play(emails, scenario, emails.solve(scenario))
                    last = steps[-1].info
                    assert last["success"], scenario
                    assert last["progress"] == 1.0
                    assert last["invalid_actions"] == 0
                    assert last["searches"] + last["reads"] + 1 == len(steps)
                    lengths.setdefault(scenario.difficulty, []).append(len(steps))
            means = [sum(lengths[level]) / len(lengths[level]) for level in sorted(lengths)]
            assert len(means) == 5
            assert means == sorted(means)
            assert means[-1] > 1.5 * means[0]


def test_every_type_and_difficulty_occurs_and_the_splits_share_no_mailbox(emails):
    by_split = {split: emails.scenarios(split) for split in checks.SPLITS}
    assert [len(by_split[split]) for split in checks.SPLITS] == [100, 40]
    for scenarios in by_split.values():
        assert {scenario.type for scenario in scenarios} == set(MAKERS)
        assert {scenario.difficulty for scenario in scenarios} == {1, 2, 3, 4, 5}
        assert len({(scenario.input["mailbox"], scenario.input["question"]) for scenario in scenarios}) == len(
            scenarios
        )
    boxes = [{scenario.input["mailbox"] for scenario in scenarios} for scenarios in by_split.values()]
    assert boxes == [{0, 1}, {2}]


def test_answering_from_the_top_hits_mostly_fails(emails):
    """A baseline searches for the question, reads a found mail, and answers with a plausible value from it."""

    def chance(draw, messages):
        if len(messages) == 2:
            return call("search", {"keywords": messages[1]["content"].split("\n")[0], "limit": 10})
        ids = re.findall(r"^(m\d{6}) ", messages[3]["content"], re.MULTILINE)
        if len(messages) == 4:
            return call("read", {"message_id": draw.choice(ids)})
        text = messages[5]["content"].split("\n\n", 1)[1]
        values = re.findall(r"\$?\d[\d,-]*\d|[A-Z]{2}-\d+|[A-Z][a-z]+ [A-Z][a-z]+", text) or ["nothing"]
        read = json.loads(messages[4]["tool_calls"][0]["function"]["arguments"])["message_id"]
        return answer(draw.choice(values), read)

    assert checks.success_of(emails, emails.scenarios("train"), chance, turns=4) < 0.1


def test_success_needs_the_answer_and_a_source(emails, subtests):
    for kind in sorted(MAKERS):
        with subtests.test(kind=kind):
            scenario = first(emails, kind)
            right, source = scenario.input["answer"], scenario.input["sources"][0]
            emails.reset(scenario)
            wrong = emails.box.mails[0]
            for action, expected in (
                (answer(right, source), ("right", True, True)),
                (answer(right, wrong.id, source), ("right", True, True)),
                (answer(right, wrong.id), ("right", False, False)),
                (answer(right), ("right", False, False)),
                (answer("Nobody", source), ("wrong", True, False)),
                (answer("I do not know.", source), ("unknown", True, False)),
                (answer(" ", source), ("no", True, False)),
                ({"role": "assistant", "content": f"{right} (see {source})"}, ("right", True, True)),
            ):
                emails.reset(scenario)
                step = emails.step(action)
                assert step.done
                info = step.info
                assert (info["answered"], info["source_right"], info["success"]) == expected
                assert (info["answer_right"], info["answer_wrong"], info["unknown"]) == tuple(
                    info["answered"] == status for status in ("right", "wrong", "unknown")
                )


def test_sources_state_the_answer_and_decoys_are_no_sources(emails):
    """Compare with the text of the mails: every source names the answer or, for a total, one of its parts."""
    for scenario in emails.scenarios("train"):
        goal = scenario.input
        emails.reset(scenario)
        names = emails.box.plan.names(goal["kind"])
        for source in goal["sources"]:
            body = emails.box.by_id[source].body
            if scenario.type == "total":
                assert any(firm in body and firm in goal["question"] for firm in emails.box.plan.firms)
            elif goal["kind"] == "date":
                day = date.fromisoformat(goal["answer"])
                assert any(
                    form in body
                    for form in (goal["answer"], f"{day.day} {day:%B} {day.year}", f"{day:%B} {day.day}, {day.year}")
                )
            elif goal["kind"] == "money":
                assert re.search(rf"\b({goal['answer']}|{int(goal['answer']):,})\b", body)
            else:
                assert goal["answer"] in body
        assert not names or goal["answer"] in names


def test_a_total_counts_each_invoice_once(emails):
    """Sum over the invoice numbers in all mails that name the firm and the project."""
    for scenario in emails.scenarios("train"):
        if scenario.type != "total":
            continue
        emails.reset(scenario)
        plan = emails.box.plan
        firm = next(name for name in plan.firms if name in scenario.input["question"])
        about = next(name for name in plan.projects if name in scenario.input["question"])
        pattern = re.compile(rf"nvoice (RN-\d+) of {firm} for {about}(?: came in:|,) \$?([\d,]+\d)")
        amounts = dict(match for mail in emails.box.mails for match in pattern.findall(mail.body))
        assert sum(int(amount.replace(",", "")) for amount in amounts.values()) == int(scenario.input["answer"])


def test_the_lowest_offer_is_that_of_the_latest_mails(emails):
    for scenario in emails.scenarios("train"):
        if scenario.type != "compare":
            continue
        emails.reset(scenario)
        plan = emails.box.plan
        about = next(name for name in plan.projects if name in scenario.input["question"])
        job = re.search(r"for the (\w+) of", scenario.input["question"])[1]
        says = r"([A-Z]\w+ \w+) (?:offers|has changed its offer and now asks) \$?([\d,]+)(?: dollars)?"
        pattern = re.compile(rf"{says} for the {job} of {about}\.")
        latest = {}
        for mail in emails.box.mails:  # by date
            for firm, amount in pattern.findall(mail.body.split("\n\nOn ")[0]):
                latest[firm] = int(amount.replace(",", ""))
        assert min(latest, key=latest.__getitem__) == scenario.input["answer"]


def test_answers_are_compared_by_value(subtests):
    values = {"money": "48500", "date": "2025-09-14", "code": "KX-2841", "person": "Ada Tarnbeck"}
    names = ["Ada Tarnbeck", "Ulf Wesker", "Olga Ostrel"]
    for kind, text, right in [
        ("money", "48,500 dollars", True),
        ("money", "It is $48500.", True),
        ("money", "48.5k", True),
        ("money", "48500.00", True),
        ("money", "$48,500 (see m123456)", True),
        ("money", "48,500 or 52,000", False),
        ("money", "148,500", False),
        ("money", "48,5000", False),
        ("money", "485000", False),
        ("money", "", False),
        ("money", "9" * 100_000, False),
        ("date", "2025-09-14", True),
        ("date", "September 14, 2025", True),
        ("date", "on the 14th of Sept 2025", True),
        ("date", "14 September", True),
        ("date", "14 September 2024", False),
        ("date", "September 15, 2025", False),
        ("date", "2025-09-14 or 2025-09-15", False),
        ("date", "14", False),
        ("code", "KX-2841", True),
        ("code", "kx 2841", True),
        ("code", "KX-28410", False),
        ("code", "KX-2841, KX-2842", False),
        ("person", "Ada Tarnbeck", True),
        ("person", "Tarnbeck does.", True),
        ("person", "Ada", False),
        ("person", "Ada Tarnbeck or Ulf Wesker", False),
        ("person", "Ada Tarnbeck stands in for Olga Ostrel", True),
    ]:
        with subtests.test(text=text[:60]):
            assert is_right(kind, text, values[kind], "Who stands in for Olga Ostrel?", names) is right


def test_unknown_is_distinguished():
    cases = {
        "I do not know.": True,
        "I don't know": True,
        "I could not find it.": True,
        "Unknown": True,
        "Ada knows": False,
        "48,500 dollars": False,
    }  # fmt: skip
    assert {text: is_unknown(text) for text in cases} == cases


def test_searches_are_narrowed_by_sender_and_days(emails):
    emails.reset(first(emails, "fact"))
    box = emails.box
    mail = box.mails[1000]
    day = date.fromordinal(mail.day).isoformat()

    def results(**arguments) -> list[list[str]]:
        text = observation_of(emails.step(call("search", {"limit": 20, **arguments})))
        return [line.split(" | ") for line in text.split("\n") if " | " in line]

    last = mail.sender.split()[1]
    assert all(row[2].endswith(last) for row in results(keywords="project meeting", sender=last))
    assert {row[1] for row in results(keywords=mail.body, after=day, before=day)} == {day}
    assert mail.id in [
        row[0] for row in results(keywords=mail.body, sender=f"{last}@MAIL".lower(), after=day, before=day)
    ]
    assert results(keywords="project", after="2030-01-01") == []
    assert results(keywords="meeting", sender="' OR 1=1 --") == []


def test_invalid_calls_are_explained_and_counted(emails, subtests):
    for action, error in [
        (call("search", {"keywords": "?!"}), "error: no words to search for"),
        (call("search", {"keywords": "a", "limit": 21}), "error: limit is 21, expected 1 to 20"),
        (call("search", {"keywords": "a", "limit": -1}), "error: limit is -1"),
        (
            call("search", {"keywords": "a", "after": "yesterday"}),
            "error: after is 'yesterday', expected a day such as",
        ),
        (call("search", {"keywords": "a", "before": "2024-13-01"}), "error: before is '2024-13-01'"),
        (call("read", {"message_id": "m1"}), "error: no mail 'm1'"),
        (answer("x", "m1"), "error: no mail 'm1'"),
        (answer("x", *["m1"] * 11), "error: 11 sources, expected 10 at most"),
        (call("answer", {"text": "x"}), "error: answer: sources: Field required"),
    ]:
        with subtests.test(action=action):
            emails.reset(first(emails, "fact"))
            step = emails.step(action)
            assert observation_of(step).startswith(error)
            assert step.info["invalid_actions"] == 1
            assert not step.done
            assert step.info["answered"] == "no"


def test_any_words_may_be_searched_for(emails, subtests):
    for words in ['"', "budget OR *", "NEAR(a b)", "body:budget", "budget " * 5000, "the of and"]:
        with subtests.test(words=words[:60]):
            emails.reset(first(emails, "fact"))
            text = observation_of(emails.step(call("search", {"keywords": words})))
            assert len(text) < 4000
            assert ("budget" not in words) or "budget" in text.lower()


def test_mails_look_like_mails(emails):
    box = mailbox(0, 0, SMALL["mails"])
    assert len(box.mails) == len(box.by_id) == SMALL["mails"]
    assert [mail.day for mail in box.mails] == sorted(mail.day for mail in box.mails)
    assert max(mail.day for mail in box.mails) <= TODAY
    replies = [mail for mail in box.mails if mail.subject.startswith("Re: ")]
    assert len(replies) > 400
    assert all("wrote:\n> " in mail.body for mail in replies)
    assert max(Counter(mail.sender for mail in box.mails).values()) < 200
    assert max(len(mail.body) for mail in box.mails) < 3000
    assert mailbox(0, 0, SMALL["mails"]) is box


def test_progress_is_a_quarter_for_finding_reading_answer_and_source(emails):
    scenario = next(
        scenario
        for scenario in emails.scenarios("train")
        if scenario.type == "total" and len(scenario.input["needed"]) == 2
    )
    emails.reset(scenario)
    ids = [fact_ids[0] for fact_ids in scenario.input["needed"]]
    assert emails.step(call("read", {"message_id": ids[0]})).info["progress"] == 0.25
    assert emails.step(call("read", {"message_id": ids[1]})).info["progress"] == 0.5
    assert emails.step(answer("I do not know", ids[0])).info["progress"] == 0.75


def test_chosen_types_are_asked_in_turn_and_are_the_same_questions():
    every = {scenario.input["question"] for scenario in EmailSearch(train=300, train_mailboxes=1).scenarios("train")}
    chosen = EmailSearch(train=40, train_mailboxes=1, heldout=8, kinds=["fact", "date", "fact"]).scenarios("train")
    assert [scenario.type for scenario in chosen] == ["fact", "date"] * 20
    assert {scenario.input["question"] for scenario in chosen} <= every


def test_too_few_questions_of_the_chosen_types_are_refused():
    message = r"kinds = \['compare'\]: a mailbox of 3000 mails has \d+ such questions for train, of which 300 are asked"
    with pytest.raises(ValueError, match=message):
        EmailSearch(train=300, train_mailboxes=1, kinds=["compare"])


def test_too_many_questions_and_too_few_mails_are_refused():
    with pytest.raises(ValueError, match="301 questions of one mailbox; there are 300 at most"):
        EmailSearch(train=301, train_mailboxes=1)
    with pytest.raises(ValueError, match="set mails=2500 or more"):
        EmailSearch(mails=1500)
