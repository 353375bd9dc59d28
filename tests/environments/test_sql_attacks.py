"""SQL attacks that try to exhaust memory, CPU or disk."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from components.environments.tools import call
from components.environments.worlds.sql import Sql
from components.errors import EnvironmentFailed
from components.json_process import JsonProgram
from components.rollout.agent import ask

pytestmark = pytest.mark.security

BOMBS = {
    "zeroblob in a sorted join": "SELECT zeroblob(1900) z FROM items a, items b, items c ORDER BY z || a.rowid",
    "distinct": "SELECT COUNT(*) FROM (SELECT DISTINCT hex(zeroblob(1900)) || a.rowid || '.' || b.rowid FROM items a, "
    "items b, items c)",
    "union": "SELECT hex(zeroblob(1900)) || a.rowid || b.rowid FROM items a, items b UNION SELECT hex(zeroblob(1900)) "
    "|| c.rowid || '.' || d.rowid FROM items c, items d ORDER BY 1 LIMIT 1",
    "recursion that keeps": "WITH RECURSIVE n(x, z) AS (SELECT 1, printf('%.*c', 3900, 'x') UNION SELECT x + 1, z || x "
    "FROM n) SELECT MAX(x) FROM n",
    "recursion": "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
    "materialised view": "WITH big AS MATERIALIZED (SELECT hex(zeroblob(1900)) || a.rowid AS z FROM items a, items b, "
    "items c) SELECT COUNT(*) FROM big x, big y WHERE x.z = y.z",
    "group": "SELECT COUNT(*) FROM (SELECT hex(zeroblob(1900)) || a.rowid || '.' || b.rowid AS g, COUNT(*) FROM items "
    "a, items b, items c GROUP BY g)",
    "window": "SELECT SUM(length(z)) OVER (ORDER BY z), z FROM (SELECT hex(zeroblob(1900)) || a.rowid AS z FROM items "
    "a, items b, items c)",
    "json_group_array": "SELECT json_group_array(hex(zeroblob(1900))) FROM items a, items b, items c",
    "group_concat": "SELECT group_concat(hex(zeroblob(1900))) FROM items a, items b, items c",
    "width of printf": "SELECT printf('%.*c', 2000000000, 'x') || printf('%2000000000d', 1) || zeroblob(2000000000)",
    "patterns": "SELECT COUNT(*) FROM items a, items b, items c WHERE hex(zeroblob(1900)) LIKE '%0%0%0%0%0%0%0%0%0%1' "
    "OR hex(zeroblob(1900)) GLOB '*0*0*0*0*0*0*0*0*0*0*1'",
    "wide result": f"SELECT {', '.join(['hex(zeroblob(1900))'] * 90)} FROM items a, items b, items c",
}
QUICK = ("zeroblob in a sorted join", "recursion", "json_group_array", "patterns", "wide result")
LIMIT_MB = 300
"""Limit of additional memory of all processes together."""

CHILD = """
import asyncio, json, os, resource, sys, threading, time
from components.environments.worlds.sql import Sql
from components.environments.tools import call
from components.rollout.agent import ask

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # the machine survives what is tested
environment = Sql(train=8, heldout=0, schemas=("shop",))
asyncio.run(ask(environment.reset, environment.scenarios("train")[0]))
peak, done = 0, False

def pages(pid):
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except OSError:
        return 0

