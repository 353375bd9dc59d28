"""Generators of puzzles that need a few lines of Python.

Each function generates one puzzle of a level from 1 to 3: the question, code that prints the answer, and the answer.
Where possible, the answer is computed by a different method than in the code; tests compare the two.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any


@dataclass(frozen=True)
class Puzzle:
    """Puzzle with its solution."""

    question: str
    code: str
    """Program that prints the answer."""
    answer: int | str | list[Any]


def numbers(rng: random.Random, level: int) -> Puzzle:
    """Generate a puzzle about arithmetic with large integers."""
    if level == 1:
        boxes, box_size, price = (rng.randrange(10**6, 10**9) for _ in range(3))
        return Puzzle(
            f"A machine makes {boxes} boxes with {box_size} parts in each. Every part costs {price} cents. How many "
            "cents do all parts cost?",
            f"print({boxes} * {box_size} * {price})",
            boxes * box_size * price,
        )
    if level == 2:
        base, exponent, modulus = rng.randrange(10**6), rng.randrange(10**9, 10**12), rng.randrange(10**5, 10**6)
        return Puzzle(
            f"What is the remainder when {base} to the power of {exponent} is divided by {modulus}?",
            f"print(pow({base}, {exponent}, {modulus}))",
            _power(base, exponent, modulus),
        )
    n, digit = rng.randrange(150, 900), rng.randrange(10)
    return Puzzle(
        f"How often does the digit {digit} occur in the decimal form of {n}! (the factorial of {n})?",
        f"from math import factorial\nprint(str(factorial({n})).count('{digit}'))",
        _digits(math.prod(range(1, n + 1))).count(digit),
    )


def dates(rng: random.Random, level: int) -> Puzzle:
    """Generate a puzzle about the calendar."""
    begin = date(rng.randrange(1800, 2000), rng.randrange(1, 13), rng.randrange(1, 29))
    if level == 1:
        end = begin + timedelta(days=rng.randrange(5_000, 60_000))
        return Puzzle(
            f"How many days after {begin} is {end}?",
            f"from datetime import date\nprint((date.fromisoformat('{end}') - date.fromisoformat('{begin}')).days)",
            end.toordinal() - begin.toordinal(),
        )
    if level == 2:
        days = rng.randrange(10_000, 80_000)
        end = date.fromordinal(begin.toordinal() + days)
        return Puzzle(
            f"Which day of the week (in English) is it {days} days after {begin}, and which date? Answer as a list of "
            "the two, with the date as YYYY-MM-DD.",
            f"from datetime import date, timedelta\nday = date.fromisoformat('{begin}') + timedelta(days={days})\n"
            f"print([day.strftime('%A'), day.isoformat()])",
            [_WEEKDAYS[end.toordinal() % 7], str(end)],
        )
    end, month_day, weekday = (
        begin.replace(year=begin.year + rng.randrange(20, 90)),
        rng.randrange(1, 29),
        rng.randrange(7),
    )
    return Puzzle(
        f"From {begin} to {end}, both included, how often does the {month_day}. of a month fall on a "
        f"{_WEEKDAYS[weekday]}?",
        f"from datetime import date, timedelta\nday, end, found = date.fromisoformat('{begin}'), "
        f"date.fromisoformat('{end}'), 0\nwhile day <= end:\n    found += day.day == {month_day} and "
        f"day.strftime('%A') == '{_WEEKDAYS[weekday]}'\n    day += timedelta(days=1)\nprint(found)",
        sum(
            begin <= day <= end and day.toordinal() % 7 == weekday
            for year in range(begin.year, end.year + 1)
            for day in (date(year, month, month_day) for month in range(1, 13))
        ),
    )


def text(rng: random.Random, level: int) -> Puzzle:
    """Generate a puzzle about words and letters."""
    words = ["".join(rng.choice("aeioulnrst") for _ in range(rng.randrange(3, 9))) for _ in range(20 + 10 * level)]
    if level == 1:
        letter = rng.choice("aeioulnrst")
        return Puzzle(
            f"How often does the letter {letter} occur in this text? {' '.join(words)}",
            f"print({' '.join(words)!r}.count('{letter}'))",
            sum(word.count(letter) for word in words),
        )
    if level == 2:
        vowels = rng.randrange(2, 4)
        matches = sorted({word for word in words if sum(letter in "aeiou" for letter in word) == vowels})
        return Puzzle(
            f"Which words of this text have exactly {vowels} vowels (a, e, i, o, u; each counts as often as it "
            f"occurs)? Answer as a list in alphabetical order, each word once. {' '.join(words)}",
            f"import re\nwords = set({' '.join(words)!r}.split())\n"
            f"print(sorted(word for word in words if len(re.findall('[aeiou]', word)) == {vowels}))",
            matches,
        )
    shift, size = rng.randrange(2, 25), rng.randrange(2, 4)
    coded = "".join(chr((ord(letter) - 97 + shift) % 26 + 97) for letter in "".join(words))
    pairs = Counter(coded[at : at + size] for at in range(len(coded) - size + 1))
    most = max(pairs.values())
    best = min(piece for piece, count in pairs.items() if count == most)
    return Puzzle(
        f"Replace every letter of this word by the one {shift} places later in the alphabet (after z comes a). Which "
        f"group of {size} letters in a row occurs most often in the result, groups that overlap counted? Of equal "
        f"ones, the first in alphabetical order. {''.join(words)}",
        f"from collections import Counter\nfrom string import ascii_lowercase as abc\n"
        f"coded = {''.join(words)!r}.translate(str.maketrans(abc, abc[{shift}:] + abc[:{shift}]))\n"
        f"found = Counter(''.join(group) for group in zip(*(coded[at:] for at in range({size}))))\n"
        f"print(sorted(found.items(), key=lambda one: (-one[1], one[0]))[0][0])",
        best,
    )


def simulation(rng: random.Random, level: int) -> Puzzle:
    """Generate a puzzle that simulates rules over many steps."""
    if level == 1:
        start, rate, yearly, years = (
            rng.randrange(1000, 90_000),
            rng.randrange(2, 9),
            rng.randrange(50, 900),
            rng.randrange(15, 60),
        )
        amount = start
        for _ in range(years):
            amount = amount + amount * rate // 100 - yearly
        return Puzzle(
            f"A lake holds {start} fish. Each year their number first grows by {rate} percent (fractions of a fish "
            f"are dropped) and then {yearly} are caught; a negative number is calculated on in the same way, rounded "
            f"down. What is the number after {years} years?",
            f"fish = {start}\nfor _ in range({years}):\n    fish += fish * {rate} // 100\n    fish -= "
            f"{yearly}\nprint(fish)",
            amount,
        )
    if level == 2:
        people, step = rng.randrange(40, 400), rng.randrange(3, 60)
        survivor = 0
        for count in range(2, people + 1):  # Josephus' recurrence
            survivor = (survivor + step) % count
        return Puzzle(
            f"{people} people, numbered from 1, stand in a circle. Beginning with number 1, they count off, and every "
            f"{step}th leaves, until one is left; the count goes on with the next in the circle. Which number is left?",
            f"from collections import deque\ncircle = deque(range(1, {people} + 1))\nwhile len(circle) > 1:\n"
            f"    circle.rotate(-({step} - 1))\n    circle.popleft()\nprint(circle[0])",
            survivor + 1,
        )
    rule, cells, rounds = rng.choice((30, 45, 90, 110, 150)), rng.randrange(60, 140), rng.randrange(40, 120)
    alive = sorted(rng.sample(range(cells), rng.randrange(3, 9)))
    row = [at in alive for at in range(cells)]
    for _ in range(rounds):
        row = [bool(rule >> (4 * row[at - 1] + 2 * row[at] + row[(at + 1) % cells]) & 1) for at in range(cells)]
    return Puzzle(
        f"{cells} cells, numbered from 0, form a ring. Alive at the start: {alive}. In each round all cells change at "
        "once: read left neighbour, cell, right neighbour as a binary number (1 is alive) from 0 to 7; the cell is "
        f"then alive if that bit of {rule} is set, bit 0 being the lowest. How many cells are alive after {rounds} "
        "rounds?",
        f"state = set({alive})\nfor _ in range({rounds}):\n    state = "
        f"{{cell for cell in range({cells}) if {rule} >> int("
        f"''.join(str(int((cell + by) % {cells} in state)) for by in (-1, 0, 1)), 2) & 1}}\nprint(len(state))",
        sum(row),
    )


def counting(rng: random.Random, level: int) -> Puzzle:
    """Generate a puzzle that counts by enumeration."""
    if level == 1:
        low, span = rng.randrange(1000, 50_000), rng.randrange(1000, 9000)
        divisor, second_divisor = rng.sample((3, 4, 7, 9, 11, 13, 17), 2)
        high, both = low + span, math.lcm(divisor, second_divisor)
        return Puzzle(
            f"How many whole numbers from {low} to {high}, both included, can be divided by {divisor} or by "
            f"{second_divisor} but not by both?",
            f"print(sum((n % {divisor} == 0) != (n % {second_divisor} == 0) for n in range({low}, {high} + 1)))",
            sum(sign * (high // n - (low - 1) // n) for sign, n in ((1, divisor), (1, second_divisor), (-2, both))),
        )
    if level == 2:
        values, size, total = sorted(rng.sample(range(1, 60), 14)), rng.randrange(3, 6), rng.randrange(60, 150)
        ways = Counter({(0, 0): 1})
        for value in values:
            for (used, sum_), count in list(ways.items()):
                ways[used + 1, sum_ + value] += count
        return Puzzle(
            f"In how many ways can {size} different numbers of {values} be chosen so that their sum is at "
            f"most {total}?",
            f"from itertools import combinations\nprint(sum(sum(chosen) <= {total} for chosen in "
            f"combinations({values}, {size})))",
            sum(count for (used, sum_), count in ways.items() if used == size and sum_ <= total),
        )
    rows, columns = rng.randrange(7, 11), rng.randrange(7, 11)
    cells = list(itertools.product(range(rows), range(columns)))[1:-1]
    blocked = sorted(rng.sample(cells, rng.randrange(4, 12)))
    path_counts = [[0] * columns for _ in range(rows)]
    for row_index in range(rows):
        for column_index in range(columns):
            if (row_index, column_index) not in blocked:
                above = path_counts[row_index - 1][column_index] if row_index else 0
                left = path_counts[row_index][column_index - 1] if column_index else 0
                path_counts[row_index][column_index] = 1 if row_index == column_index == 0 else above + left
    return Puzzle(
        f"A grid has {rows} rows and {columns} columns, both numbered from 0. A robot walks from (0, 0) to "
        f"({rows - 1}, {columns - 1}), each step to the next row or to the next column, and may not enter these cells "
        f"(row, column): {', '.join(map(str, blocked))}. How many different ways are there?",
        f"from functools import cache\nblocked = {set(blocked)}\n@cache\ndef ways(row, column):\n"
        f"    if (row, column) in blocked or row >= {rows} or column >= {columns}:\n        return 0\n"
        f"    if (row, column) == ({rows - 1}, {columns - 1}):\n        return 1\n"
        f"    return ways(row + 1, column) + ways(row, column + 1)\nprint(ways(0, 0))",
        path_counts[-1][-1],
    )


KINDS: dict[str, Callable[[random.Random, int], Puzzle]] = {
    "counting": counting,
    "dates": dates,
    "numbers": numbers,
    "simulation": simulation,
    "text": text,
}
LEVELS = (1, 2, 3)

_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
"""Names of the weekdays by proleptic ordinal modulo 7."""


def _power(base: int, exponent: int, modulus: int) -> int:
    """Return base ** exponent % modulus, by repeated squaring."""
    value = 1
    for bit in f"{exponent:b}":
        value = value * value * (base if bit == "1" else 1) % modulus
    return value


def _digits(value: int) -> list[int]:
    digits = []
    while value:
        value, digit = divmod(value, 10)
        digits.append(digit)
    return digits
