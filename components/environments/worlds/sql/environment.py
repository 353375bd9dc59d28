"""Questions over SQLite databases: the agent inspects the schema, tries queries, and submits the query that answers.

Each scenario has its own database, generated from a seed. A submitted query is right if it returns the rows of the
question's reference query, in the same order if the question asks for an order. It must do so on two databases: the one
that the agent sees, and a second one with the same schema and different data. So a query that fits by chance, or that
lists the rows that the agent saw, does not succeed.
"""

from __future__ import annotations

import functools
import random
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field

from components.aio import stoppable
from components.environments.protocol import Step
from components.environments.restorable import RestorableState
from components.environments.seeded import CountOrNone
from components.environments.tools import InvalidAction, call, tool
from components.environments.worlds.sql.database import Database, threads, write
from components.environments.worlds.sql.schemas import SCHEMAS
from components.environments.worlds.sql.schemas.base import Question
from components.errors import EnvironmentFailed
from components.specs.registered import registered
from components.trajectories.schema import Scenario

Name = Literal["shop", "library", "flights", "school"]

QUESTIONS = 2
"""Version of the generated questions, part of stage keys. 2: no held-out question occurs in training."""
HELDOUT_SHARE = 4
"""One of this many fillings of a question template is held out, if both splits use its schema."""
_CELL = 100
"""Maximum number of characters shown per value."""
_MOST_ROWS = 2000
"""Maximum number of compared rows of a submitted query; no reference query returns as many."""


@registered("environment.sql")
class Sql(RestorableState):
    """seed: generator seed. train, heldout: questions of the two splits. schemas, heldout_schemas: databases of the
    train and the held-out split (null: the same). rows: maximum number of shown rows of a result. text: maximum number
    of shown characters.

    Scenario types: filter, aggregate, join, group, dates, nested, rank. Difficulty: 1 to 5, see `Question`.
    """

    saved = ("submitted", "queries", "progress", "matches")

    system = (
        "Answer the question by one SQLite query. Look at the tables with schema, try queries with query, then submit "
        "the query. It must give exactly the columns that are asked for, in that order. You can submit once; the query "
        "is also run on other data."
    )

    def __init__(
        self,
        seed: int = 0,
        train: CountOrNone = 512,
        heldout: CountOrNone = 128,
        schemas: Annotated[tuple[Name, ...], Field(min_length=1)] = ("shop", "library", "flights", "school"),
        heldout_schemas: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None,
        rows: Annotated[int, Field(ge=1, le=200)] = 20,
        text: Annotated[int, Field(ge=200, le=20_000)] = 2000,
    ):
        self.rows, self.text = rows, text
        train_schemas = tuple(schemas)
        self._scenarios = _generate(seed, train, heldout, train_schemas, tuple(heldout_schemas or train_schemas))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._open: list[Database] = []
        self._stop = threading.Event()

    @staticmethod
    def key_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys, with the version of the generated questions."""
        return {**arguments, "questions": QUESTIONS}

    def begin(self, scenario: Scenario) -> str:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="espalier-sql-")
        for number in range(2):
            path = Path(self._folder.name) / f"{number}.db"
            write(path, SCHEMAS[scenario.input["schema"]], f"{scenario.input['database']} {number}")
            self._open.append(Database(path))
        self.submitted, self.queries = "", 0
        self.progress, self.matches = 0.0, [False, False]
        return str(scenario.input["question"])

    def close(self) -> None:
        self._open = []
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()
            self._folder = None

    async def step(self, action: dict[str, Any]) -> Step:  # type: ignore[override]  # the protocol allows both
        """Run the step in a thread, so that a query does not block other episodes; abort the query if cancelled."""
        self._stop = threading.Event()
        return await stoppable(functools.partial(super().step, action), self._stop, threads)

    @tool
    def schema(self) -> str:
        """the tables of the database"""
        return SCHEMAS[self.scenario.input["schema"]].tables.strip()

    @tool
    def query(self, sql: Annotated[str, "one SELECT of SQLite"]) -> str:
        """runs a query and shows the first rows"""
        names, rows = self._open[0].query(sql, self.rows + 1, self._stop)
        self.queries += 1
        lines = [" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows[: self.rows])]
        if len(rows) > self.rows:
            lines.append(f"[only the first {self.rows} rows are shown]")
        text = "\n".join(lines if rows else [*lines, "[no rows]"])
        return (
            text if len(text) <= self.text else f"{text[: self.text]}\n[... {len(text) - self.text} characters cut ...]"
        )

    @tool
    def submit(self, sql: Annotated[str, "the query that answers the question"]) -> str:
        """gives the answer and ends the task"""
        rows = self._open[0].query(sql, _MOST_ROWS, self._stop)[1]
        ordered = self.scenario.input["ordered"]
        for number, database in enumerate(self._open):
            expected = self._gold(database)
            with suppress(InvalidAction):  # a query may fail on the second database only
                rows = rows if number == 0 else database.query(sql, _MOST_ROWS, self._stop)[1]
                self.matches[number] = same(rows, expected, ordered=ordered)
            if number == 0:
                self.progress = _overlap(rows, expected)
        self.submitted, self.done = sql, True
        return "submitted"

    def _gold(self, database: Database) -> list[tuple[Any, ...]]:
        """Return the rows of the reference query."""
        try:
            return database.query(self.scenario.input["gold"], _MOST_ROWS, self._stop)[1]
        except InvalidAction as error:  # not the agent's fault
            raise EnvironmentFailed(f"the reference query of {self.scenario.id} failed: {error}") from error

    def outcome(self, answer: str) -> dict[str, Any]:
        return {
            "success": all(self.matches),
            "progress": self.progress,
            "submitted": bool(self.submitted),
            "matches_seen": self.matches[0],
            "matches_unseen": self.matches[1],
            "queries": self.queries,
        }

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return calls that show the schema, try the reference query and submit it."""
        gold = {"sql": scenario.input["gold"]}
        return [call("schema", {}, 0), call("query", gold, 1), call("submit", gold, 2)]


