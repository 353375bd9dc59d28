"""TextArena games: metadata, a running game, and candidate moves.

Games of the package use Python's global random generator. Here each game uses its own generator instead, so other code
in the process does not affect it. Valid moves are determined on a copy of the game.
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
from components.errors import ResourceError, SpecError
from components.specs.base import nearest

EXTRA = "textarena"
LEVELS = {
    "ultra-easy": 1, "mega-easy": 1, "super-easy": 1, "very-easy": 1, "tiny": 1, "quick": 1, "easy": 2, "small": 2,
    "short": 2, "": 3, "standard": 3, "medium": 4, "long": 4, "large": 4, "big": 4, "hard": 5, "hardcore": 5,
    "very-hard": 5, "huge": 5, "extreme": 5, "blind": 5,
}  # fmt: skip
"""Difficulty by the suffix after the version in a game id."""
UNREPEATABLE = ("IteratedStagHunt-v0-randomized",)
"""Games that use numpy's global random generator and are therefore not reproducible."""
BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


def _squares(side: int) -> list[str]:
    return [f"{column}{row}" for row in range(1, side + 1) for column in "abcdefghij"[:side]]


def _steps(side: int) -> list[str]:
    """Return the moves from each square to the adjacent squares of the next row, up and down."""
    moves = []
    for square in _squares(side):
        for rows, columns in itertools.product((1, -1), (0, 1, -1)):
            column, row = ord(square[0]) + columns, int(square[1:]) + rows
            if ord("a") <= column < ord("a") + side and 1 <= row <= side:
                moves.append(f"[{square}{chr(column)}{row}]")
    return moves


def _numbers(pattern: str, *ranges: int) -> list[str]:
    return [pattern.format(*numbers) for numbers in itertools.product(*(range(stop) for stop in ranges))]


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
"""Candidate moves, by family, of games that do not list the available moves."""
LISTED = ("TicTacToe", "ReverseTicTacToe", "WildTicTacToe", "SimpleTak", "Othello", "Chess")
"""Families of games that list the available moves in brackets."""


@dataclass(frozen=True)
class TextArenaKind:
    """Metadata of a game, known without starting it."""

    id: str
    family: str
    players: int
    difficulty: int
    brackets: bool
    """True if an action without brackets gets brackets, as in the package."""
    module: str


class TextArenaGame:
    """A running game."""

    def __init__(self, kind: TextArenaKind, seed: int):
        self.kind, self.seed = kind, seed
        self.actions: list[tuple[int, str]] = []
        self.texts: dict[int, list[str]] = {player: [] for player in range(kind.players)}
        self.over = False
        self._dice = Dice(seed)
        arena = import_optional("textarena", EXTRA)
        import_optional(kind.module, EXTRA)  # the generator replaces `random` only in loaded modules
        with self._dice.replace_random():
            self._env = arena.make(f"{kind.id}-raw")
            self._env.reset(num_players=kind.players, seed=seed)

    @property
    def player(self) -> int:
        """Return the player who moves next."""
        return int(self._env.state.current_player_id)

    @property
    def rewards(self) -> dict[int, float] | None:
        """Return the rewards by player; None until the game is over."""
        rewards = self._env.state.rewards
        return None if not self.over or rewards is None else dict(rewards)

    @property
    def reason(self) -> str:
        return str(self._env.state.game_info[0].get("reason", ""))

    def new_text(self, player: int) -> str:
        """Return the messages that a player has not yet seen."""
        state = self._env.state
        messages = state.observations[player]
        state.observations[player] = []
        texts = [_render(state, player, *message) for message in messages]
        text = "\n".join(text for text in texts if text)
        if text:
            self.texts[player].append(text)
        return text

    def play(self, action: str) -> bool:
        """Play an action of the current player; return True if it was valid."""
        player = self.player
        self.actions.append((player, action))
        before = self._env.state.error_count
        with self._dice.replace_random():
            done, _ = self._env.step(self._with_brackets(action))
        self.over = bool(done)
        return _valid(self._env.state, player, before)

    def allows(self, action: str) -> bool:
        """Return True if the action is valid now; the game does not change."""
        trial = copy.deepcopy(self._env)
        player, before = self.player, trial.state.error_count
        with Dice(self.seed).replace_random():
            trial.step(self._with_brackets(action))
        return _valid(trial.state, player, before)

    def candidates(self) -> list[str]:
        """Return candidate moves of the current player; some may be invalid."""
        if self.kind.family in MOVES:
            return list(MOVES[self.kind.family])
        text = self.texts[self.player][-1] if self.texts[self.player] else ""
        return list(dict.fromkeys(reversed(BRACKETED.findall(text))))

    def _with_brackets(self, action: str) -> str:
        return f"[{action}]" if self.kind.brackets and "[" not in action and "]" not in action else action


class Dice(random.Random):
    """Random generator of one game, which replaces `random` in the modules of the package while the game runs."""

    Random = random.Random

    @contextlib.contextmanager
    def replace_random(self) -> Iterator[None]:
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
def load_kind(name: str) -> TextArenaKind:
    """Return the metadata of a game.

    Raises SpecError if the game does not exist or is not supported, ResourceError if its data are missing.
    """
    import_optional("textarena", EXTRA)
    registry = import_optional("textarena.envs.registration", EXTRA).ENV_REGISTRY
    names = sorted(game for game in registry if f"{game}-raw" in registry)
    if name not in names:
        message = f"TextArena has no game {name!r}; it has {len(names)} (docs/reference/environments/packages.md)"
        raise SpecError.at("environment.games", message, nearest(name, names))
    spec = registry[name]
    module, _, _ = spec.entry_point.partition(":")
    module_spec = importlib.util.find_spec(module)
    assert module_spec is not None
    assert module_spec.origin is not None
    source = Path(module_spec.origin).read_text(encoding="utf-8")
    try:
        compile(source, module_spec.origin, "exec")
    except SyntaxError as error:
        reason = f"its code does not compile on this Python ({error.msg}); use Python 3.12 or another game"
        raise _unsupported(name, reason) from None
    if re.search(r"jury|OpenRouter", source):
        raise _unsupported(name, "it calls a language model on the internet; choose another game")
    if name in UNREPEATABLE:
        raise _unsupported(name, "it is not reproducible from a seed; choose another game")
    if re.search(r"\bnltk\b|EnglishDictionary", source) and not _has_words():
        raise ResourceError(
            f"environment.games: {name} needs the word lists of NLTK, which are not installed; run "
            "python -m nltk.downloader words averaged_perceptron_tagger_eng, or choose another game"
        )
    players = 1 if "SinglePlayerState" in source else 2 if "TwoPlayerState" in source else 0
    if not players:
        raise _unsupported(name, "it has more than two players; choose another game")
    family, _, variant = name.partition("-v0")
    wrappers = [wrapper.__name__ for wrapper in spec.default_wrappers or ()]
    level = LEVELS.get(variant.removeprefix("-"), 3)
    return TextArenaKind(name, family, players, level, "ActionFormattingWrapper" in wrappers, module)


def _unsupported(name: str, reason: str) -> SpecError:
    return SpecError.at("environment.games", f"{name} is not supported: {reason}")


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


def _render(state: Any, player: int, sender: int, text: str, kind: Any) -> str:
    """Return a message of the game as a player sees it; empty for the player's own actions."""
    if kind.name == "PLAYER_ACTION":
        return "" if sender == player else f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}"
    return str(text).strip()
