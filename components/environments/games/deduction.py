"""Logic puzzles with a unique solution: who was where, when and with what.

The numbers of guests, rooms, hours and things are equal, and no two guests share any. True clues exclude all cases but
one. The agent answers several questions about it, once. Success requires all answers to be right; the outcome's
`progress` is the share of right answers.

A clue is represented by the set of cases in which it is true: an integer with one bit for each of the (n!)³ cases. A
puzzle has a unique solution if the clues' sets have exactly one bit in common. Clues are sampled at random; clues that
exclude no case are rejected, and redundant clues are removed at the end. This happens when an episode begins (a few
hundredths of a second for five guests), as a function of the scenario.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from components.environments.seeded import GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

NAMES = (
    ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Leo"),
    ("attic", "cellar", "garden", "gallery", "hall", "kitchen", "library", "parlor", "pantry", "studio"),
    ("1:00", "2:00", "3:00", "4:00", "5:00", "6:00", "7:00", "8:00", "9:00", "10:00", "11:00"),
    ("bottle", "candle", "hammer", "knife", "lantern", "letter", "mirror", "ring", "rope", "umbrella"),
)
"""Names of people, places, times and things: the categories 0 to 3."""
WHO, WHERE, WHEN, WHAT = range(4)

LEVELS = {
    1: (3, 2, ("direct", "not")),
    2: (3, 3, ("link", "not")),
    3: (4, 4, ("direct", "link", "not")),
    4: (4, 4, ("link", "not", "either", "before")),
    5: (5, 5, ("link", "not", "either", "before", "next")),
}
"""Guests, questions and kinds of clues, by difficulty. With `not` or `direct` there are always enough clues."""


class Entity(NamedTuple):
    category: int
    number: int


class Clue(NamedTuple):
    """Clue about entities."""

    kind: str
    """Kind of the clue.

    direct: a person and one of their entities. link: two entities of one person. not: two entities of different people.
    either: the first entity belongs to the person of one of the others. before: the person of the first came before
    the person of the second. next: one hour before.
    """
    of: tuple[Entity, ...]


@registered("environment.deduction")
class Deduction(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation.

    Scenario types: given (all clues at the start), interviews (each guest states some clues when asked). Difficulty:
    see LEVELS.
    """

    saved = ("right",)

    name = "deduction"
    system = (
        "Work out the case from the clues, all of which are true. Then answer all questions at once, in their order."
    )

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        size, asked, kinds = LEVELS[difficulty]
        first = rng.randrange(len(NAMES[WHEN]) - size + 1)
        names = [rng.sample(category, size) for category in NAMES]
        names[WHEN] = list(NAMES[WHEN][first : first + size])
        task = {
            "names": names,
            "truth": [list(range(size)), *(rng.sample(range(size), size) for _ in range(3))],
            "kinds": list(kinds),
            "questions": asked,
            "clues": rng.randrange(10**9),
        }
        return rng.choice(("given", "interviews")), task

    def begin(self, scenario: Scenario) -> str:
        names = _names(scenario.input)
        self.clues, self.questions = puzzle(scenario.input)
        self.right: int | None = None
        asked = "\n".join(f"{n}. {_question(names, *fact)}" for n, fact in enumerate(self.questions, 1))
        questions_text = f"Questions:\n{asked}\n\nWrite answer followed by your answers with commas between them."
        if scenario.type == "given":
            clues_text = "\n".join(sentence(names, clue) for clue in self.clues)
        else:
            clues_text = "Each guest tells what they know: write ask and a name."
        return f"{_setting(names)}\n\n{clues_text}\n\n{questions_text}"

    def act(self, action: str) -> str:
        command, _, argument = action.partition(" ")
        match command.lower().rstrip(":"):
            case "ask" if self.scenario.type == "interviews":
                return self._ask(argument)
            case "answer":
                return self._answer(argument)
        asks = "ask NAME or " if self.scenario.type == "interviews" else ""
        raise InvalidAction(f"write {asks}answer followed by {len(self.questions)} answers with commas between them")

    def legal_actions(self) -> list[str]:
        """Return every question to a guest, and every combination of answers with a name of the right category."""
        names = _names(self.scenario.input)
        asks = [f"ask {name}" for name in names[WHO]] if self.scenario.type == "interviews" else []
        answers = itertools.product(*(names[category] for _, category in self.questions))
        return [*asks, *(f"answer {', '.join(answer)}" for answer in answers)]

    def outcome(self, answer: str) -> dict[str, Any]:
        right = self.right or 0
        return {"success": right == len(self.questions), "progress": right / len(self.questions), "right": right}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        names, truth = _names(scenario.input), _truth(scenario.input)
        _, asked = puzzle(scenario.input)
        answers = ", ".join(names[category][_same_person(truth, entity, category).number] for entity, category in asked)
        asks = [f"ask {name}" for name in names[WHO]] if scenario.type == "interviews" else []
        return acts([*asks, f"answer {answers}"])

    def _ask(self, name: str) -> str:
        names = _names(self.scenario.input)
        number = _name_index(name, names[WHO])
        statements = [sentence(names, clue) for clue in self.clues[number :: len(names[WHO])]]
        return "\n".join(statements) or "I know nothing."

    def _answer(self, text: str) -> str:
        answers, names = text.split(","), _names(self.scenario.input)
        if len(answers) != len(self.questions):
            raise InvalidAction(f"{len(answers)} answers; there are {len(self.questions)} questions")
        numbers = [_name_index(name, names[asked]) for name, (_, asked) in zip(answers, self.questions, strict=True)]
        truth = _truth(self.scenario.input)
        right = [_same_person(truth, entity, asked).number for entity, asked in self.questions]
        self.right = sum(a == b for a, b in zip(numbers, right, strict=True))
        self.done = True
        return f"{self.right} of {len(right)} are right."


