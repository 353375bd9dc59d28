"""Mailboxes generated from a seed and a number: people and projects of a firm, facts about them, the mails that state
the facts, and many irrelevant mails.

A mail states a fact (the budget of a project, the desk of a person); often a reply quotes it. A later mail may change
the fact. Some mails name a false or merely proposed value: a decoy. Firms send invoices, with reminders of the same
invoice, and make offers, with revised offers. The plan of a mailbox (the facts and the ids of their mails) takes some
milliseconds; the texts of the mails and the index are generated on first use.
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
"""Time span of a mailbox in days."""
PEOPLE, FIRMS, PROJECTS = 36, 20, 24


class Mail(NamedTuple):
    """Mail with its full text."""

    id: str
    day: int
    """Day as a proleptic ordinal (`datetime.date.toordinal`)."""
    minute: int
    """Minute of the day."""
    sender: str
    to: str
    subject: str
    body: str


@dataclass
class MailHeader:
    """Mail of the plan, without its full text."""

    id: str
    day: int
    sender: str
    to: str
    subject: str
    says: str
    """The relevant sentence."""
    answers: MailHeader | None = None
    """Mail that this one replies to and quotes."""


@dataclass
class Fact:
    """Fact about a project or person, with all of its values in chronological order."""

    about: str
    slot: Slot
    values: list[str] = field(default_factory=list)
    shown: list[list[str]] = field(default_factory=list)
    """Ids of the mails that state each value, including replies that quote it."""
    decoys: int = 0
    """Number of mails that name a false value."""


@dataclass
class Bill:
    """Invoices of a firm for a project, or its offers for a job of the project."""

    about: str
    firm: str
    job: str
    amounts: list[int]
    """Amounts of the invoices; or of the first and the revised offer, of which the last one is valid."""
    shown: list[list[str]]
    decoys: int = 0


@dataclass
class MailPlan:
    """Facts of a mailbox and the mails that state them."""

    owner: str
    people: list[str]
    firms: list[str]
    projects: list[str]
    facts: list[Fact]
    invoices: list[list[Bill]]
    """Invoices of different firms, by project."""
    offers: list[list[Bill]]
    """Offers of different firms, by project and job."""
    posts: list[MailHeader]
    spare: list[str]
    """Ids of the irrelevant mails."""

    def names(self, kind: str) -> Sequence[str]:
        """Return all names of this kind; empty if values of this kind are not names."""
        return {"person": self.people, "firm": self.firms, "place": words.CITIES}.get(kind, ())


class Mailbox:
    """Mails of a mailbox with a full-text index."""

    def __init__(self, seed: int, number: int, mails: int):
        self.plan = plan(seed, number, mails)
        written = _mails(random.Random(f"mails {seed} {number}"), self.plan)
        self.mails = sorted(written, key=lambda mail: (mail.day, mail.minute, mail.id))
        self.by_id = {mail.id: mail for mail in self.mails}
        self._index = Index(
            {"subject": 2.0, "sender": 1.0, "body": 1.0},
            ((index, (mail.subject, mail.sender, mail.body)) for index, mail in enumerate(self.mails)),
            {
                "who": {
                    index: f"{mail.sender} {address(mail.sender)}".lower() for index, mail in enumerate(self.mails)
                },
                "day": {index: mail.day for index, mail in enumerate(self.mails)},
            },
        )

    def search(
        self, keywords: str, *, sender: str = "", after: int | None = None, before: int | None = None, limit: int = 5
    ) -> list[tuple[Mail, str]]:
        """Return the best matches, each with a snippet. after, before: first and last day, as proleptic ordinals."""
        conditions: list[tuple[str, object]] = []
        if sender:
            conditions.append(("instr(facts.who, ?) > 0", sender.lower().encode("ascii", "replace").decode()))
        if after is not None:
            conditions.append(("facts.day >= ?", after))
        if before is not None:
            conditions.append(("facts.day <= ?", before))
        return [
            (self.mails[index], snippet)
            for index, snippet in self._index.search(keywords, limit, where=conditions, snippet=16)
        ]


@functools.lru_cache(maxsize=64)  # a collector creates many instances; about 3 MB each
def mailbox(seed: int, number: int, mails: int) -> Mailbox:
    return Mailbox(seed, number, mails)


def address(name: str) -> str:
    return f"{name.lower().replace(' ', '.')}@mail.example"


@functools.lru_cache(maxsize=128)
def plan(seed: int, number: int, mails: int) -> MailPlan:
    return _Planner(seed, number, mails).plan


class _Planner:
    def __init__(self, seed: int, number: int, mails: int):
        self.rng = rng = random.Random(f"mailbox {seed} {number}")
        people = [
            f"{rng.choice(words.FIRST)} {last}" for last in rng.sample(words.LAST, PEOPLE)
        ]  # last names are unique: an answer may use them alone
        firms = [f"{name} {rng.choice(words.FORMS)}" for name in rng.sample(words.FIRMS, FIRMS)]
        pairs = [f"{adjective} {noun}" for adjective in words.ADJECTIVES for noun in words.NOUNS]
        self.ids = [f"m{mail_number:06d}" for mail_number in rng.sample(range(10**6), mails)]
        self.codes = iter(rng.sample(range(1000, 10_000), 4000))
        self.plan = MailPlan(people[0], people, firms, rng.sample(pairs, PROJECTS), [], [], [], [], [])
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
            sentences = slot.changed if turn else slot.statements
            says = rng.choice(sentences).format(about=about, value=self._format_value(slot.kind, value))
            fact.shown.append(self._add_statement(day, rng.choice(subjects), says))
        for _ in range(rng.choice((0, 0, 1, 2))):
            value = self._value(slot.kind, used)
            says = rng.choice(slot.ideas).format(about=about, value=self._format_value(slot.kind, value))
            self._post(rng.randrange(DAYS - 30), rng.choice(subjects), says)
            fact.decoys += 1
        self.plan.facts.append(fact)

    def _invoices(self, about: str, firm: str) -> Bill:
        rng = self.rng
        bill = Bill(about, firm, "", [], [])
        for _ in range(rng.randint(2, 4)):
            amount, code, day = rng.randrange(4, 120) * 50, f"RN-{next(self.codes)}", rng.randrange(20, DAYS - 60)
            bill.amounts.append(amount)
            says = f"Invoice {code} of {firm} for {about} came in: {self._format_value('money', str(amount))}."
            bill.shown.append(
                self._add_statement(day, rng.choice((f"invoice {code}", f"invoice of {firm}", about)), says)
            )
            if rng.random() < 0.25:  # a reminder of the same invoice, which must not be counted twice
                value = self._format_value("money", str(amount))
                reminder = f"Reminder: invoice {code} of {firm} for {about}, {value}, is open."
                bill.shown[-1] += self._add_statement(day + rng.randint(10, 30), f"reminder: invoice {code}", reminder)
                bill.decoys += 1
        return bill

    def _offers(self, about: str, job: str, firms: list[str]) -> list[Bill]:
        rng = self.rng
        amounts = rng.sample(range(10, 200), 2 * len(firms))  # all differ, so the lowest is unique
        bills = []
        for firm in firms:
            bill = Bill(about, firm, job, [], [])
            day = rng.randrange(20, DAYS - 90)
            for turn in range(1 + (rng.random() < 0.25)):
                amount = amounts.pop() * 50
                words_ = "offers" if turn == 0 else "has changed its offer and now asks"
                says = f"{firm} {words_} {self._format_value('money', str(amount))} for the {job} of {about}."
                bill.amounts.append(amount)
                subject = rng.choice((f"{job} of {about}", f"offer of {firm}", f"{about}: {job}"))
                bill.shown.append(self._add_statement(day + 30 * turn, subject, says))
                bill.decoys += turn
            bills.append(bill)
        return bills

    def _add_statement(self, day: int, subject: str, says: str) -> list[str]:
        """Add a mail and possibly replies that quote it; return their ids."""
        post = self._post(day, subject, says)
        ids = [post.id]
        for turn in range(self.rng.choice((0, 0, 1, 1, 2))):
            reply = self._post(day + turn + 1, f"Re: {subject}", self.rng.choice(words.REPLIES), post)
            ids.append(reply.id)
        return ids

    def _post(self, day: int, subject: str, says: str, answers: MailHeader | None = None) -> MailHeader:
        if not self.ids:
            raise ValueError("too few mails for the facts of a mailbox; set mails=2500 or more")
        sender, to = self.rng.sample(self.plan.people, 2)
        if answers:
            sender, to = answers.to, answers.sender
        post = MailHeader(self.ids.pop(), FIRST_DAY + day, sender, to, subject, says, answers)
        self.plan.posts.append(post)
        return post

    def _value(self, kind: str, used: set[str]) -> str:
        """Return a random value that is not in `used`, and add it."""
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

    def _format_value(self, kind: str, value: str) -> str:
        """Return a value in a random format."""
        if kind == "money":
            return self.rng.choice((f"{int(value):,} dollars", f"${int(value):,}", f"${value}"))
        if kind == "date":
            day = date.fromisoformat(value)
            month = words.MONTHS[day.month - 1]
            return self.rng.choice((value, f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))
        return value


def _mails(rng: random.Random, plan: MailPlan) -> list[Mail]:
    """Generate the full texts of all mails."""
    mails = []
    bodies: dict[str, str] = {}
    for post in plan.posts:  # a reply follows the mail that it answers
        quoted = ""
        if post.answers:
            quoted = _quote(post.answers.day, post.answers.sender, bodies[post.answers.id])
        bodies[post.id] = body = _body(rng, plan, post.sender, post.to, post.says)
        mails.append(_mail(rng, post.id, post.day, post.sender, post.to, post.subject, body + quoted))
    spare = list(plan.spare)
    while spare:
        sender, to = rng.sample(plan.people, 2)
        subject, day, quoted = _chat(rng, plan, words.SUBJECTS), FIRST_DAY + rng.randrange(DAYS), ""
        for turn in range(min(len(spare), rng.randint(1, 4))):
            says = _chat(rng, plan, words.CHAT) if turn == 0 else rng.choice(words.REPLIES)
            body = _body(rng, plan, sender, to, says)
            title = f"Re: {subject}" if turn else subject
            mails.append(_mail(rng, spare.pop(), day, sender, to, title, body + quoted))
            quoted = _quote(day, sender, body)
            sender, to, day = to, sender, day + rng.randint(0, 2)
    return mails


def _quote(day: int, sender: str, body: str) -> str:
    """Return a mail as a reply quotes it."""
    lines = "\n".join(f"> {line}" for line in body.split("\n"))
    return f"\n\nOn {date.fromordinal(day)} {sender} wrote:\n{lines}"


def _mail(rng: random.Random, id: str, day: int, sender: str, to: str, subject: str, body: str) -> Mail:
    minute = rng.randrange(8 * 60, 18 * 60)
    return Mail(id, min(day, FIRST_DAY + DAYS), minute, sender, to, subject, body)


def _body(rng: random.Random, plan: MailPlan, sender: str, to: str, says: str) -> str:
    chat = [_chat(rng, plan, words.CHAT) for _ in range(rng.randint(1, 3))]
    chat.insert(rng.randint(0, len(chat)), says)
    greeting = rng.choice(words.GREETINGS).format(name=to.split()[0])
    return f"{greeting}\n{' '.join(chat)}\n{rng.choice(words.CLOSINGS)}\n{sender}"


def _chat(rng: random.Random, plan: MailPlan, templates: Sequence[str]) -> str:
    return rng.choice(templates).format(
        weekday=rng.choice(words.WEEKDAYS),
        floor=rng.choice(words.FLOORS),
        project=rng.choice(plan.projects),
        person=rng.choice(plan.people),
        firm=rng.choice(plan.firms),
    )
