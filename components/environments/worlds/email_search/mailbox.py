"""Mailboxes, each made from a seed and a number: the people and projects of a firm, what is known of them, the mails
that say so, and many that say nothing.

A fact (the budget of a project, the desk of a person) is stated in a mail; often somebody replies and quotes it. It may
be changed by a later mail. Somebody may have an idea that does not hold, or name a value that is wrong: a decoy. Firms
send invoices, with reminders of the same invoice, and make offers, with revised ones. The plan of a mailbox (facts and
where they stand) is made in some milliseconds; the mails around them, and the index, when they are first needed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

from components.environments.fulltext import Index
from components.environments.worlds.email_search import words
from components.environments.worlds.email_search.words import PERSON, PROJECT, Slot

FIRST_DAY = date(2024, 1, 8).toordinal()
DAYS = 540
"""That the mails of a mailbox span."""
PEOPLE, FIRMS, PROJECTS = 36, 20, 24


class Mail(NamedTuple):
    id: str
    day: int
    """As a proleptic ordinal, as `datetime.date` counts."""
    minute: int
    """Of the day."""
    sender: str
    to: str
    subject: str
    body: str


@dataclass
class Post:
    """A mail of the plan, before it is written out."""

    id: str
    day: int
    sender: str
    to: str
    subject: str
    says: str
    """The one sentence that matters."""
    answers: Post | None = None
    """The mail that it replies to and quotes."""


@dataclass
class Fact:
    """What was known of something, from first to last."""

    about: str
    slot: Slot
    values: list[str] = field(default_factory=list)
    shown: list[list[str]] = field(default_factory=list)
    """Of each value: the ids of the mails that state it, quoting ones among them."""
    decoys: int = 0
    """Mails that name a value that does not hold."""


@dataclass
class Bill:
    """What a firm billed for a project, or offered for a job of it."""

    about: str
    firm: str
    job: str
    amounts: list[int]
    """Of invoices; of an offer, first and revised: the last counts."""
    shown: list[list[str]]
    decoys: int = 0


@dataclass
class Plan:
    owner: str
    people: list[str]
    firms: list[str]
    projects: list[str]
    facts: list[Fact]
    invoices: list[list[Bill]]
    """By project, of different firms."""
    offers: list[list[Bill]]
    """By project and job, of different firms."""
    posts: list[Post]
    spare: list[str]
    """Ids of the mails that say nothing."""

    def names(self, kind: str) -> Sequence[str]:
        """All that a value of this kind can be, where it is a name."""
        return {"person": self.people, "firm": self.firms, "place": words.CITIES}.get(kind, ())


class Mailbox:
    def __init__(self, seed: int, number: int, mails: int):
        self.plan = plan(seed, number, mails)
        written = _mails(random.Random(f"mails {seed} {number}"), self.plan)
        self.mails = sorted(written, key=lambda mail: (mail.day, mail.minute, mail.id))
        self.by_id = {mail.id: mail for mail in self.mails}
        self._index = Index(
            {"subject": 2.0, "sender": 1.0, "body": 1.0},
            ((at, (mail.subject, mail.sender, mail.body)) for at, mail in enumerate(self.mails)),
            {
                "who": {at: f"{mail.sender} {address(mail.sender)}".lower() for at, mail in enumerate(self.mails)},
                "day": {at: mail.day for at, mail in enumerate(self.mails)},
            },
        )

    def search(
        self, keywords: str, *, sender: str = "", after: int | None = None, before: int | None = None, limit: int = 5
    ) -> list[tuple[Mail, str]]:
        """The best mails with a piece of each. after, before: days, these included."""
        where: list[tuple[str, object]] = []
        if sender:
            where.append(("instr(facts.who, ?) > 0", sender.lower().encode("ascii", "replace").decode()))
        if after is not None:
            where.append(("facts.day >= ?", after))
        if before is not None:
            where.append(("facts.day <= ?", before))
        return [(self.mails[at], piece) for at, piece in self._index.search(keywords, limit, where=where, snippet=16)]


@functools.lru_cache(maxsize=64)  # a collector makes many instances; some 3 MB each
def mailbox(seed: int, number: int, mails: int) -> Mailbox:
    return Mailbox(seed, number, mails)


def address(name: str) -> str:
    return f"{name.lower().replace(' ', '.')}@mail.example"


@functools.lru_cache(maxsize=128)
def plan(seed: int, number: int, mails: int) -> Plan:
    return _Planner(seed, number, mails).plan


class _Planner:
    def __init__(self, seed: int, number: int, mails: int):
        self.rng = rng = random.Random(f"mailbox {seed} {number}")
        people = [
            f"{rng.choice(words.FIRST)} {last}" for last in rng.sample(words.LAST, PEOPLE)
        ]  # last names differ: an answer may use them alone
        firms = [f"{name} {rng.choice(words.FORMS)}" for name in rng.sample(words.FIRMS, FIRMS)]
        pairs = [f"{one} {other}" for one in words.ADJECTIVES for other in words.NOUNS]
        self.ids = [f"m{one:06d}" for one in rng.sample(range(10**6), mails)]
        self.codes = iter(rng.sample(range(1000, 10_000), 4000))
        self.plan = Plan(people[0], people, firms, rng.sample(pairs, PROJECTS), [], [], [], [], [])
        for project in self.plan.projects:
            for name, slot in PROJECT.items():
                self._fact(project, name, slot)
            self.plan.invoices.append([self._invoices(project, firm) for firm in rng.sample(firms, 2)])
            for job in rng.sample(words.JOBS, 2):
                bidders = rng.sample(firms, rng.randint(2, 4))
                self.plan.offers.append(self._offers(project, job, bidders))
        for person in people[1:]:
            for name, slot in PERSON.items():
                self._fact(person, name, slot)
        self.plan.spare = self.ids

    def _fact(self, about: str, name: str, slot: Slot) -> None:
        rng, fact = self.rng, Fact(about, slot)
        changes = rng.choice((0, 0, 0, 1, 2))
        days = sorted(rng.sample(range(20, DAYS - 60), changes + 1))
        subjects = (f"{about}: {name}", about, f"about {about}", f"{name} of {about}", "for your information", "news")
        used: set[str] = {about}
        for turn, day in enumerate(days):
            value = self._value(slot.kind, used)
            fact.values.append(value)
            sentences = slot.changed if turn else slot.said
            says = rng.choice(sentences).format(about=about, value=self._written(slot.kind, value))
            fact.shown.append(self._stated(day, rng.choice(subjects), says))
        for _ in range(rng.choice((0, 0, 1, 2))):
            value = self._value(slot.kind, used)
            says = rng.choice(slot.ideas).format(about=about, value=self._written(slot.kind, value))
            self._post(rng.randrange(DAYS - 30), rng.choice(subjects), says)
            fact.decoys += 1
        self.plan.facts.append(fact)

    def _invoices(self, about: str, firm: str) -> Bill:
        rng = self.rng
        bill = Bill(about, firm, "", [], [])
        for _ in range(rng.randint(2, 4)):
            amount, code, day = rng.randrange(4, 120) * 50, f"RN-{next(self.codes)}", rng.randrange(20, DAYS - 60)
            bill.amounts.append(amount)
            says = f"Invoice {code} of {firm} for {about} came in: {self._written('money', str(amount))}."
            bill.shown.append(self._stated(day, rng.choice((f"invoice {code}", f"invoice of {firm}", about)), says))
            if rng.random() < 0.25:  # the same invoice once more: not to be counted twice
                again = (
                    f"Reminder: invoice {code} of {firm} for {about}, {self._written('money', str(amount))}, is open."
                )
                bill.shown[-1] += self._stated(day + rng.randint(10, 30), f"reminder: invoice {code}", again)
                bill.decoys += 1
        return bill

    def _offers(self, about: str, job: str, firms: list[str]) -> list[Bill]:
        rng = self.rng
        amounts = rng.sample(range(10, 200), 2 * len(firms))  # all differ: one is the lowest
        found = []
        for firm in firms:
            bill = Bill(about, firm, job, [], [])
            day = rng.randrange(20, DAYS - 90)
            for turn in range(1 + (rng.random() < 0.25)):
                amount = amounts.pop() * 50
                words_ = "offers" if turn == 0 else "has changed its offer and now asks"
                says = f"{firm} {words_} {self._written('money', str(amount))} for the {job} of {about}."
                bill.amounts.append(amount)
                subject = rng.choice((f"{job} of {about}", f"offer of {firm}", f"{about}: {job}"))
                bill.shown.append(self._stated(day + 30 * turn, subject, says))
                bill.decoys += turn
            found.append(bill)
        return found

    def _stated(self, day: int, subject: str, says: str) -> list[str]:
        """A mail, and perhaps replies that quote it; their ids."""
        post = self._post(day, subject, says)
        found = [post.id]
        for turn in range(self.rng.choice((0, 0, 1, 1, 2))):
            reply = self._post(day + turn + 1, f"Re: {subject}", self.rng.choice(words.REPLIES), post)
            found.append(reply.id)
        return found

    def _post(self, day: int, subject: str, says: str, answers: Post | None = None) -> Post:
        if not self.ids:
            raise ValueError("too few mails: what is known in a mailbox alone fills more; take mails=2500 or more")
        sender, to = self.rng.sample(self.plan.people, 2)
        if answers:
            sender, to = answers.to, answers.sender
        post = Post(self.ids.pop(), FIRST_DAY + day, sender, to, subject, says, answers)
        self.plan.posts.append(post)
        return post

    def _value(self, kind: str, used: set[str]) -> str:
        """One that was not used for this yet."""
        rng = self.rng
        value = ""
        while not value or value in used:
            if kind == "money":
                value = str(rng.randrange(20, 900) * 100)
            elif kind == "number":
                value = str(rng.randrange(100, 10_000))
            elif kind == "date":
                value = date.fromordinal(FIRST_DAY + rng.randrange(DAYS, DAYS + 300)).isoformat()
            elif kind == "code":
                value = f"{rng.choice('BDGKLT')}{rng.choice('AEOU')}-{next(self.codes)}"
            else:
                value = rng.choice(self.plan.names(kind))
        used.add(value)
        return value

    def _written(self, kind: str, value: str) -> str:
        """One of the ways in which a value is written."""
        if kind == "money":
            return self.rng.choice((f"{int(value):,} dollars", f"${int(value):,}", f"${value}"))
        if kind == "date":
            day = date.fromisoformat(value)
            month = words.MONTHS[day.month - 1]
            return self.rng.choice((value, f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))
        return value


def _mails(rng: random.Random, plan: Plan) -> list[Mail]:
    """All mails, written out."""
    found = []
    bodies: dict[str, str] = {}
    for post in plan.posts:  # a reply stands after what it answers
        quoted = ""
        if post.answers:
            before = post.answers
            lines = bodies[before.id].split("\n")
            quoted = f"\n\nOn {date.fromordinal(before.day)} {before.sender} wrote:\n" + "\n".join(
                f"> {line}" for line in lines
            )
        bodies[post.id] = body = _body(rng, plan, post.sender, post.to, post.says)
        found.append(_mail(rng, post.id, post.day, post.sender, post.to, post.subject, body + quoted))
    spare = list(plan.spare)
    while spare:
        sender, to = rng.sample(plan.people, 2)
        subject, day, quoted = _chat(rng, plan, words.SUBJECTS), FIRST_DAY + rng.randrange(DAYS), ""
        for turn in range(min(len(spare), rng.randint(1, 4))):
            says = _chat(rng, plan, words.CHAT) if turn == 0 else rng.choice(words.REPLIES)
            body = _body(rng, plan, sender, to, says)
            title = f"Re: {subject}" if turn else subject
            found.append(_mail(rng, spare.pop(), day, sender, to, title, body + quoted))
            quoted = f"\n\nOn {date.fromordinal(day)} {sender} wrote:\n" + "\n".join(
                f"> {line}" for line in body.split("\n")
            )
            sender, to, day = to, sender, day + rng.randint(0, 2)
    return found


def _mail(rng: random.Random, id: str, day: int, sender: str, to: str, subject: str, body: str) -> Mail:
    minute = rng.randrange(8 * 60, 18 * 60)
    return Mail(id, min(day, FIRST_DAY + DAYS), minute, sender, to, subject, body)


def _body(rng: random.Random, plan: Plan, sender: str, to: str, says: str) -> str:
    chat = [_chat(rng, plan, words.CHAT) for _ in range(rng.randint(1, 3))]
    chat.insert(rng.randint(0, len(chat)), says)
    greeting = rng.choice(words.GREETINGS).format(name=to.split()[0])
    return f"{greeting}\n{' '.join(chat)}\n{rng.choice(words.CLOSINGS)}\n{sender}"


def _chat(rng: random.Random, plan: Plan, templates: Sequence[str]) -> str:
    return rng.choice(templates).format(
        weekday=rng.choice(words.WEEKDAYS),
        floor=rng.choice(words.FLOORS),
        project=rng.choice(plan.projects),
        person=rng.choice(plan.people),
        firm=rng.choice(plan.firms),
    )