# Cases. A case (the true one is the truth) is, by category, the number of each person's entity; of people their own.
Truth = tuple[tuple[int, ...], ...]


def puzzle(task: dict[str, Any]) -> tuple[tuple[Clue, ...], list[tuple[Entity, int]]]:
    """Return the clues of a scenario and its questions, each an entity and the category asked for."""
    stated = clues(_truth(task), tuple(task["kinds"]), task["clues"])
    return stated, questions(_truth(task), stated, task["questions"], task["clues"])


@functools.lru_cache(maxsize=1024)
def clues(truth: Truth, kinds: tuple[str, ...], seed: int) -> tuple[Clue, ...]:
    """Return a minimal set of clues that excludes every case but this one."""
    rng = random.Random(f"clues {seed}")
    size = len(truth[0])
    pools = {kind: list(_true_clues(truth, kind)) for kind in kinds}
    for pool in pools.values():
        rng.shuffle(pool)
    candidates = cases(size)
    selected: list[tuple[Clue, int]] = []
    while candidates.bit_count() > 1:
        pool = pools[rng.choice([kind for kind in kinds if pools[kind]])]
        clue = pool.pop()
        true = where_true(size, clue)
        if candidates & true != candidates:
            candidates &= true
            selected.append((clue, true))
    for clue_and_set in list(selected):
        others = [other for other in selected if other is not clue_and_set]
        if common(size, (true for _, true in others)).bit_count() == 1:
            selected = others
    return tuple(clue for clue, _ in selected)


def common(size: int, sets: Iterable[int]) -> int:
    """Return the cases that are in all sets."""
    return functools.reduce(int.__and__, sets, cases(size))


@functools.cache
def cases(size: int) -> int:
    """Return the set of all cases."""
    return (1 << math.factorial(size) ** 3) - 1


def where_true(size: int, clue: Clue) -> int:
    """Return the cases in which a clue is true."""
    first, second = clue.of[:2]
    match clue.kind:
        case "direct" | "link":
            return _together(size, first, second)
        case "not":
            return cases(size) ^ _together(size, first, second)
        case "either":
            return _together(size, first, second) | _together(size, first, clue.of[2])
    hours = [hour for hour in itertools.combinations(range(size), 2) if clue.kind == "before" or hour[1] == hour[0] + 1]
    true = 0
    for early, late in hours:
        true |= _together(size, first, Entity(WHEN, early)) & _together(size, second, Entity(WHEN, late))
    return true


def _together(size: int, first: Entity, second: Entity) -> int:
    """Return the cases in which two entities belong to one person."""
    true = 0
    for person in range(size):
        true |= _atom(size, person, *first) & _atom(size, person, *second)
    return true


@functools.cache
def _atom(size: int, person: int, category: int, number: int) -> int:
    """Return the cases in which an entity belongs to a person."""
    if category == WHO:
        return cases(size) if person == number else 0
    bits = ["1" if case[person] == number else "0" for case in itertools.permutations(range(size))]
    within, around = len(bits) ** (WHAT - category), len(bits) ** (category - WHERE)
    return int("".join(bit * within for bit in bits) * around, 2)


