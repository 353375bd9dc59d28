"""SQL: read-only databases, and answers that must also hold on a second database."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from components.environments.tools import InvalidAction, call
from components.environments.worlds.sql import Sql
from components.environments.worlds.sql.database import Database, write
from components.environments.worlds.sql.environment import same
from components.environments.worlds.sql.schemas import SCHEMAS
from tests.environments import checks


@pytest.fixture(scope="module")
def questions():
    environment = Sql()
    yield environment
    environment.close()


@pytest.fixture
def shop(tmp_path):
    write(tmp_path / "shop.db", SCHEMAS["shop"], "seed")
    return Database(tmp_path / "shop.db")


def test_the_gold_query_solves_and_returns_rows(subtests):
    for seed in [0, 5]:
        with subtests.test(seed=seed):
            questions = Sql(seed, train=104, heldout=0)
            empty = 0
            for scenario in questions.scenarios("train"):
                steps = checks.play(questions, scenario, questions.solve(scenario))
                assert steps[-1].info == {
                    "success": True,
                    "progress": 1.0,
                    "submitted": True,
                    "matches_seen": True,
                    "matches_unseen": True,
                    "queries": 1,
                    "invalid_actions": 0,
                }
                shown = steps[1].observation[0]["content"]
                assert "shown]" not in shown or scenario.type in ("filter", "join", "nested", "dates")
                empty += "[no rows]" in shown or shown.splitlines()[1] in ("NULL", "0")
            questions.close()
            assert empty <= 4


def test_requested_orders_have_no_ties():
    """The reference result does not depend on the storage order of the rows."""
    questions = Sql(train=400, heldout=0)
    for scenario in [scenario for scenario in questions.scenarios("train") if scenario.input["ordered"]][::4]:
        questions.reset(scenario)
        gold = scenario.input["gold"]
        before = questions._open[0].query(gold, 2000)[1]
        with sqlite3.connect(":memory:") as reversed_copy:
            source = sqlite3.connect(f"{questions._folder.name}/0.db")
            source.backup(reversed_copy)
            source.close()
            for table in ("orders", "items", "loans", "bookings", "exams"):
                if reversed_copy.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                    rows = reversed_copy.execute(f"SELECT * FROM {table} ORDER BY rowid DESC").fetchall()
                    reversed_copy.execute(f"CREATE TABLE turned AS SELECT * FROM {table} LIMIT 0")
                    reversed_copy.executemany(f"INSERT INTO turned VALUES ({', '.join('?' * len(rows[0]))})", rows)
                    reversed_copy.execute(f"DROP TABLE {table}")
                    reversed_copy.execute(f"ALTER TABLE turned RENAME TO {table}")
            assert same(reversed_copy.execute(gold).fetchall(), before, ordered=True), gold
        reversed_copy.close()
    questions.close()


def test_splits_types_and_difficulties(questions):
    for split in checks.SPLITS:
        scenarios = questions.scenarios(split)
        assert {scenario.type for scenario in scenarios} == {
            "filter",
            "aggregate",
            "join",
            "group",
            "dates",
            "nested",
            "rank",
        }
        assert {scenario.difficulty for scenario in scenarios} == {1, 2, 3, 4, 5}
        assert {scenario.input["schema"] for scenario in scenarios} == set(SCHEMAS)
    lengths = {
        level: [
            len(scenario.input["gold"]) for scenario in questions.scenarios("train") if scenario.difficulty == level
        ]
        for level in range(1, 6)
    }
    means = [sum(level_lengths) / len(level_lengths) for level_lengths in lengths.values()]
    assert means == sorted(means)
    held_out_school = Sql(train=9, heldout=9, schemas=("shop", "library", "flights"), heldout_schemas=("school",))
    assert Counter(scenario.input["schema"] for scenario in held_out_school.scenarios("train")) == {
        "shop": 3,
        "library": 3,
        "flights": 3,
    }
    assert {scenario.input["schema"] for scenario in held_out_school.scenarios("heldout")} == {"school"}


def guess(draw: random.Random, messages: list[dict]) -> dict:
    """Return a simple random query of existing tables and columns."""
    if len(messages) == 2:
        return call("schema", {})
    lines = [line for line in messages[3]["content"].split(");") if "CREATE TABLE" in line]
    line = draw.choice(lines)
    table = line.split("CREATE TABLE ")[1].split()[0]
    columns = [column.split()[0] for column in line.split("(", 1)[1].split(", ") if column.strip()]
    template = draw.choice(["{c}", "{c}, {d}", "COUNT(*)", "AVG({c})", "DISTINCT {c}"])
    sql = f"SELECT {template} FROM {table}".format(c=draw.choice(columns), d=draw.choice(columns))
    return call("submit", {"sql": sql})


def test_random_queries_rarely_succeed(questions):
    assert checks.success_of(questions, questions.scenarios("train")[:150], guess, turns=2) < 0.02


def test_listing_the_seen_rows_is_not_enough(questions):
    """A query that lists literal rows matches only the database that the agent sees."""
    scenario = next(scenario for scenario in questions.scenarios("train") if scenario.type == "join")
    questions.reset(scenario)
    rows = questions._open[0].query(scenario.input["gold"], 100)[1]
    constants = "VALUES " + ", ".join(f"({', '.join(repr(value) for value in row)})" for row in rows)
    info = checks.play(questions, scenario, [call("submit", {"sql": constants})])[-1].info
    assert (info["matches_seen"], info["progress"], info["matches_unseen"], info["success"]) == (
        True,
        1.0,
        False,
        False,
    )


def test_order_and_columns_count_where_they_should():
    rows = [("a", 1), ("b", 2), ("b", 2)]
    assert same(rows, rows[::-1], ordered=False)
    assert not same(rows, rows[::-1], ordered=True)
    assert not same(rows, rows[:2], ordered=False)
    assert not same(rows, [(*row, 1) for row in rows], ordered=False)
    assert same([(2, None)], [(2.0000000001, None)], ordered=True)
    assert not same([("2",)], [(2,)], ordered=True)
    assert not same([(0.333,)], [(0.33,)], ordered=True)


def test_one_submission_counts_and_a_broken_query_is_none(questions):
    scenario = questions.scenarios("train")[0]
    right = call("submit", {"sql": scenario.input["gold"]})
    assert not checks.play(questions, scenario, [call("submit", {"sql": "SELECT 1"}), right])[-1].info["success"]
    info = checks.play(questions, scenario, [call("submit", {"sql": "SELECT number"}), right])[-1].info
    assert (info["success"], info["invalid_actions"]) == (True, 1)


def test_only_reading_is_allowed(shop, tmp_path, subtests):
    before = (tmp_path / "shop.db").read_bytes()
    for sql in [
        "INSERT INTO customers VALUES (99, 'x', 'y', 'z')", "DELETE FROM orders", "UPDATE items SET quantity = 0",
        "DROP TABLE orders", "CREATE TABLE t (a)", "CREATE TEMP TABLE t (a)", "CREATE TEMP VIEW v AS SELECT 1",
        "VACUUM", "VACUUM INTO '/tmp/espalier-stolen.db'", "ATTACH '/tmp/espalier-stolen.db' AS other", "DETACH main",
        "PRAGMA query_only = OFF", "PRAGMA table_info(orders)", "SELECT * FROM pragma_database_list", "BEGIN", "COMMIT",
        "SELECT load_extension('x')", "SELECT random()", "SELECT CURRENT_TIMESTAMP", "SELECT readfile('/etc/passwd')",
        "REINDEX", "ANALYZE", "EXPLAIN DELETE FROM orders", "SELECT 1; DROP TABLE orders", "", "-- nothing",
        "\x00", "\ud83d", "SELECT 1" + " " * 4000, "WITH x AS (SELECT 1) DELETE FROM orders",
        "SELECT writefile('/tmp/espalier-stolen.db', 1)",
        "INSERT INTO sqlite_master VALUES (1,2,3,4,5)", "SELECT (" * 200 + "1" + ")" * 200,
    ]:  # fmt: skip
        with subtests.test(sql=sql[:60]):
            with pytest.raises(InvalidAction):
                shop.query(sql, 10)
            assert (tmp_path / "shop.db").read_bytes() == before
            assert os.listdir(tmp_path) == ["shop.db"]
            assert not Path("/tmp/espalier-stolen.db").exists()
            assert shop.query("SELECT COUNT(*) FROM customers", 10) == (["COUNT(*)"], [(36,)])


def test_resources_of_a_query_are_bounded(shop, subtests):
    for sql in [
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM items a, items b, items c, items d",
        "SELECT zeroblob(1000000000)",
        "WITH RECURSIVE n(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM n) SELECT MAX(x) FROM n",
        "SELECT replace(hex(zeroblob(1500)), '0', hex(zeroblob(1500)))",
        "SELECT group_concat(a.name || b.name || c.name) FROM customers a, customers b, customers c",
        f"SELECT '{'a' * 60}' LIKE '{'%a' * 60}'",
        "SELECT a.name, b.name FROM items x, items y, items z, customers a, customers b ORDER BY random()",
    ]:
        with subtests.test(sql=sql):
            began = time.process_time()
            with pytest.raises(InvalidAction):
                shop.query(sql, 10)
            assert time.process_time() - began < 30


def test_a_query_has_no_clock(shop, subtests):
    """Functions that depend on the time or the time zone are refused."""
    for sql in [
        "SELECT date('now')", "SELECT datetime('NOW', '+1 day')", "SELECT strftime('%Y', 'now')", "SELECT date()",
        "SELECT julianday('no' || 'w')", "SELECT strftime('%s')", "SELECT time(x'6e6f77')", "SELECT unixepoch()",
        "SELECT date('now' || char(0))", "SELECT datetime('2024-01-02', 'localtime')", "SELECT CURRENT_DATE",
        "SELECT datetime('2024-01-02', 'utc')", "SELECT COUNT(*) FROM orders WHERE date(day) < date('now')",
    ]:  # fmt: skip
        with (
            subtests.test(sql=sql),
            pytest.raises(InvalidAction, match=r"take written dates, not now|without functions of time"),
        ):
            shop.query(sql, 10)


def test_date_functions_with_literal_dates_agree_with_sqlite(shop):
    sql = "SELECT date('2024-01-31', '+1 month'), strftime('%Y-%m', '2024-05-06'), julianday('2000-01-01 12:00')"
    assert shop.query(sql, 1)[1] == [("2024-03-02", "2024-05", 2451545.0)]
    assert shop.query("SELECT date(NULL), date('no date')", 1)[1] == [(None, None)]


def test_results_are_bounded_text(questions):
    scenario = next(scenario for scenario in questions.scenarios("train") if scenario.input["schema"] == "shop")

    def observation_of(sql: str) -> str:
        return checks.play(questions, scenario, [call("query", {"sql": sql})])[0].observation[0]["content"]

    assert observation_of("SELECT id FROM orders").endswith("\n[only the first 20 rows are shown]")
    assert observation_of("SELECT id FROM orders WHERE id < 0") == "id\n[no rows]"
    assert observation_of("SELECT NULL AS a, 1.5 AS b, x'00ff' AS c") == "a | b | c\nNULL | 1.5 | x'00ff'"
    assert observation_of("SELECT hex(zeroblob(500)) AS a") == "a\n" + "0" * 100 + "..."
    wide = ", ".join(["hex(zeroblob(90))"] * 90)
    assert len(observation_of(f"SELECT {wide}")) < 2100
    assert observation_of("SELECT length(printf('%1000000000d', 1)) AS a") == "a\nNULL"  # too long to be made
    assert observation_of("SELECT CAST(x'ff61' AS TEXT) AS a") == "a\n�a"
    assert observation_of("SELECT number FROM orders") == "error: no such column: number"
    assert observation_of("DROP TABLE orders").startswith("error: not authorized: only SELECT is allowed")


def test_closing_leaves_nothing():
    questions = Sql(train=3, heldout=3)
    questions.close()
    questions.reset(questions.scenarios("train")[0])
    folder = Path(questions._folder.name)
    assert len(list(folder.iterdir())) == 2
    questions.close()
    questions.close()
    assert not folder.exists()


def test_no_held_out_question_occurs_in_training():
    environment = Sql()
    questions = {
        split: {(scenario.input["schema"], scenario.input["question"]) for scenario in environment.scenarios(split)}
        for split in ("train", "heldout")
    }
    assert len(questions["heldout"]) > 60
    assert not questions["train"] & questions["heldout"]
