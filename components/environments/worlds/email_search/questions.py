"""Questions about a mailbox, with the one right answer and the mails that show it.

| Type | Question | Mails to combine |
|---|---|---|
| fact | a sum, number, code, city or firm | 1 |
| person | who | 1 |
| date | when | 1 |
| change | the value now, or before the last change | as many as there were values |
| chain | something of the person who leads a project, or of the deputy of that person | 2 or 3 |
| total | what a firm billed for a project in all | 2 to 4 |
| compare | which firm made the lowest offer | 2 to 4 |

Difficulty: the mails to combine, one more with a decoy and one more with two (values that do not hold, reminders of the
same invoice, revised offers), 5 at most.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from components.environments.worlds.email_search.mailbox import DAYS, FIRST_DAY, Bill, Fact, Plan, plan
from components.environments.worlds.email_search.words import PERSON, PROJECT
from components.trajectories.schema import Scenario

PER_MAILBOX = 300
"""Questions that a mailbox has at most."""
TODAY = FIRST_DAY + DAYS


@functools.lru_cache(maxsize=4)
def scenarios(
    seed: int, mails: int, train: int, heldout: int, train_boxes: int, heldout_boxes: int
) -> tuple[Scenario, ...]:
    """Mailboxes are numbered; those of the two splits differ."""
    found: list[Scenario] = []
    boxes = {"train": range(train_boxes), "heldout": range(train_boxes, train_boxes + heldout_boxes)}
    for split, count in (("train", train), ("heldout", heldout)):
        for at, number in enumerate(boxes[split]):
            share = count // len(boxes[split]) + (at < count % len(boxes[split]))
            if share > PER_MAILBOX:
                raise ValueError(
                    f"{split} asks {share} questions of one mailbox; there are {PER_MAILBOX} at most: take more "
                    f"{split}_mailboxes or fewer scenarios"
                )
            found += _questions(seed, number, mails, split, share)
    return tuple(found)


def _questions(seed: int, number: int, mails: int, split: str, count: int) -> list[Scenario]:
    rng = random.Random(f"email questions {seed} {number}")
    known = plan(seed, number, mails)
    kinds = sorted(MAKERS)
    pools = {kind: rng.sample(made, len(made)) for kind, made in ((kind, MAKERS[kind](known, rng)) for kind in kinds)}
    found: list[Scenario] = []
    while len(found) < count:
        for kind in kinds:
            if len(found) < count and pools[kind]:
                made = pools[kind].pop()
                level = min(5, len(made["needed"]) + min(2, made.pop("decoys")))
                name = f"email-{seed}-{number}-{len(found):03d}"
                found.append(Scenario(name, {"mailbox": number, **made}, split=split, type=kind, difficulty=level))
    return found


def _made(
    question: str,
    kind: str,
    answer: str,
    needed: Sequence[list[str]],
    sources: list[str],
    searches: Sequence[str],
    decoys: int,
) -> dict[str, Any]:
    """needed: of each thing that has to be known, the mails that show it. sources: the mails that show the answer.
    searches: words that find each of `needed`."""
    return {
        "question": question,
        "kind": kind,
        "answer": answer,
        "needed": [list(ids) for ids in needed],
        "sources": sorted(sources),
        "searches": list(searches),
        "decoys": decoys,
    }


def _facts(kinds: Sequence[str]) -> Callable[[Plan, random.Random], list[dict[str, Any]]]:
    def make(known: Plan, rng: random.Random) -> list[dict[str, Any]]:
        return [
            _made(
                rng.choice(fact.slot.asked).format(about=fact.about),
                fact.slot.kind,
                fact.values[0],
                fact.shown,
                fact.shown[0],
                [f"{fact.about} {fact.slot.words}"],
                fact.decoys,
            )
            for fact in known.facts
            if len(fact.values) == 1 and fact.slot.kind in kinds
        ]

    return make


def _changes(known: Plan, rng: random.Random) -> list[dict[str, Any]]:
    found = []
    for fact in known.facts:
        if len(fact.values) == 1:
            continue
        at, question = (-2, fact.slot.before) if rng.random() < 0.3 else (-1, rng.choice(fact.slot.asked))
        search = f"{fact.about} {fact.slot.words}"
        found.append(
            _made(
                question.format(about=fact.about),
                fact.slot.kind,
                fact.values[at],
                fact.shown,
                fact.shown[at],
                [search] * len(fact.values),
                fact.decoys,
            )
        )
    return found


def _chains(known: Plan, rng: random.Random) -> list[dict[str, Any]]:
    """Over facts that never changed."""
    single = {(fact.about, fact.slot): fact for fact in known.facts if len(fact.values) == 1}
    found = []
    for project in known.projects:
        lead = single.get((project, PROJECT["lead"]))
        if lead is None:
            continue
        for hop in (False, True):
            links: list[Fact] = [lead]
            who = f"the person who leads {project}"
            if hop:
                deputy = single.get((lead.values[0], PERSON["deputy"]))
                if deputy is None:
                    continue
                links.append(deputy)
                who = f"the deputy of {who}"
            last = single.get((links[-1].values[0], PERSON[rng.choice(("extension", "desk"))]))
            if last is None:
                continue
            links.append(last)
            found.append(
                _made(
                    last.slot.asked[0].format(about=who)
                    if "phone" in last.slot.words
                    else f"What is the desk of {who}?",
                    last.slot.kind,
                    last.values[0],
                    [link.shown[0] for link in links],
                    last.shown[0],
                    [f"{link.about} {link.slot.words}" for link in links],
                    sum(link.decoys for link in links),
                )
            )
    return found


def _totals(known: Plan, rng: random.Random) -> list[dict[str, Any]]:
    asked = (
        "How much has {firm} billed for {about} in all?",
        "What is the total of the invoices of {firm} for {about}?",
    )
    return [
        _made(
            rng.choice(asked).format(firm=bill.firm, about=bill.about),
            "money",
            str(sum(bill.amounts)),
            bill.shown,
            [id for ids in bill.shown for id in ids],
            [f"invoice {bill.firm} {bill.about}"] * len(bill.amounts),
            bill.decoys,
        )
        for bills in known.invoices
        for bill in bills
    ]


def _compared(known: Plan, rng: random.Random) -> list[dict[str, Any]]:
    asked = (
        "Which firm made the lowest offer for the {job} of {about}, as the offers stand now?",
        "Who is the cheapest for the {job} of {about}, by the latest offers?",
    )
    found = []
    for bills in known.offers:
        best: Bill = min(bills, key=lambda bill: bill.amounts[-1])
        found.append(
            _made(
                rng.choice(asked).format(job=best.job, about=best.about),
                "firm",
                best.firm,
                [bill.shown[-1] for bill in bills],
                best.shown[-1],
                [f"{bill.job} {best.about} {bill.firm} offer" for bill in bills],
                sum(bill.decoys for bill in bills),
            )
        )
    return found


MAKERS: dict[str, Callable[[Plan, random.Random], list[dict[str, Any]]]] = {
    "fact": _facts(("money", "number", "code", "place", "firm")),
    "person": _facts(("person",)),
    "date": _facts(("date",)),
    "change": _changes,
    "chain": _chains,
    "total": _totals,
    "compare": _compared,
}
