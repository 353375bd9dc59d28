"""The games of TextArena: what is known of one without starting it, one that is played, and moves to try.

The package's games draw from Python's global generator of random numbers. Here each game has one of its own in place of
it: what else goes on in the process changes nothing. What a game allows is tried on a copy of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.environments.optional_packages import import_optional
from components.errors import Problem, ResourceError, SpecError
from components.specs.base import nearest

EXTRA = "textarena"
LEVELS = {
    "ultra-easy": 1, "mega-easy": 1, "super-easy": 1, "very-easy": 1, "tiny": 1, "quick": 1, "easy": 2, "small": 2,
    "short": 2, "": 3, "standard": 3, "medium": 4, "long": 4, "large": 4, "big": 4, "hard": 5, "hardcore": 5,
    "very-hard": 5, "huge": 5, "extreme": 5, "blind": 5,
}  # fmt: skip
"""Difficulty by what follows the version in a game's id."""
UNREPEATABLE = ("IteratedStagHunt-v0-randomized",)
"""It draws from the global generator of numpy."""
BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


def _squares(side: int) -> list[str]:
    return [f"{column}{row}" for row in range(1, side + 1) for column in "abcdefghij"[:side]]


def _steps(side: int) -> list[str]:
    """From each square of a board to those beside it in the next row, up and down."""
    found = []
    for one in _squares(side):
        for rows, columns in itertools.product((1, -1), (0, 1, -1)):
            column, row = ord(one[0]) + columns, int(one[1:]) + rows
            if ord("a") <= column < ord("a") + side and 1 <= row <= side:
                found.append(f"[{one}{chr(column)}{row}]")
    return found


def _numbers(pattern: str, *ranges: int) -> list[str]:
    return [pattern.format(*numbers) for numbers in itertools.product(*(range(one) for one in ranges))]


MOVES: dict[str, list[str]] = {
    "ConnectFour": _numbers("[col {}]", 15),
    "Nim": [f"[{pile} {number}]" for pile in range(5) for number in range(1, 12)],
    "KuhnPoker": ["[check]", "[bet]", "[call]", "[fold]"],
    "UltimateTicTacToe": _numbers("[{} {}]", 9, 9),
    "QuantumTicTacToe": _numbers("[{},{}]", 9, 9),
    "Breakthrough": _steps(10),
    "Checkers": [
        f"[{row} {column} {row + rows} {column + columns}]"
        for row, column in itertools.product(range(8), repeat=2)
        for rows, columns in ((2, 2), (2, -2), (-2, 2), (-2, -2), (1, 1), (1, -1), (-1, 1), (-1, -1))
        if 0 <= row + rows < 8 and 0 <= column + columns < 8
    ],
    "Chopsticks": [*_numbers("[attack {} {}]", 2, 2), *_numbers("[split {} {}]", 5, 5)],
    "GameOfPureStrategy": [f"[{card}]" for card in ("A", *range(2, 11), "J", "Q", "K")],
    "IteratedMatchingPennies": ["[heads]", "[tails]"],
    "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
    "IteratedTwoThirdsAverage": _numbers("[{}]", 101),
    "IteratedPrisonersDilemma": ["[cooperate]", "[defect]"],
    "PigDice": ["[roll]", "[hold]"],
}
"""Moves that may be possible, of games that do not show which are."""
SHOWN = ("TicTacToe", "ReverseTicTacToe", "WildTicTacToe", "SimpleTak", "Othello", "Chess")
"""Games that do."""


@dataclass(frozen=True)
class Kind:
    """What is known of a game without starting it."""

    id: str
    family: str
    players: int
    difficulty: int
    brackets: bool
    """Whether an action without brackets is put into some, as the package does."""
    module: str