def _true_clues(truth: Truth, kind: str) -> Iterable[Clue]:
    """Yield all true clues of a kind."""
    entities = [Entity(category, number) for category in range(4) for number in range(len(truth[0]))]
    for first, second in itertools.permutations(entities, 2):
        together = _same_person(truth, first, second.category) == second
        apart = first.category != second.category and not together
        hours = [_same_person(truth, entity, WHEN).number for entity in (first, second)]
        match kind:
            case "direct" if together and first.category == WHO:
                yield Clue(kind, (first, second))
            case "link" if together and WHO < first.category < second.category:
                yield Clue(kind, (first, second))
            case "not" if apart and first.category < second.category:
                yield Clue(kind, (first, second))
            case "either" if apart and second.category != WHO:
                pair = sorted([second, _same_person(truth, first, second.category)])
                yield Clue(kind, (first, *pair))
            case "before" | "next" if WHEN not in (first.category, second.category) and hours[0] < hours[1]:
                if kind == "before" or hours[1] == hours[0] + 1:
                    yield Clue(kind, (first, second))


def questions(truth: Truth, stated: Sequence[Clue], count: int, seed: int) -> list[tuple[Entity, int]]:
    """Return the questions as (entity, category asked for). Each fact occurs once; facts stated by a clue come last."""
    stated_facts = {frozenset(clue.of) for clue in stated if clue.kind in ("direct", "link")}
    entities = [Entity(category, number) for category in range(4) for number in range(len(truth[0]))]
    facts = [(entity, asked) for entity in entities for asked in range(4) if asked != entity.category]
    random.Random(f"questions {seed}").shuffle(facts)
    facts.sort(key=lambda fact: frozenset((fact[0], _same_person(truth, *fact))) in stated_facts)
    chosen: dict[frozenset[Entity], tuple[Entity, int]] = {}
    for entity, asked in facts:  # "where was Ada" and "who was in the hall" may be the same fact
        chosen.setdefault(frozenset((entity, _same_person(truth, entity, asked))), (entity, asked))
    return list(chosen.values())[:count]


def _same_person(truth: Truth, entity: Entity, category: int) -> Entity:
    """Return the entity of a category that belongs to the same person as `entity`."""
    return Entity(category, truth[category][truth[entity.category].index(entity.number)])


# Sentences.
Names = Sequence[Sequence[str]]
DEEDS = (
    ("was {}", "was not {}"),
    ("was in the {}", "was not in the {}"),
    ("came at {}", "did not come at {}"),
    ("had the {}", "did not have the {}"),
)
"""Predicate about a person's entity, by category: affirmed and denied."""


def sentence(names: Names, clue: Clue) -> str:
    first, second = clue.of[:2]
    subject = _subject(names, first)
    match clue.kind:
        case "direct" | "link":
            text = f"{subject} {_deed(names, second)}"
        case "not":
            text = f"{subject} {_deed(names, second, denied=True)}"
        case "either":
            text = f"{subject} {_deed(names, second)} or {_deed(names, clue.of[2])}"
        case _:
            hour = "an hour " if clue.kind == "next" else ""
            text = f"{subject} came {hour}before {_subject(names, second)}"
    return f"{text[0].upper()}{text[1:]}."


def _setting(names: Names) -> str:
    people, places, times, things = (", ".join(part) for part in names)
    return (
        f"{len(names[WHO])} guests came to the house ({people}), each to another place ({places}), at another time "
        f"({times}), with another thing ({things})."
    )


def _question(names: Names, entity: Entity, asked: int) -> str:
    subject = _subject(names, entity)
    return (
        f"Who {_deed(names, entity)}?",
        f"In which place was {subject}?",
        f"At which time did {subject} come?",
        f"Which thing did {subject} have?",
    )[asked]


def _subject(names: Names, entity: Entity) -> str:
    return names[WHO][entity.number] if entity.category == WHO else f"whoever {_deed(names, entity)}"


def _deed(names: Names, entity: Entity, *, denied: bool = False) -> str:
    return DEEDS[entity.category][denied].format(names[entity.category][entity.number])


def _name_index(text: str, names: Sequence[str]) -> int:
    """Return the index of a name in `names`. Raises InvalidAction if it is not one of them."""
    name = re.sub(r"^(?:in the|the|at) ", "", text.strip().strip(".").lower())
    for number, candidate in enumerate(names):
        if candidate.lower() == name:
            return number
    raise InvalidAction(f"{text.strip()[:40]!r} is none of {', '.join(names)}")


def _names(task: dict[str, Any]) -> Names:
    names: Names = task["names"]
    return names


def _truth(task: dict[str, Any]) -> Truth:
    return tuple(tuple(numbers) for numbers in task["truth"])