def same(actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], *, ordered: bool) -> bool:
    """Return True if two results have the same rows with the same counts and, if `ordered`, in the same order.

    Numbers are rounded to six decimals before the comparison.
    """
    first, second = [_normalized(row) for row in actual], [_normalized(row) for row in expected]
    return first == second if ordered else Counter(first) == Counter(second)


def _overlap(actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> float:
    """Return the Jaccard similarity of two multisets of rows: |intersection| / |union|; 1 if both are empty."""
    first, second = Counter(map(_normalized, actual)), Counter(map(_normalized, expected))
    either = (first | second).total()
    return (first & second).total() / either if either else 1.0


def _normalized(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row in a form that compares numbers by value: 2, 2.0 and 2.0000000001 are equal, 2 and '2' are not."""
    return tuple(("number", round(value, 6) + 0.0) if isinstance(value, int | float) else value for value in row)


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= _CELL else f"{text[:_CELL]}..."


@functools.lru_cache(maxsize=4)  # a collector creates many environments with the same questions
def _generate(
    seed: int, train: int, heldout: int, schemas: tuple[str, ...], heldout_schemas: tuple[str, ...]
) -> tuple[Scenario, ...]:
    rng = random.Random(f"sql {seed}")
    scenarios = []
    for split, count, names in (("train", train, schemas), ("heldout", heldout, heldout_schemas)):
        shuffled = {name: rng.sample(SCHEMAS[name].questions, len(SCHEMAS[name].questions)) for name in sorted(names)}
        for number in range(count):
            name = sorted(names)[number % len(names)]
            question = shuffled[name][number // len(names) % len(shuffled[name])]  # each question about equally often
            shared = name in schemas and name in heldout_schemas
            values = rng.choice(_fillings(seed, name, question, split if shared else ""))
            scenarios.append(
                Scenario(
                    id=f"sql-{split}-{number}",
                    input={
                        "schema": name,
                        "database": f"{seed} {split} {number}",
                        "question": question.text.format(**values),
                        "gold": question.sql.format(**values),
                        "ordered": question.ordered,
                    },
                    split=split,
                    type=question.type,
                    difficulty=question.difficulty,
                )
            )
    return tuple(scenarios)


@functools.lru_cache(maxsize=512)
def _fillings(seed: int, schema: str, question: Question, split: str) -> list[dict[str, Any]]:
    """Return the values of a question's placeholders that a split uses. split: empty for all of them."""
    used = {field for _, field, _, _ in Formatter().parse(question.text + question.sql) if field}
    choices = {key: values for key, values in SCHEMAS[schema].values.items() if key in used}
    fillings = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    if not split or len(fillings) == 1:
        return fillings
    random.Random(f"sql fillings {seed} {schema} {question.text}").shuffle(fillings)
    count = max(1, len(fillings) // HELDOUT_SHARE)
    return fillings[:count] if split == "heldout" else fillings[count:]