class Game:
    """One game that is played."""

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.seed = kind, seed
        self.actions: list[tuple[int, str]] = []
        self.texts: dict[int, list[str]] = {player: [] for player in range(kind.players)}
        self.over = False
        self._dice = Dice(seed)
        arena = import_optional("textarena", EXTRA)
        import_optional(kind.module, EXTRA)  # first: the dice are for modules that are there
        with self._dice.thrown():
            self._env = arena.make(f"{kind.id}-raw")
            self._env.reset(num_players=kind.players, seed=seed)

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return int(self._env.state.current_player_id)

    @property
    def rewards(self) -> dict[int, float] | None:
        """By player; None while nobody has won or lost."""
        rewards = self._env.state.rewards
        return None if not self.over or rewards is None else dict(rewards)

    @property
    def reason(self) -> str:
        return str(self._env.state.game_info[0].get("reason", ""))

    def told(self, player: int) -> str:
        """What is new to a player."""
        state = self._env.state
        new = state.observations[player]
        state.observations[player] = []
        shown = [_said(state, player, *one) for one in new]
        text = "\n".join(one for one in shown if one)
        if text:
            self.texts[player].append(text)
        return text

    def play(self, action: str) -> bool:
        """Plays an action of whose turn it is. Returns whether it was a valid one."""
        player = self.player
        self.actions.append((player, action))
        before = self._env.state.error_count
        with self._dice.thrown():
            done, _ = self._env.step(self._bracketed(action))
        self.over = bool(done)
        return _valid(self._env.state, player, before)

    def allows(self, action: str) -> bool:
        """Whether it is a valid one now."""
        other = copy.deepcopy(self._env)
        player, before = self.player, other.state.error_count
        with Dice(self.seed).thrown():
            other.step(self._bracketed(action))
        return _valid(other.state, player, before)

    def candidates(self) -> list[str]:
        """Moves that may be possible for whose turn it is."""
        if self.kind.family in MOVES:
            return list(MOVES[self.kind.family])
        shown = self.texts[self.player][-1] if self.texts[self.player] else ""
        return list(dict.fromkeys(reversed(BRACKETED.findall(shown))))

    def _bracketed(self, action: str) -> str:
        return f"[{action}]" if self.kind.brackets and "[" not in action and "]" not in action else action


class Dice(random.Random):
    """Random numbers of one game. While they are `thrown`, the package's modules have them for their `random`."""

    Random = random.Random

    @contextlib.contextmanager
    def thrown(self) -> Iterator[None]:
        with _lock:
            modules = [
                module
                for name, module in list(sys.modules.items())
                if name.startswith("textarena") and getattr(module, "random", None) is random
            ]
            for module in modules:
                module.random = self  # type: ignore[attr-defined]
            try:
                yield
            finally:
                for module in modules:
                    module.random = random  # type: ignore[attr-defined]


_lock = threading.Lock()


@functools.cache
def game_of(name: str) -> Kind:
    """Raises SpecError for a game that there is not or that cannot be played, ResourceError where its data are
    missing."""
    import_optional("textarena", EXTRA)
    registry = import_optional("textarena.envs.registration", EXTRA).ENV_REGISTRY
    known = sorted(one for one in registry if f"{one}-raw" in registry)
    if name not in known:
        message = f"TextArena has no game {name!r}; it has {len(known)} (docs/environments/packages.md)"
        raise SpecError([Problem("environment.games", message, nearest(name, known))])
    spec = registry[name]
    module, _, _ = spec.entry_point.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    try:
        compile(source, found.origin, "exec")
    except SyntaxError as error:
        raise _refused(name, f"its code is not for this Python ({error.msg}); 3.12 reads it, or take another") from None
    if re.search(r"jury|OpenRouter", source):
        raise _refused(name, "it asks a language model on the internet; take another game")
    if name in UNREPEATABLE:
        raise _refused(name, "it cannot be repeated from a seed; take another game")
    if re.search(r"\bnltk\b|EnglishDictionary", source) and not _has_words():
        raise ResourceError(
            f"environment.games: {name} needs the word lists of NLTK, which are not here; "
            "python -m nltk.downloader words averaged_perceptron_tagger_eng, or take another game"
        )
    players = 1 if "SinglePlayerState" in source else 2 if "TwoPlayerState" in source else 0
    if not players:
        raise _refused(name, "it is for more than two players; take another game")
    family, _, variant = name.partition("-v0")
    wrappers = [one.__name__ for one in spec.default_wrappers or ()]
    level = LEVELS.get(variant.removeprefix("-"), 3)
    return Kind(name, family, players, level, "ActionFormattingWrapper" in wrappers, module)


def _refused(name: str, why: str) -> SpecError:
    return SpecError([Problem("environment.games", f"{name} is not played here: {why}")])


def _has_words() -> bool:
    find = import_optional("nltk", EXTRA).data.find
    try:
        find("corpora/words")
        find("taggers/averaged_perceptron_tagger_eng")
    except LookupError:
        return False
    return True


def _valid(state: Any, player: int, errors: int) -> bool:
    invalid = state.error_count > errors or state.game_info[player].get("invalid_move", False)
    return not invalid


def _said(state: Any, player: int, sender: int, text: str, kind: Any) -> str:
    """A message of a game as a player is shown it; empty for the player's own words."""
    if kind.name == "PLAYER_ACTION":
        return "" if sender == player else f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}"
    return str(text).strip()