def children(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
        except OSError:
            pass
    return found

own = pages(os.getpid())

def watch():
    global peak
    while not done:
        now = pages(os.getpid()) - own + sum(map(pages, children(os.getpid())))
        peak = max(peak, now)
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
answers = {}
for name, sql in json.loads(sys.stdin.read()).items():
    peak = 0
    for tool in ("query", "submit"):
        step = asyncio.run(ask(environment.step, call(tool, {"sql": sql})))
        answers[f"{tool}: {name}"] = [step.observation[0]["content"], peak * 4096 >> 20]
        if step.done:
            asyncio.run(ask(environment.reset, environment.scenarios("train")[0]))
done = True
watcher.join()
print(json.dumps(answers))
"""


def _attack(names):
    """Run attacks; return the observation of each, and the memory in MB that it took in all processes."""
    queries = {name: BOMBS[name] for name in names}
    ran = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(queries), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def _check(answers):
    assert {name: peak for name, (_, peak) in answers.items() if peak > LIMIT_MB} == {}
    for name, (text, _) in answers.items():
        assert re.fullmatch("error: .+", text) or "patterns" in name, (name, text)


def test_memory_is_bounded_and_the_agent_gets_an_error():
    answers = _attack(QUICK)
    _check(answers)
    texts = {name: text for name, (text, _) in answers.items()}
    over = "error: the query needs more memory than 64 MB and was ended"
    assert texts["query: zeroblob in a sorted join"] == texts["submit: zeroblob in a sorted join"] == over
    assert texts["query: recursion"] == "error: the query took too long and was ended"
    assert texts["submit: wide result"].startswith("error: the result has more than 1048576 bytes")
    assert texts["submit: patterns"] == "submitted"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_bounded_for_every_way_to_use_it():
    _check(_attack(BOMBS.keys() - {*QUICK}))


async def _ticks_beside(environments, actions):
    """Return the number of times that the event loop runs another task while the environments act, and their steps."""
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.create_task(tick())
    steps = await asyncio.gather(
        *(ask(environment.step, action) for environment, action in zip(environments, actions, strict=True))
    )
    ticker.cancel()
    return ticks, steps


def test_attacks_do_not_block_the_event_loop_or_other_episodes():
    slow, second = Sql(train=8, heldout=0, schemas=("shop",)), Sql(train=8, heldout=0, schemas=("shop",))
    scenario = slow.scenarios("train")[0]
    asyncio.run(ask(slow.reset, scenario))
    asyncio.run(ask(second.reset, scenario))
    actions = [call("query", {"sql": BOMBS["recursion"]}), call("submit", {"sql": scenario.input["gold"]})]
    ticks, (attacked, unharmed) = asyncio.run(_ticks_beside([slow, second], actions))
    assert ticks >= 1000, "a step that blocks the loop yields to it a few times"
    assert attacked.observation[0]["content"] == "error: the query took too long and was ended"
    assert unharmed.info["success"] is True
    slow.close()
    second.close()


def test_a_cancelled_episode_ends_its_query():
    from components.environments.worlds.sql import database

    environment = Sql(train=8, heldout=0, schemas=("shop",))
    asyncio.run(ask(environment.reset, environment.scenarios("train")[0]))
    asyncio.run(ask(environment.step, call("query", {"sql": "SELECT 1"})))
    processes = database._processes
    for process in processes._idle:  # a stopped process never answers, however fast the machine is
        os.kill(process.pid, signal.SIGSTOP)

    async def cancelled():
        stopped = processes._idle[-1]
        task = asyncio.ensure_future(ask(environment.step, call("query", {"sql": "SELECT 1"})))
        while stopped in processes._idle:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), stopped

    try:
        was_cancelled, stopped = asyncio.run(cancelled())
    finally:
        environment.close()
        for process in processes._idle:
            os.kill(process.pid, signal.SIGCONT)
    assert was_cancelled
    assert not stopped.alive
    assert stopped not in processes._idle


def test_a_killed_process_is_replaced():
    from components.environments.worlds.sql import database

    environment = Sql(train=8, heldout=0, schemas=("shop",))
    scenario = environment.scenarios("train")[0]
    asyncio.run(ask(environment.reset, scenario))
    for _ in range(2):
        step = asyncio.run(ask(environment.step, call("query", {"sql": "SELECT 1 AS one"})))
        assert step.observation[0]["content"] == "one\n1"
        for process in database._processes._idle:
            process.kill()
    environment.close()


def test_failed_start_of_the_process_names_its_cause(monkeypatch):
    from components.environments.worlds.sql import database

    for program, start, message in (
        (JsonProgram("tests.nowhere:nothing"), 600.0, r"^the SQL process exited at its start: exit code 1; .*nowhere"),
        (JsonProgram(f"{__file__}:Hanging"), 0.1, r"^the SQL process was not ready within 0\.1 s$"),
    ):
        monkeypatch.setattr(database, "_PROGRAM", program)
        monkeypatch.setattr(database, "START", start)
        with pytest.raises(EnvironmentFailed, match=f"(?s){message}"):
            database._processes._start()


class Hanging:
    """Target of a process that is never ready."""

    def __init__(self):
        time.sleep(3600)


def test_the_process_has_no_secrets_and_writes_no_file():
    from components.environments.worlds.sql import database

    environment = Sql(train=8, heldout=0, schemas=("shop",))
    asyncio.run(ask(environment.reset, environment.scenarios("train")[0]))
    asyncio.run(ask(environment.step, call("query", {"sql": "SELECT 1"})))
    process = database._processes._idle[-1]
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0") if entry}
    assert names <= {b"LC_CTYPE"}  # set by Python itself
    with open(f"/proc/{process.pid}/limits") as file:
        limits = {line[:26].strip(): line[26:].split()[0] for line in file}
    assert limits["Max file size"] == "0"
    assert limits["Max address space"] == str(256 << 20)
    environment.close()
