"""Questions over SQLite databases: the agent looks at the schema, tries queries, and submits the one that answers.

Each scenario has a database of its own, generated from a seed. A submitted query is right when it gives the rows of the
question's own query, in the order where the question asks for one, and it has to on two databases: the one that the
agent sees and a second of the same schema with other data. So a query that happens to fit, or that merely lists what
the agent saw, is not enough.
"""

from __future__ import annotations

import functools
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.protocol import Step
from components.environments.scenario_counts import CountOrNone
from components.environments.tools import Invalid, ToolEnvironment, call, tool
from components.environments.worlds.sql.database import Database, threads, write
from components.environments.worlds.sql.schemas import SCHEMAS
from components.errors import EnvironmentFailed
from components.sandbox.bubblewrap import stoppable
from components.specs.registered import registered
from components.trajectories.schema import Scenario

Name = Literal["shop", "library", "flights", "school"]

_CELL = 100
"""Characters of a value that are shown."""
_MOST_ROWS = 2000
"""Rows of a submitted query that are compared; no question has as many."""


@registered("environment.sql")
class Sql(ToolEnvironment):
    """seed: of the generator. train, heldout: questions of the two splits. schemas, heldout_schemas: the databases of
    the train split and of the other one (the same where it is null). rows: that are shown of a result. text: characters
    of it.

    Scenario types: filter, aggregate, join, group, dates, nested, rank. Difficulty: 1 to 5, see `Question`.
    """

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
        given = tuple(schemas)
        self._scenarios = _generate(seed, train, heldout, given, tuple(heldout_schemas or given))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._open: list[Database] = []
        self._stop = threading.Event()

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

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
        """Act in a thread, so that other episodes go on while a query runs; if cancelled, end the query."""
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
        shown = "\n".join(lines if rows else [*lines, "[no rows]"])
        return (
            shown
            if len(shown) <= self.text
            else f"{shown[: self.text]}\n[... {len(shown) - self.text} characters cut ...]"
        )

    @tool
    def submit(self, sql: Annotated[str, "the query that answers the question"]) -> str:
        """gives the answer and ends the task"""
        found = self._open[0].query(sql, _MOST_ROWS, self._stop)[1]
        ordered = self.scenario.input["ordered"]
        for number, database in enumerate(self._open):
            right = self._gold(database)
            with suppress(Invalid):  # what only the other data shows
                found = found if number == 0 else database.query(sql, _MOST_ROWS, self._stop)[1]
                self.matches[number] = same(found, right, ordered=ordered)
            if number == 0:
                self.progress = _overlap(found, right)
        self.submitted, self.done = sql, True
        return "submitted"

    def _gold(self, database: Database) -> list[tuple[Any, ...]]:
        """Return the rows of the question's own query."""
        try:
            return database.query(self.scenario.input["gold"], _MOST_ROWS, self._stop)[1]
        except Invalid as error:  # no fault of the agent
            raise EnvironmentFailed(f"the query that answers {self.scenario.id} failed: {error}") from error

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
        """Looks at the tables, tries the question's own query and submits it."""
        gold = {"sql": scenario.input["gold"]}
        return [call("schema", {}, 0), call("query", gold, 1), call("submit", gold, 2)]

    def save(self) -> dict[str, Any]:
        kept = ("submitted", "queries", "progress", "matches", "invalid_actions", "done")
        return {name: getattr(self, name) for name in kept}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        self.reset(scenario)
        for name, value in state.items():
            setattr(self, name, value)


def same(found: list[tuple[Any, ...]], right: list[tuple[Any, ...]], *, ordered: bool) -> bool:
    """Whether two results are the same rows, as often, and in the same order where that counts. Numbers are equal when
    they are within a millionth."""
    one, two = [_plain(row) for row in found], [_plain(row) for row in right]
    return one == two if ordered else Counter(one) == Counter(two)


def _overlap(found: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> float:
    """Rows in both results, of those in either."""
    one, two = Counter(map(_plain, found)), Counter(map(_plain, right))
    either = (one | two).total()
    return (one & two).total() / either if either else 1.0


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row whose numbers can be compared: 2 and 2.0 and 2.0000000001 are equal, 2 and '2' are not."""
    return tuple(("number", round(one, 6) + 0.0) if isinstance(one, int | float) else one for one in row)


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= _CELL else f"{text[:_CELL]}..."


@functools.lru_cache(maxsize=4)  # a collector makes many environments of the same questions
def _generate(
    seed: int, train: int, heldout: int, schemas: tuple[str, ...], heldout_schemas: tuple[str, ...]
) -> tuple[Scenario, ...]:
    rng = random.Random(f"sql {seed}")
    found = []
    for split, count, offered in (("train", train, schemas), ("heldout", heldout, heldout_schemas)):
        asked = {name: rng.sample(SCHEMAS[name].questions, len(SCHEMAS[name].questions)) for name in sorted(offered)}
        for number in range(count):
            name = sorted(offered)[number % len(offered)]
            question = asked[name][number // len(offered) % len(asked[name])]  # each about equally often
            values = {key: rng.choice(choices) for key, choices in SCHEMAS[name].values.items()}
            found.append(
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
    return tuple(found)
