"""Mailbox search: a question, some thousands of mails, and an answer that cites the mails that support it.

This is the task of ART·E with mailboxes generated from a seed. The agent searches by words, sender and dates, reads
mails, and answers. An episode succeeds if the answer is right (values are compared in normalized form, see
`answers.py`) and a cited mail supports it; a reply that quotes the fact counts. Answering "I do not know" is not a
success, but the outcome distinguishes it from a wrong answer, so that a reward can prefer it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any

from pydantic import Field

from components.environments.protocol import Messages
from components.environments.restorable import RestorableState
from components.environments.seeded import CountOrNone
from components.environments.tools import InvalidAction, call, tool
from components.environments.worlds.email_search.answers import LONGEST, is_right, is_unknown
from components.environments.worlds.email_search.mailbox import FIRST_DAY, Mail, Mailbox, address, mailbox
from components.environments.worlds.email_search.questions import KINDS, TODAY, Kind, scenarios
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = """You answer questions from a mailbox. Search, read the mails that matter, then answer once: only the \
value asked for, and the ids of the mails that show it. A later mail may change what an earlier one says, and not \
every value that a mail names holds. If you cannot find it, answer: I do not know."""
SOURCES = 10
"""Maximum number of ids that an answer cites."""
MOST = 20
"""Maximum number of mails that a search returns."""


@registered("environment.email_search")
class EmailSearch(RestorableState):
    """seed: seed of mailboxes and questions. mails: mails per mailbox. train, heldout: questions of the two splits.
    train_mailboxes, heldout_mailboxes: number of mailboxes of each split; the splits share no mailbox. kinds: types of
    the questions, in turn while a mailbox has more of them.

    Scenario types: fact, person, date, change, chain, total, compare; difficulty 1 to 5 by the number of mails to
    combine and of decoys (`questions.py`).

    Outcome: `success`; `progress`, the mean of four parts: the shares of the needed facts whose mails were found and
    were read, the right answer, and a right source; `answered` (right, wrong, unknown or no), also as `answer_right`,
    `answer_wrong`, `unknown`; `source_right`; `searches`, `reads`.
    """

    saved = ("searches", "reads", "found_ids", "read_ids", "answer_text", "sources")

    system = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        mails: Annotated[int, Field(ge=2500, le=50_000)] = 3000,
        train: CountOrNone = 512,
        heldout: CountOrNone = 128,
        train_mailboxes: Annotated[int, Field(ge=1, le=64)] = 4,
        heldout_mailboxes: Annotated[int, Field(ge=1, le=64)] = 1,
        kinds: Annotated[Sequence[Kind], Field(min_length=1)] = KINDS,
    ):
        self._scenarios = scenarios(
            seed, mails, train, heldout, train_mailboxes, heldout_mailboxes, tuple(dict.fromkeys(kinds))
        )
        self._seed, self._mails = seed, mails

    def begin(self, scenario: Scenario) -> str:
        self.box = self._mailbox(scenario)
        self.searches = self.reads = 0
        self.found_ids: set[str] = set()
        self.read_ids: set[str] = set()
        self.answer_text = ""
        self.sources: list[str] = []
        first, last = date.fromordinal(FIRST_DAY), date.fromordinal(TODAY)
        return (
            f"{scenario.input['question']}\n\nThe mailbox is that of {self.box.plan.owner}'s office; it holds "
            f"{len(self.box.mails)} mails since {first}. Today is {last}."
        )

    @tool
    def search(
        self,
        keywords: Annotated[str, "words; mails with more of them come first"],
        sender: Annotated[str, "part of a name or address"] = "",
        after: Annotated[str, "day such as 2024-05-31, included"] = "",
        before: Annotated[str, "day such as 2024-05-31, included"] = "",
        limit: Annotated[int, "1 to 20"] = 5,
    ) -> str:
        """finds mails: id, day, sender, subject, and a piece of the text"""
        if not re.search(r"[a-zA-Z0-9]", keywords):
            raise InvalidAction("no words to search for")
        if not 1 <= limit <= MOST:
            raise InvalidAction(f"limit is {limit}, expected 1 to {MOST}")
        days = {"after": _day("after", after), "before": _day("before", before)}
        self.searches += 1
        hits = self.box.search(keywords, sender=sender.strip()[:60], limit=limit, **days)
        self.found_ids.update(mail.id for mail, _ in hits)
        return "\n".join(_line(mail, piece) for mail, piece in hits) or "no mails found"

    @tool
    def read(self, message_id: Annotated[str, "as search shows it"]) -> str:
        """shows a whole mail"""
        mail = self.box.by_id.get(message_id.strip())
        if mail is None:
            raise InvalidAction(f"no mail {message_id[:40]!r}")
        self.reads += 1
        self.read_ids.add(mail.id)
        return (
            f"From: {mail.sender} <{address(mail.sender)}>\nTo: {mail.to} <{address(mail.to)}>\n"
            f"Date: {date.fromordinal(mail.day)} {mail.minute // 60:02d}:{mail.minute % 60:02d}\n"
            f"Subject: {mail.subject}\n\n{mail.body}"
        )

    @tool
    def answer(
        self,
        text: Annotated[str, "only the value asked for, or: I do not know"],
        sources: Annotated[list[str], "ids of the mails that show it"],
    ) -> str:
        """ends the task"""
        if len(sources) > SOURCES:
            raise InvalidAction(f"{len(sources)} sources, expected {SOURCES} at most")
        if missing := [source for source in sources if source.strip() not in self.box.by_id]:
            raise InvalidAction(f"no mail {missing[0][:40]!r}")
        self.answer_text, self.sources = text[:LONGEST], [source.strip() for source in sources]
        self.done = True
        return "answered"

    def on_message(self, text: str) -> Messages:
        """Take a message without a tool call as the answer, and the ids in it as the sources."""
        ids = dict.fromkeys(re.findall(r"\bm\d{6}\b", text[:LONGEST]))
        self.answer_text = re.sub(r"\bm\d{6}\b", " ", text[:LONGEST])
        self.sources = [mail_id for mail_id in ids if mail_id in self.box.by_id][:SOURCES]
        self.done = True
        return []

    def outcome(self, answer: str) -> dict[str, Any]:
        goal = self.scenario.input
        answered = self._answered()
        source_right = not {*self.sources}.isdisjoint(goal["sources"])
        right = answered == "right"
        shares = [
            self._share(self.found_ids | self.read_ids),
            self._share(self.read_ids),
            float(right),
            float(source_right),
        ]
        return {
            "success": right and source_right,
            "progress": sum(shares) / len(shares),
            "answered": answered,
            "answer_right": right,
            "answer_wrong": answered == "wrong",
            "unknown": answered == "unknown",
            "source_right": source_right,
            "searches": self.searches,
            "reads": self.reads,
        }

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return calls that search for each needed fact, more narrowly until a mail is found, and read that mail."""
        box, goal = self._mailbox(scenario), scenario.input
        steps: list[tuple[str, dict[str, Any]]] = []
        shown: set[str] = set()
        read: list[str] = []
        for words, ids in zip(goal["searches"], goal["needed"], strict=True):
            for arguments in _narrowing_searches(words, box.by_id[ids[0]]):
                if shown & set(ids):
                    break
                days = {name: _day(name, arguments.get(name, "")) for name in ("after", "before")}
                sender, limit = arguments.get("sender", ""), arguments.get("limit", 5)
                hits = box.search(arguments["keywords"], sender=sender, limit=limit, **days)
                steps.append(("search", arguments))
                shown |= {mail.id for mail, _ in hits}
            read.append(next(mail_id for mail_id in ids if mail_id in shown))
            steps.append(("read", {"message_id": read[-1]}))
        sources = [mail_id for mail_id in read if mail_id in goal["sources"]]
        steps.append(("answer", {"text": _answer_text(goal["kind"], goal["answer"]), "sources": sources}))
        return [call(name, arguments, number) for number, (name, arguments) in enumerate(steps)]

    def _mailbox(self, scenario: Scenario) -> Mailbox:
        """Return the mailbox, which is generated on first use and shared by all instances."""
        return mailbox(self._seed, scenario.input["mailbox"], self._mails)

    def _answered(self) -> str:
        goal = self.scenario.input
        if not self.answer_text.strip():
            return "no"
        if is_unknown(self.answer_text):
            return "unknown"
        names = self.box.plan.names(goal["kind"])
        return "right" if is_right(goal["kind"], self.answer_text, goal["answer"], goal["question"], names) else "wrong"

    def _share(self, ids: set[str]) -> float:
        """Return the share of the needed facts that these mails state."""
        needed = self.scenario.input["needed"]
        return sum(not ids.isdisjoint(fact_ids) for fact_ids in needed) / len(needed)


def _day(name: str, text: str) -> int | None:
    if not text.strip():
        return None
    try:
        return date.fromisoformat(text.strip()).toordinal()
    except ValueError:
        raise InvalidAction(f"{name} is {text[:40]!r}, expected a day such as 2024-05-31") from None


def _line(mail: Mail, piece: str) -> str:
    return f"{mail.id} | {date.fromordinal(mail.day)} | {mail.sender} | {mail.subject} | {' '.join(piece.split())}"


def _narrowing_searches(words: str, mail: Mail) -> list[dict[str, Any]]:
    """Return increasingly narrow searches for a mail; the last one always finds it."""
    day = date.fromordinal(mail.day).isoformat()
    return [
        {"keywords": words},
        {"keywords": words, "limit": 10},
        {"keywords": words, "limit": MOST},
        {"keywords": words, "after": day},
        {"keywords": words, "after": day, "before": day},
        {"keywords": f"{words} {mail.subject}", "sender": mail.sender, "after": day, "before": day},
    ]


def _answer_text(kind: str, answer: str) -> str:
    return f"{int(answer):,} dollars" if kind == "money" else answer
