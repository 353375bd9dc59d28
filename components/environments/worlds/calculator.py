"""Word problems with a calculator: the agent reads a story, calculates step by step, and submits the number.

Problems are generated from a seed: a story of one to five steps, each of which uses the result of the previous one,
with numbers that are too large for mental arithmetic. Stories of difficulty 4 and 5 also contain an irrelevant number.
All problems of both splits have different calculations.

The calculator evaluates arithmetic only: Python's `ast` parses the expression, which is evaluated in exact fractions,
with limits on its length, its exponents and the size of its numbers. Nothing is executed as code.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any

from components.environments.restorable import RestorableState
from components.environments.seeded import ALL, CountOrNone, Difficulties
from components.environments.tools import InvalidAction, call, tool
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 200
"""Maximum number of characters of an expression."""
DIGITS = 12
"""Maximum number of decimals that the calculator shows."""
_MOST_BITS = 2048
"""Maximum number of bits of the numerator and denominator of intermediate results."""
_MOST_EXPONENT = 100


@registered("environment.calculator")
class Calculator(RestorableState):
    """seed: generator seed. train, heldout: problems of the two splits. difficulties: numbers of steps, from 1 to 5, at
    random.

    Scenario types: stock, money, travel, work. Difficulty: the number of steps.
    """

    saved = ("submitted", "calculations")

    system = (
        "Solve the problem. Use calculate for every calculation, and submit the number that is asked for, without a "
        "unit. You can submit once."
    )

    def __init__(
        self, seed: int = 0, train: CountOrNone = 512, heldout: CountOrNone = 128, difficulties: Difficulties = ALL
    ):
        if not difficulties or not set(difficulties) <= set(ALL):
            raise ValueError(f"difficulties = {list(difficulties)}: expected one or more of {list(ALL)}")
        if train + heldout > 20_000:
            raise ValueError(f"train + heldout = {train + heldout}: expected at most 20000")
        self._scenarios = _generate(seed, train, heldout, tuple(difficulties))

    def begin(self, scenario: Scenario) -> str:
        self.submitted, self.calculations = "", 0
        return str(scenario.input["question"])

    @tool
    def calculate(
        self, expression: Annotated[str, "numbers, + - * / // % **, brackets, round, floor, ceil, abs, min, max"]
    ) -> str:
        """calculates exactly"""
        value = format_number(evaluate(expression))
        self.calculations += 1
        return value

    @tool
    def submit(self, answer: Annotated[str, "a number, such as 1234.5"]) -> str:
        """gives the answer and ends the task"""
        parse_number(answer)
        self.submitted, self.done = answer, True
        return "submitted"

    def outcome(self, answer: str) -> dict[str, Any]:
        right = Fraction(self.scenario.input["answer"])
        success = bool(self.submitted) and parse_number(self.submitted) == right
        return {"success": success, "submitted": bool(self.submitted), "calculations": self.calculations}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return one calculation per step, and the submission."""
        steps = [
            call("calculate", {"expression": step_expression}, index)
            for index, step_expression in enumerate(scenario.input["steps"])
        ]
        return [*steps, call("submit", {"answer": scenario.input["answer"]}, len(steps))]


# The calculator

_BINARY: dict[type, Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Fraction], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "round": (1, 2, lambda value, places=Fraction(0): _round(value, places)),
    "floor": (1, 1, math.floor),
    "ceil": (1, 1, math.ceil),
    "abs": (1, 1, abs),
    "min": (1, 20, lambda *values: min(values)),
    "max": (1, 20, lambda *values: max(values)),
}
"""Minimum and maximum number of arguments, and the function."""


