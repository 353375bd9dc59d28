"""Guess a number: the environment answers each guess with higher or lower.

Binary search finds every number within the allowed guesses. The outcome's `progress` is the share of the number's bits
that the answers have determined.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

from components.environments.seeded import GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: (10, 5), 2: (50, 7), 3: (100, 7), 4: (500, 9), 5: (1000, 10)}
"""Size of the range and allowed guesses, by difficulty. Binary search needs 4, 6, 7, 9 and 10."""


@registered("environment.guess")
class Guess(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation.

    Scenario types: spare (one guess more than binary search needs), tight (no more). Difficulty: see LEVELS.
    """

    saved = ("low", "high", "used", "guessed")

    name = "guess"
    system = "Find the number. Each guess is answered with higher or lower. Give the number alone."

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        numbers, guesses = LEVELS[difficulty]
        low = rng.randrange(1, 1001)
        task = {"low": low, "high": low + numbers - 1, "number": low + rng.randrange(numbers), "guesses": guesses}
        return "spare" if 2 ** (guesses - 1) > numbers else "tight", task

    def begin(self, scenario: Scenario) -> str:
        self.low, self.high = scenario.input["low"], scenario.input["high"]
        self.used, self.guessed = 0, False
        return f"It is one of {self.low} to {self.high}. You have {scenario.input['guesses']} guesses."

    def act(self, action: str) -> str:
        match = re.fullmatch(r"(?:guess )?([0-9]{1,9})", action.lower())
        if not match:
            raise InvalidAction("a guess is a whole number")
        guess, number = int(match[1]), self.scenario.input["number"]
        first, last = self.scenario.input["low"], self.scenario.input["high"]
        if not first <= guess <= last:
            raise InvalidAction(f"the number is one of {first} to {last}")
        self.used += 1
        remaining = self.scenario.input["guesses"] - self.used
        self.guessed = guess == number
        self.done = self.guessed or remaining == 0
        if self.guessed:
            self.low = self.high = number
            return f"{guess} is right"
        if guess < number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"{'higher' if guess < number else 'lower'}, {remaining} guesses left"

    def legal_actions(self) -> list[str]:
        return [str(number) for number in range(self.scenario.input["low"], self.scenario.input["high"] + 1)]

    def outcome(self, answer: str) -> dict[str, Any]:
        numbers = self.scenario.input["high"] - self.scenario.input["low"] + 1
        unsettled = 0.0 if self.guessed else math.log(self.high - self.low + 2) / math.log(numbers + 1)
        return {"success": self.guessed, "progress": 1 - unsettled, "guesses": self.used}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        low, high, number = (scenario.input[name] for name in ("low", "high", "number"))
        guesses = [(low + high) // 2]
        while guesses[-1] != number:
            low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
            guesses.append((low + high) // 2)
        return acts([str(guess) for guess in guesses])
