"""Questions about a mailbox, with the unique right answer and the mails that support it.

| Type | Question | Mails to combine |
|---|---|---|
| fact | a sum, number, code, city or firm | 1 |
| person | a person | 1 |
| date | a date | 1 |
| change | the current value, or the value before the last change | one per value |
| chain | a fact about the lead of a project, or about the lead's deputy | 2 or 3 |
| total | the sum of a firm's invoices for a project | 2 to 4 |
| compare | the firm with the lowest offer | 2 to 4 |

Difficulty: the number of mails to combine, plus 1 with one decoy or 2 with several (false values, reminders of the same
invoice, revised offers), at most 5.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from components.environments.worlds.email_search.mailbox import DAYS, FIRST_DAY, Bill, Fact, MailPlan, plan
from components.environments.worlds.email_search.words import PERSON, PROJECT
from components.trajectories.schema import Scenario

Kind = Literal["chain", "change", "compare", "date", "fact", "person", "total"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Types of questions."""
PER_MAILBOX = 300
"""Maximum number of questions per mailbox."""
TODAY = FIRST_DAY + DAYS


@functools.lru_cache(maxsize=4)
def scenarios(
    seed: int, mails: int, train: int, heldout: int, train_boxes: int, heldout_boxes: int, chosen: tuple[Kind, ...]
) -> tuple[Scenario, ...]:
    """Return the scenarios of both splits. The splits have different mailboxes."""
    generated: list[Scenario] = []
    boxes = {"train": range(train_boxes), "heldout": range(train_boxes, train_boxes + heldout_boxes)}
    for split, count in (("train", train), ("heldout", heldout)):
        for index, number in enumerate(boxes[split]):
            share = count // len(boxes[split]) + (index < count % len(boxes[split]))
            if share > PER_MAILBOX:
                raise ValueError(
                    f"{split} = {count}: that is {share} questions of one mailbox; there are {PER_MAILBOX} at most. "
                    f"Raise {split}_mailboxes or lower {split}."
                )
            generated += _questions(seed, number, mails, split, share, chosen)
    return tuple(generated)


def _questions(seed: int, number: int, mails: int, split: str, count: int, chosen: tuple[Kind, ...]) -> list[Scenario]:
    rng = random.Random(f"email questions {seed} {number}")
    mailbox_plan = plan(seed, number, mails)
    kinds = sorted(MAKERS)  # all of them: a question does not depend on the chosen types
    pools = {
        kind: rng.sample(questions, len(questions))
        for kind, questions in ((kind, MAKERS[kind](mailbox_plan, rng)) for kind in kinds)
    }
    available = sum(len(pools[kind]) for kind in chosen)
    if available < count:
        raise ValueError(
            f"kinds = {list(chosen)}: a mailbox of {mails} mails has {available} such questions for {split}, of which "
            f"{count} are asked for. Raise {split}_mailboxes, lower {split}, or add kinds."
        )
    generated: list[Scenario] = []
    while len(generated) < count:
        for kind in chosen:
            if len(generated) < count and pools[kind]:
                question = pools[kind].pop()
                level = min(5, len(question["needed"]) + min(2, question.pop("decoys")))
                name = f"email-{seed}-{number}-{len(generated):03d}"
                generated.append(
                    Scenario(name, {"mailbox": number, **question}, split=split, type=kind, difficulty=level)
                )
    return generated


def _question(
    question: str,
    kind: str,
    answer: str,
    needed: Sequence[list[str]],
    sources: list[str],
    searches: Sequence[str],
    decoys: int,
) -> dict[str, Any]:
    """Return a question as the input of a scenario.

    needed: ids of the mails that state each needed fact. sources: ids of the mails that state the answer. searches:
    search words for each item of `needed`.
    """
    return {
        "question": question,
        "kind": kind,
        "answer": answer,
        "needed": [list(ids) for ids in needed],
        "sources": sorted(sources),
        "searches": list(searches),
        "decoys": decoys,
    }