def evaluate(expression: str, longest: int = LONGEST) -> Fraction:
    """Return the value of an arithmetic expression. Raises InvalidAction if it is malformed or too large.

    longest: maximum number of characters.
    """
    if len(expression) > longest:
        raise InvalidAction(f"the expression has {len(expression)} characters; {longest} at most")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise InvalidAction("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidAction("this is no arithmetic expression; an example: (1200 - 3 * 150) / 4") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_size(repr(node.value))  # exactly the decimal as written: 0.1 is 1/10
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _check_size(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _check_size(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        least, most, function = _FUNCTIONS[node.func.id]
        if node.keywords or not least <= len(node.args) <= most:
            raise InvalidAction(f"{node.func.id} takes {least} argument{'' if most == 1 else f' to {most}'}")
        return _check_size(function(*map(_value, node.args)))
    if isinstance(node, ast.Tuple):
        raise InvalidAction("write numbers without commas: 1200, not 1,200")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise InvalidAction("a power is written **")
    raise InvalidAction("only numbers, + - * / // % **, brackets and " + ", ".join(_FUNCTIONS) + " can be calculated")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MOST_EXPONENT:
        raise InvalidAction(f"an exponent is a whole number from -{_MOST_EXPONENT} to {_MOST_EXPONENT}")
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > 2 * _MOST_BITS:
        raise InvalidAction("the number is too large")
    return _check_size(Fraction(base ** int(exponent)))


def _round(value: Fraction, places: Fraction) -> Fraction:
    """Round half away from zero."""
    if places.denominator != 1 or not 0 <= places <= DIGITS:
        raise InvalidAction(f"round takes a whole number of places from 0 to {DIGITS}")
    scale = 10 ** int(places)
    size = Fraction(math.floor(abs(value) * scale + Fraction(1, 2)), scale)
    return -size if value < 0 else size


def _check_size(value: Any) -> Fraction:
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise InvalidAction("the number is too large")
    return value


def format_number(value: Fraction) -> str:
    """Return a value as a decimal number, rounded to at most `DIGITS` decimals."""
    whole = _round(value, Fraction(DIGITS))
    sign, (integer, remainder) = "-" if whole < 0 else "", divmod(abs(whole), 1)
    decimals = f"{int(remainder * 10**DIGITS):0{DIGITS}d}".rstrip("0")
    return f"{sign}{integer}{'.' if decimals else ''}{decimals}"


def parse_number(text: str) -> Fraction:
    """Parse a submitted number, which may have a dollar sign and thousands separators. Raises InvalidAction
    otherwise."""
    plain = text.strip().removeprefix("$").strip()
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", plain, re.ASCII):
        plain = plain.replace(",", "")
    if len(plain) > 50 or not re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)", plain, re.ASCII):
        raise InvalidAction("the answer is a number, such as 1234.5")
    return Fraction(plain)


# The problems

NAMES = (
    "Ana",
    "Ben",
    "Chloe",
    "David",
    "Elif",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mei",
    "Noah",
)
GOODS = ("apples", "bricks", "candles", "eggs", "lamps", "marbles", "notebooks", "pencils", "shirts", "stamps", "tiles")


@dataclass
class _Story:
    """Problem under construction: sentences and their calculations. `value` is the result so far."""

    rng: random.Random
    sentences: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    value: Fraction = Fraction(0)

    def tell(self, sentence: str, expression: str) -> None:
        """Add a sentence and its calculation. expression: `#` stands for the result so far."""
        self.sentences.append(sentence)
        self.steps.append(expression.replace("#", format_number(self.value)))
        self.value = evaluate(self.steps[-1])

    def factor(self, least: int, most: int) -> int:
        """Return a random divisor of the result so far from `least` to `most`; 1 if there is none."""
        whole = int(self.value) if self.value.denominator == 1 else 0
        divisors = [divisor for divisor in range(least, most + 1) if whole and whole % divisor == 0]
        return self.rng.choice(divisors) if divisors else 1


def _stock(story: _Story, steps: int, name: str) -> str:
    rng, goods = story.rng, story.rng.choice(GOODS)
    boxes, box_size = rng.randrange(23, 98), rng.randrange(120, 980)
    story.tell(f"{name}'s store has {boxes} boxes of {box_size} {goods} each.", f"{boxes} * {box_size}")
    events = ["delivery", "sales", "gift", "percent", "grow"]
    rng.shuffle(events)
    for event in events[: steps - 1]:
        if event == "gift" and (part := story.factor(3, 9)) > 1:
            story.tell(f"One of every {part} {goods} is given away.", f"# - # / {part}")
        elif event == "percent" and story.value % 20 == 0:
            percent = rng.choice((5, 10, 15, 35, 45))
            story.tell(f"Then {percent} percent of what is there is sold.", f"# * {100 - percent} / 100")
        elif event == "grow":
            times = rng.randrange(2, 7)
            story.tell(f"After a delivery there are {times} times as many {goods} as before it.", f"# * {times}")
        elif event == "sales":
            days = rng.randrange(11, 29)
            daily = max(1, int(story.value) // (days * rng.randrange(2, 5)))
            story.tell(f"For {days} days, {daily} {goods} are sold every day.", f"# - {days} * {daily}")
        else:
            more, size = rng.randrange(12, 60), rng.randrange(130, 890)
            story.tell(f"Then {more} crates arrive with {size} {goods} in each.", f"# + {more} * {size}")
    return f"How many {goods} are in the store now?"


def _money(story: _Story, steps: int, name: str) -> str:
    rng, goods = story.rng, story.rng.choice(GOODS)
    count, cents = rng.randrange(40, 400) * 10, rng.randrange(115, 4999)
    price = f"{cents // 100}.{cents % 100:02d}"
    story.tell(f"{name} orders {count} {goods} at {price} dollars each.", f"{count} * {price}")
    events = ["discount", "freight", "people", "month", "coupon"]
    rng.shuffle(events)
    for event in events[: steps - 1]:
        if event == "discount":
            percent = rng.choice((4, 8, 12, 15, 18, 25))
            story.tell(f"On what is to be paid so far, there is a discount of {percent} percent.",
                       f"round(# * {100 - percent} / 100, 2)")  # fmt: skip
        elif event == "freight":
            pallets, fee = rng.randrange(7, 60), rng.randrange(21, 95)
            story.tell(f"Freight is added: {pallets} pallets at {fee} dollars each.", f"# + {pallets} * {fee}")
        elif event == "people":
            people = rng.choice((2, 4, 5, 8))
            story.tell(f"The bill up to here is shared equally by {people} shops, of which {name}'s is one; from here "
                       f"on, only {name}'s share is meant.", f"round(# / {people}, 2)")  # fmt: skip
        elif event == "month":
            months = rng.randrange(3, 19)
            story.tell(f"{name} orders the same in each of {months} months, and pays for all of them.", f"# * {months}")
        else:
            coupon = rng.randrange(13, 240)
            story.tell(f"Then a coupon of {coupon} dollars is taken off.", f"# - {coupon}")
    return f"How many dollars does {name} pay? Amounts are rounded to cents at each step."


def _travel(story: _Story, steps: int, name: str) -> str:
    rng = story.rng
    hours, speed = rng.randrange(5, 19), rng.randrange(43, 118)
    story.tell(f"{name} drives a truck for {hours} hours at {speed} km an hour.", f"{hours} * {speed}")
    chosen = rng.sample(range(3), min(steps - 1, 2))
    for event in [("leg", "way", "year")[at] for at in sorted(chosen)]:
        if event == "leg":
            more, other = rng.randrange(3, 14), rng.randrange(38, 97)
            story.tell(f"Then the tour goes on for {more} hours at {other} km an hour.", f"# + {more} * {other}")
        elif event == "way":
            detour = rng.randrange(14, 93)
            story.tell(f"The way home is as long as the tour up to here, and a detour adds {detour} km.",
                       f"2 * # + {detour}")  # fmt: skip
        else:
            times = rng.randrange(6, 48)
            story.tell(f"All of this is driven {times} times in a year.", f"# * {times}")
    if steps < 4:
        return "How many km is that in all?"
    use = rng.randrange(17, 39)
    story.tell(f"The truck burns {use} liters for every 100 km.", f"# * {use} / 100")
    if steps < 5:
        return "How many liters does it burn in all?"
    cents = rng.randrange(121, 199)
    price = f"{cents // 100}.{cents % 100:02d}"
    story.tell(f"A liter costs {price} dollars.", f"round(# * {price}, 2)")
    return "How many dollars does the fuel cost, rounded to cents?"


def _work(story: _Story, steps: int, name: str) -> str:
    rng, goods = story.rng, story.rng.choice(GOODS)
    machines, rate = rng.randrange(13, 67), rng.randrange(112, 870)
    story.tell(f"In {name}'s factory, {machines} machines make {rate} {goods} an hour each.", f"{machines} * {rate}")
    if steps >= 2:
        hours = rng.randrange(6, 23)
        story.tell(f"They run {hours} hours a day.", f"# * {hours}")
    if steps >= 3:
        broken = rng.randrange(105, 990)
        story.tell(f"Every day {broken} {goods} are broken and thrown away.", f"# - {broken}")
    if steps >= 4:
        days = rng.randrange(11, 29)
        story.tell(f"The factory works {days} days a month.", f"# * {days}")
    if steps >= 5:
        size = rng.randrange(37, 480)
        story.tell(f"The {goods} of a month are packed in boxes of {size}.", f"ceil(# / {size})")
        return "How many boxes does a month need, the last of which may not be full?"
    span = {1: "an hour", 2: "a day", 3: "a day", 4: "a month"}[steps]
    return f"How many{' good' if steps >= 3 else ''} {goods} are made in {span}?"


_KINDS: dict[str, Callable[[_Story, int, str], str]] = {
    "stock": _stock,
    "money": _money,
    "travel": _travel,
    "work": _work,
}
_ASIDES = (
    "{name} has done this for {count} years.",
    "{name}'s brother lives {count} km away.",
    "The street has the number {count}.",
    "{name} has {count} photos of this on the phone.",
)


@functools.lru_cache(maxsize=4)  # a collector creates many environments with the same problems
def _generate(seed: int, train: int, heldout: int, difficulties: tuple[int, ...]) -> tuple[Scenario, ...]:
    rng = random.Random(f"calculator {seed}")
    scenarios: dict[str, Scenario] = {}
    while len(scenarios) < train + heldout:
        split = "train" if len(scenarios) < train else "heldout"
        index = len(scenarios) if split == "train" else len(scenarios) - train
        kind, length = rng.choice(sorted(_KINDS)), rng.choice(difficulties)
        story, name = _Story(rng), rng.choice(NAMES)
        question = _KINDS[kind](story, length, name)
        if length >= 4:
            aside = rng.choice(_ASIDES).format(name=name, count=rng.randrange(3, 90))
            story.sentences.insert(rng.randrange(1, len(story.sentences)), aside)
        calculation = "; ".join(story.steps)
        if calculation not in scenarios and story.value >= 0:
            scenarios[calculation] = Scenario(
                id=f"calculator-{split}-{index}",
                input={
                    "question": " ".join([*story.sentences, question]),
                    "steps": story.steps,
                    "answer": format_number(story.value),
                },
                split=split,
                type=kind,
                difficulty=length,
            )
    return tuple(scenarios.values())
