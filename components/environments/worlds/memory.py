"""Facts over several sessions, of which only a memory outlasts the conversation.

Each session but the last shows facts (who has which number), and the last asks for one of them. Every session begins a
new context: the agent reads nothing of the earlier ones. It can answer only from its memory, a few entries that tools
write and read. The memory is bounded: a new entry replaces the oldest one, and an entry is too short for several facts.

An episode without the memory succeeds by chance only, with the probability 1 / `len(NUMBERS)`. The numbers of an
episode are distinct.
"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

from components.environments.protocol import Messages
from components.environments.restorable import RestorableState
from components.environments.seeded import GeneratedScenarios
from components.environments.tools import InvalidAction, call, tool
from components.specs.registered import registered
from components.trajectories.schema import Scenario

NAMES = (
    "Ada", "Ali", "Ben", "Dan", "Don", "Ed", "Jan", "Jim", "Jo", "Ken", "Kim", "Leo", "Lin", "Mia", "Nick", "Pat",
    "Ray", "Sam", "Ted", "Tom",
)  # fmt: skip
NUMBERS = range(10, 100)
MOST_CHARACTERS = 12
"""Maximum length of a key, and of a value."""
SYSTEM = (
    "Each session is a new conversation; only your memory stays. Say done to end a session. Answer a question with the "
    "number alone."
)
IMPORTANT = "Only important facts are asked for."
DISTRACTORS = (
    "The train leaves at {n}.",
    "The room has {n} chairs.",
    "It is {n} degrees outside.",
    "The shop closes in {n} minutes.",
    "Page {n} is missing.",
    "Bus {n} is late.",
)


class MemoryLevel(NamedTuple):
    """Parameters of a difficulty."""

    facts: int
    sessions: int
    """Sessions before the question."""
    updates: int
    """Facts that a later session changes; the last number counts."""
    distractors: int
    """Sentences with a number that is no fact."""
    important: int
    """Facts that are marked as important, as many as the memory has entries; 0: all facts fit, and none is marked."""


class Sentence(NamedTuple):
    """A sentence of a session."""

    text: str
    fact: list[str] | None
    """Name and number of a fact that can be asked for."""


LEVELS = {
    1: MemoryLevel(facts=2, sessions=1, updates=0, distractors=0, important=0),
    2: MemoryLevel(facts=4, sessions=2, updates=0, distractors=2, important=0),
    3: MemoryLevel(facts=4, sessions=2, updates=2, distractors=2, important=0),
    4: MemoryLevel(facts=6, sessions=2, updates=0, distractors=2, important=3),
    5: MemoryLevel(facts=8, sessions=3, updates=2, distractors=4, important=3),
}
"""Parameters by difficulty."""


@registered("environment.memory")
class Memory(GeneratedScenarios, RestorableState):
    """Facts that are asked for after the conversation that stated them is gone; a memory is written and read by tools.

    Scenario types: stated (the number of the asked fact never changed), updated (a later session changed it).
    Difficulty: see LEVELS. The outcome also holds `stored`, whether the memory has the right number, and `progress`: 1
    for success, 0.5 for `stored` alone.

    Args:
        seed: Generator seed.
        train, heldout: Number of scenarios of the split.
        difficulties: Difficulties from 1 to 5, in rotation.
    """

    name = "memory"
    system = SYSTEM
    saved = ("session", "memory")

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        """Draw a task; return its type and its input.

        `sessions` holds the sentences of each session but the last, `facts` those of its facts that can be asked for.
        """
        level = LEVELS[difficulty]
        names = rng.sample(NAMES, level.facts)
        important = names[: level.important] or names
        updated = rng.sample(important, level.updates)
        numbers = iter(rng.sample(NUMBERS, level.facts + level.updates + level.distractors))
        sessions: list[list[Sentence]] = [[] for _ in range(level.sessions)]
        first = {name: rng.randrange(level.sessions - bool(updated)) for name in names}
        later = [(name, rng.randrange(first[name] + 1, level.sessions)) for name in updated]
        answers: dict[str, str] = {}
        for name, session in [*first.items(), *later]:
            answers[name] = number = str(next(numbers))
            mark = "Important: " if level.important and name in important else ""
            sessions[session].append(
                Sentence(f"{mark}The number of {name} is {number}.", [name, number] if name in important else None)
            )
        for _ in range(level.distractors):
            sessions[rng.randrange(level.sessions)].append(
                Sentence(rng.choice(DISTRACTORS).format(n=next(numbers)), None)
            )
        for sentences in sessions:
            rng.shuffle(sentences)
        asked = rng.choice(important)
        return "updated" if asked in updated else "stated", {
            "sessions": [[sentence.text for sentence in sentences] for sentences in sessions],
            "facts": [[sentence.fact for sentence in sentences if sentence.fact] for sentences in sessions],
            "asked": asked,
            "answer": answers[asked],
            "entries": len(important),
            "marked": bool(level.important),
        }

    def begin(self, scenario: Scenario) -> str:
        self.session = 0
        self.memory: dict[str, str] = {}
        """Values by key, the oldest entry first."""
        return self._text()

    @tool
    def write(self, key: str, value: str) -> str:
        """keeps a value"""
        for name, text in (("key", key), ("value", value)):
            if not 1 <= len(text.strip()) <= MOST_CHARACTERS:
                raise InvalidAction(f"the {name} has {len(text.strip())} characters; 1 to {MOST_CHARACTERS} fit")
        self.memory.pop(key.strip(), None)
        self.memory[key.strip()] = value.strip()
        if len(self.memory) <= self.scenario.input["entries"]:
            return "kept"
        oldest = next(iter(self.memory))
        del self.memory[oldest]
        return f"kept, {oldest} is lost"

    @tool
    def read(self, key: str) -> str:
        """gives the value"""
        if key.strip() not in self.memory:
            raise InvalidAction("no such key")
        return self.memory[key.strip()]

    @tool
    def list(self) -> str:
        """gives all keys"""
        return ", ".join(self.memory) or "none"

    def on_message(self, text: str) -> Messages:
        if self.session == len(self.scenario.input["sessions"]):
            return super().on_message(text)
        self.session += 1
        self.new_context = True
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self._text()}]

    def outcome(self, answer: str) -> dict[str, Any]:
        right = self.scenario.input["answer"]
        success = self.done and re.findall("[0-9]+", answer) == [right]
        stored = right in self.memory.values()
        progress = 1.0 if success else 0.5 * stored
        return {"success": success, "progress": progress, "stored": stored, "entries": len(self.memory)}

    def solve(self, scenario: Scenario) -> Messages:
        """Write the facts that can be asked for, one after the other, end each session, read the asked fact."""
        messages: Messages = []
        for facts in scenario.input["facts"]:
            for name, number in facts:
                messages.append(call("write", {"key": name, "value": number}, len(messages)))
            messages.append({"role": "assistant", "content": "done"})
        messages.append(call("read", {"key": scenario.input["asked"]}, len(messages)))
        return [*messages, {"role": "assistant", "content": scenario.input["answer"]}]

    def _text(self) -> str:
        """Return the user's message of the current session."""
        task = self.scenario.input
        if self.session == len(task["sessions"]):
            return f"What is the number of {task['asked']}?"
        marked = [IMPORTANT] if task["marked"] else []
        return "\n".join([f"Your memory has {task['entries']} entries.", *marked, *task["sessions"][self.session]])