def _from_facts(question: str, facts: Sequence[Fact], value: int = -1) -> dict[str, Any]:
    """Return a question whose answer is a value of the last fact, found by way of the other facts."""
    last = facts[-1]
    return _question(
        question,
        last.slot.kind,
        last.values[value],
        [ids for fact in facts for ids in fact.shown],
        last.shown[value],
        [f"{fact.about} {fact.slot.words}" for fact in facts for _ in fact.values],
        sum(fact.decoys for fact in facts),
    )


def _facts(kinds: Sequence[str]) -> Callable[[MailPlan, random.Random], list[dict[str, Any]]]:
    def make(mailbox_plan: MailPlan, rng: random.Random) -> list[dict[str, Any]]:
        return [
            _from_facts(rng.choice(fact.slot.asked).format(about=fact.about), [fact])
            for fact in mailbox_plan.facts
            if len(fact.values) == 1 and fact.slot.kind in kinds
        ]

    return make


def _changes(mailbox_plan: MailPlan, rng: random.Random) -> list[dict[str, Any]]:
    questions = []
    for fact in mailbox_plan.facts:
        if len(fact.values) > 1:
            value, question = (-2, fact.slot.before) if rng.random() < 0.3 else (-1, rng.choice(fact.slot.asked))
            questions.append(_from_facts(question.format(about=fact.about), [fact], value))
    return questions


def _chains(mailbox_plan: MailPlan, rng: random.Random) -> list[dict[str, Any]]:
    """Generate questions over chains of facts that never changed."""
    single = {(fact.about, fact.slot): fact for fact in mailbox_plan.facts if len(fact.values) == 1}
    questions = []
    for project in mailbox_plan.projects:
        lead = single.get((project, PROJECT["lead"]))
        if lead is None:
            continue
        for hop in (False, True):
            links = [lead]
            who = f"the person who leads {project}"
            if hop:
                deputy = single.get((lead.values[0], PERSON["deputy"]))
                if deputy is None:
                    continue
                links.append(deputy)
                who = f"the deputy of {who}"
            name = rng.choice(("extension", "desk"))
            last = single.get((links[-1].values[0], PERSON[name]))
            if last is not None:
                question = f"What is the desk of {who}?" if name == "desk" else last.slot.asked[0].format(about=who)
                questions.append(_from_facts(question, [*links, last]))
    return questions


def _totals(mailbox_plan: MailPlan, rng: random.Random) -> list[dict[str, Any]]:
    templates = (
        "How much has {firm} billed for {about} in all?",
        "What is the total of the invoices of {firm} for {about}?",
    )
    return [
        _question(
            rng.choice(templates).format(firm=bill.firm, about=bill.about),
            "money",
            str(sum(bill.amounts)),
            bill.shown,
            [id for ids in bill.shown for id in ids],
            [f"invoice {bill.firm} {bill.about}"] * len(bill.amounts),
            bill.decoys,
        )
        for bills in mailbox_plan.invoices
        for bill in bills
    ]


def _compared(mailbox_plan: MailPlan, rng: random.Random) -> list[dict[str, Any]]:
    templates = (
        "Which firm made the lowest offer for the {job} of {about}, as the offers stand now?",
        "Who is the cheapest for the {job} of {about}, by the latest offers?",
    )
    questions = []
    for bills in mailbox_plan.offers:
        best: Bill = min(bills, key=lambda bill: bill.amounts[-1])
        questions.append(
            _question(
                rng.choice(templates).format(job=best.job, about=best.about),
                "firm",
                best.firm,
                [bill.shown[-1] for bill in bills],
                best.shown[-1],
                [f"{bill.job} {best.about} {bill.firm} offer" for bill in bills],
                sum(bill.decoys for bill in bills),
            )
        )
    return questions


MAKERS: dict[Kind, Callable[[MailPlan, random.Random], list[dict[str, Any]]]] = {
    "fact": _facts(("money", "number", "code", "place", "firm")),
    "person": _facts(("person",)),
    "date": _facts(("date",)),
    "change": _changes,
    "chain": _chains,
    "total": _totals,
    "compare": _compared,
}
