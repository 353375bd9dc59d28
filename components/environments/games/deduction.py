"""Find out who was where, when and with what: logic puzzles with one solution each.

As many guests came to a house as there are rooms, hours and things; no two share any. True clues rule out what was
not, until one case is left; the agent answers several questions about it, once. All right is success; the outcome's
`progress` is the share that is right.

A clue is held as the set of cases in which it is true: the bits of an integer, one for each of the (n!)³ cases. So a
puzzle has one solution if the clues' sets have one bit in common. Clues are drawn at random, those that rule nothing
out are rejected, and in the end those that the others make superfluous are dropped. This is done when an episode
begins (a few hundredths of a second for five guests), from the scenario alone.
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
from components.environments.tools import Invalid, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

NAMES = (
    ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Leo"),
    ("attic", "cellar", "garden", "gallery", "hall", "kitchen", "library", "parlor", "pantry", "studio"),
    ("1:00", "2:00", "3:00", "4:00", "5:00", "6:00", "7:00", "8:00", "9:00", "10:00", "11:00"),
    ("bottle", "candle", "hammer", "knife", "lantern", "letter", "mirror", "ring", "rope", "umbrella"),
)
"""Of people, places, times and things: the categories 0 to 3."""
WHO, WHERE, WHEN, WHAT = range(4)

LEVELS = {
    1: (3, 2, ("direct", "not")),
    2: (3, 3, ("link", "not")),
    3: (4, 4, ("direct", "link", "not")),
    4: (4, 4, ("link", "not", "either", "before")),
    5: (5, 5, ("link", "not", "either", "before", "next")),
}
"""Guests, questions, and kinds of clues, by difficulty. With `not` or `direct` among them there are always enough."""


class Entity(NamedTuple):
    category: int
    number: int


class Clue(NamedTuple):
    kind: str
    """direct: a person and something of theirs. link: two things of one person. not: they are not of one person.
    either: the first goes with one of the others. before, next: the person of the first came before that of the
    second, by one hour."""
    of: tuple[Entity, ...]


@registered("environment.deduction")
class Deduction(GeneratedGame):
    """seed: of the generator. train, heldout: scenarios of the two splits. difficulties: those that occur, in turn.

    Scenario types: given (all clues at the start), interviews (each guest tells some, when asked). Difficulty: see
    LEVELS.
    """

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
        asked = "\n".join(f"{n}. {_question(names, *one)}" for n, one in enumerate(self.questions, 1))
        rest = f"Questions:\n{asked}\n\nWrite answer followed by your answers with commas between them."
        if scenario.type == "given":
            told = "\n".join(sentence(names, clue) for clue in self.clues)
        else:
            told = "Each guest tells what they know: write ask and a name."
        return f"{_setting(names)}\n\n{told}\n\n{rest}"

    def act(self, action: str) -> str:
        command, _, rest = action.partition(" ")
        match command.lower().rstrip(":"):
            case "ask" if self.scenario.type == "interviews":
                return self._ask(rest)
            case "answer":
                return self._answer(rest)
        asks = "ask NAME or " if self.scenario.type == "interviews" else ""
        raise Invalid(f"write {asks}answer followed by {len(self.questions)} answers with commas between them")

    def outcome(self, answer: str) -> dict[str, Any]:
        right = self.right or 0
        return {"success": right == len(self.questions), "progress": right / len(self.questions), "right": right}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        names, truth = _names(scenario.input), _truth(scenario.input)
        _, asked = puzzle(scenario.input)
        answers = ", ".join(names[category][_same_person(truth, one, category).number] for one, category in asked)
        asks = [f"ask {name}" for name in names[WHO]] if scenario.type == "interviews" else []
        return acts([*asks, f"answer {answers}"])

    def save(self) -> list[Any]:
        return [self.right, self.done, self.invalid_actions]

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        self.reset(scenario)
        self.right, self.done, self.invalid_actions = state

    def _ask(self, name: str) -> str:
        names = _names(self.scenario.input)
        number = _found(name, names[WHO])
        told = [sentence(names, clue) for clue in self.clues[number :: len(names[WHO])]]
        return "\n".join(told) or "I know nothing."

    def _answer(self, text: str) -> str:
        given, names = text.split(","), _names(self.scenario.input)
        if len(given) != len(self.questions):
            raise Invalid(f"{len(given)} answers; there are {len(self.questions)} questions")
        found = [_found(one, names[asked]) for one, (_, asked) in zip(given, self.questions, strict=True)]
        truth = _truth(self.scenario.input)
        right = [_same_person(truth, one, asked).number for one, asked in self.questions]
        self.right = sum(a == b for a, b in zip(found, right, strict=True))
        self.done = True
        return f"{self.right} of {len(right)} are right."


# The cases. A truth, or a case, holds for each category the number that each person has; of people their own.
Truth = tuple[tuple[int, ...], ...]


def puzzle(task: dict[str, Any]) -> tuple[tuple[Clue, ...], list[tuple[Entity, int]]]:
    """The clues of a scenario, and its questions: of whom or what, and which category is asked for."""
    found = clues(_truth(task), tuple(task["kinds"]), task["clues"])
    return found, questions(_truth(task), found, task["questions"], task["clues"])


@functools.lru_cache(maxsize=1024)
def clues(truth: Truth, kinds: tuple[str, ...], seed: int) -> tuple[Clue, ...]:
    """Clues that leave no case but this one, and none of which could be left out."""
    rng = random.Random(f"clues {seed}")
    size = len(truth[0])
    pools = {kind: list(_true_clues(truth, kind)) for kind in kinds}
    for pool in pools.values():
        rng.shuffle(pool)
    left = cases(size)
    kept: list[tuple[Clue, int]] = []
    while left.bit_count() > 1:
        pool = pools[rng.choice([kind for kind in kinds if pools[kind]])]
        clue = pool.pop()
        true = where_true(size, clue)
        if left & true != left:
            left &= true
            kept.append((clue, true))
    for one in list(kept):
        others = [other for other in kept if other is not one]
        if common(size, (true for _, true in others)).bit_count() == 1:
            kept = others
    return tuple(clue for clue, _ in kept)


def common(size: int, sets: Iterable[int]) -> int:
    """The cases that are in all sets."""
    return functools.reduce(int.__and__, sets, cases(size))


@functools.cache
def cases(size: int) -> int:
    """All of them."""
    return (1 << math.factorial(size) ** 3) - 1


def where_true(size: int, clue: Clue) -> int:
    """The cases in which a clue is true."""
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


def _together(size: int, one: Entity, other: Entity) -> int:
    """The cases in which two are of one person."""
    true = 0
    for person in range(size):
        true |= _atom(size, person, *one) & _atom(size, person, *other)
    return true


@functools.cache
def _atom(size: int, person: int, category: int, number: int) -> int:
    """The cases in which something is of a person."""
    if category == WHO:
        return cases(size) if person == number else 0
    one = ["1" if case[person] == number else "0" for case in itertools.permutations(range(size))]
    within, around = len(one) ** (WHAT - category), len(one) ** (category - WHERE)
    return int("".join(bit * within for bit in one) * around, 2)


def _true_clues(truth: Truth, kind: str) -> Iterable[Clue]:
    """All of a kind that are true."""
    entities = [Entity(category, number) for category in range(4) for number in range(len(truth[0]))]
    for one, other in itertools.permutations(entities, 2):
        together = _same_person(truth, one, other.category) == other
        apart = one.category != other.category and not together
        hours = [_same_person(truth, entity, WHEN).number for entity in (one, other)]
        match kind:
            case "direct" if together and one.category == WHO:
                yield Clue(kind, (one, other))
            case "link" if together and WHO < one.category < other.category:
                yield Clue(kind, (one, other))
            case "not" if apart and one.category < other.category:
                yield Clue(kind, (one, other))
            case "either" if apart and other.category != WHO:
                pair = sorted([other, _same_person(truth, one, other.category)])
                yield Clue(kind, (one, *pair))
            case "before" | "next" if WHEN not in (one.category, other.category) and hours[0] < hours[1]:
                if kind == "before" or hours[1] == hours[0] + 1:
                    yield Clue(kind, (one, other))


def questions(truth: Truth, stated: Sequence[Clue], count: int, seed: int) -> list[tuple[Entity, int]]:
    """What is asked, each fact once, and what a clue says outright last."""
    said = {frozenset(clue.of) for clue in stated if clue.kind in ("direct", "link")}
    entities = [Entity(category, number) for category in range(4) for number in range(len(truth[0]))]
    found = [(one, asked) for one in entities for asked in range(4) if asked != one.category]
    random.Random(f"questions {seed}").shuffle(found)
    found.sort(key=lambda one: frozenset((one[0], _same_person(truth, *one))) in said)
    chosen: dict[frozenset[Entity], tuple[Entity, int]] = {}
    for one, asked in found:  # where Ada was and who was in the hall may be one fact
        chosen.setdefault(frozenset((one, _same_person(truth, one, asked))), (one, asked))
    return list(chosen.values())[:count]


def _same_person(truth: Truth, one: Entity, category: int) -> Entity:
    """What the person of an entity has of a category."""
    return Entity(category, truth[category][truth[one.category].index(one.number)])


# Words.
Names = Sequence[Sequence[str]]
DEEDS = (
    ("was {}", "was not {}"),
    ("was in the {}", "was not in the {}"),
    ("came at {}", "did not come at {}"),
    ("had the {}", "did not have the {}"),
)
"""Of what is of a person, by category, and the same denied."""


def sentence(names: Names, clue: Clue) -> str:
    first, second = clue.of[:2]
    subject = _subject(names, first)
    match clue.kind:
        case "direct" | "link":
            said = f"{subject} {_deed(names, second)}"
        case "not":
            said = f"{subject} {_deed(names, second, denied=True)}"
        case "either":
            said = f"{subject} {_deed(names, second)} or {_deed(names, clue.of[2])}"
        case _:
            hour = "an hour " if clue.kind == "next" else ""
            said = f"{subject} came {hour}before {_subject(names, second)}"
    return f"{said[0].upper()}{said[1:]}."


def _setting(names: Names) -> str:
    people, places, times, things = (", ".join(part) for part in names)
    return (
        f"{len(names[WHO])} guests came to the house ({people}), each to another place ({places}), at another time "
        f"({times}), with another thing ({things})."
    )


def _question(names: Names, one: Entity, asked: int) -> str:
    subject = _subject(names, one)
    return (
        f"Who {_deed(names, one)}?",
        f"In which place was {subject}?",
        f"At which time did {subject} come?",
        f"Which thing did {subject} have?",
    )[asked]


def _subject(names: Names, one: Entity) -> str:
    return names[WHO][one.number] if one.category == WHO else f"whoever {_deed(names, one)}"


def _deed(names: Names, one: Entity, *, denied: bool = False) -> str:
    return DEEDS[one.category][denied].format(names[one.category][one.number])


def _found(said: str, names: Sequence[str]) -> int:
    """The number of a name. Raises Invalid."""
    name = re.sub(r"^(?:in the|the|at) ", "", said.strip().strip(".").lower())
    for number, one in enumerate(names):
        if one.lower() == name:
            return number
    raise Invalid(f"{said.strip()[:40]!r} is none of {', '.join(names)}")


def _names(task: dict[str, Any]) -> Names:
    names: Names = task["names"]
    return names


def _truth(task: dict[str, Any]) -> Truth:
    return tuple(tuple(numbers) for numbers in task["truth"])
