"""Batched questions, against a server with OpenAI's behaviour."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web

from components.errors import BudgetExceeded, JudgeError, ResourceError
from components.rewards.judge import judge
from components.rewards.judges.ruler import Ruler
from components.rewards.llm import batches
from components.rewards.llm.budget import Meter
from components.rewards.llm.cache import SentBatches
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import GOOD, judge_server, served
from tests.trajectories.builders import episode, talk

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = {"type": "object"}
PRICE = {"input": 1000.0, "output": 2000.0}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(batches, "QUIET", 0.1)
    monkeypatch.setattr(batches, "FIRST_PAUSE", 0.02)


def spec(server, **options):
    return ServedJudge(**{"url": server.url, "model": "judge", "retry_for": 1, "batch": True, "price": PRICE} | options)


def means(folder, meter=None, waiting=lambda text: None):
    return RewardResources(folder, None, meter or Meter(), folder / "answers", waiting=waiting)


def question(number):
    return [{"role": "user", "content": f'<trajectory id="x">question {number}: quality 0.{number % 10}</trajectory>'}]


def ask(client, *numbers, keep=True, immediate=False):
    """Return the answers, with errors in place of failed ones."""

    async def answer_of(number):
        answer = await client.ask(question(number), SCHEMA, immediate=immediate)
        if keep:
            client.keep(answer)
        return answer

    async def work():
        return await asyncio.gather(*map(answer_of, numbers), return_exceptions=True)

    return asyncio.run(work())


def right(answers, *numbers):
    return [json.loads(answer.text)["scores"][0]["score"] for answer in answers] == [n % 10 / 10 for n in numbers]


def sent(server):
    """Return the question numbers of each batch."""
    numbers = []
    for batch in server.batches.values():
        rows = [json.loads(line) for line in server.files[batch["input_file_id"]].splitlines()]
        assert len({row["custom_id"] for row in rows}) == len(rows)
        texts = [row["body"]["messages"][0]["content"] for row in rows]
        numbers.append(sorted(int(text.split("question ")[1].split(":")[0]) for text in texts))
    return numbers


def test_questions_that_come_together_are_one_batch_at_half_the_price(tmp_path):
    meter, reported = Meter(), []
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path, meter, reported.append))
        answers = ask(client, *range(12))
        client.close()
    assert sent(server) == [list(range(12))]
    assert right(answers, *range(12))
    for answer in answers:
        full = (answer.prompt_tokens * PRICE["input"] + answer.completion_tokens * PRICE["output"]) / 1e6
        assert answer.cost == pytest.approx(full / 2, rel=1e-12)
    assert meter.spent == pytest.approx(sum(answer.cost for answer in answers))
    assert reported
    assert all("batch_1" in text and "of 12 answered" in text for text in reported)


def test_what_was_kept_of_a_batch_costs_what_was_paid(tmp_path):
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path))
        (first,) = ask(client, 3)
        client.close()
        client = JudgeClient(spec(server, batch=False), means(tmp_path))
        (again,) = ask(client, 3)
        client.close()
    assert again == first
    assert len(server.requests) == 1


def test_questions_that_come_later_are_another_batch(tmp_path):
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path))

        async def work():
            early = asyncio.create_task(client.ask(question(1), SCHEMA))
            await asyncio.sleep(0.4)
            return [await early, await client.ask(question(2), SCHEMA)]

        assert right(asyncio.run(work()), 1, 2)
        client.close()
    assert sent(server) == [[1], [2]]


def test_a_full_batch_is_sent_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MOST_QUESTIONS", 5)
    monkeypatch.setattr(batches, "QUIET", 1.0)
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path))
        assert right(ask(client, *range(12)), *range(12))
        client.close()
    assert sorted(sent(server)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]  # full ones are under way together


def test_equal_questions_at_once_are_one(tmp_path):
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path))
        assert right(ask(client, 4, 4, 4), 4, 4, 4)
        client.close()
    assert sent(server) == [[4]]


def test_a_row_that_fails_is_asked_alone_and_at_the_full_price(tmp_path):
    with judge_server(lambda asked: replies.OVERLOADED if asked.number == 1 else GOOD) as server:
        client = JudgeClient(spec(server), means(tmp_path))
        answers = ask(client, 1, 2, 3)
        client.close()
    assert right(answers, 1, 2, 3)
    assert sorted(answer.share for answer in answers) == [0.5, 0.5, 1.0]
    assert len(server.requests) == 4


@pytest.mark.parametrize("reply", [replies.EMPTY, replies.NO_CHOICES])
def test_a_row_without_an_answer_is_asked_alone(tmp_path, reply):
    with judge_server([reply]) as server:
        client = JudgeClient(spec(server), means(tmp_path))
        assert right(ask(client, 1), 1)
        client.close()
    assert len(server.requests) == 2


def test_what_a_batch_did_not_get_to_before_it_expired_is_asked_alone(tmp_path, caplog):
    with judge_server(batch_end="expired") as server:
        client = JudgeClient(spec(server), means(tmp_path))
        answers = ask(client, 0, 1, 2, 3)
        client.close()
    assert right(answers, 0, 1, 2, 3)
    assert [answer.share for answer in answers].count(1.0) == 2
    assert "has no answer for 2 of 4 questions" in caplog.text


def test_a_format_that_the_server_does_not_know_is_asked_for_in_another_batch(tmp_path):
    with judge_server(replies.without_format(replies.NO_FORMAT, "json_schema")) as server:
        client = JudgeClient(spec(server), means(tmp_path))
        answers = ask(client, 1, 2)
        client.close()
    assert right(answers, 1, 2)
    assert sent(server) == [[1, 2], [1, 2]]
    assert [answer.share for answer in answers] == [0.5, 0.5]


def test_a_batch_that_is_refused_ends_the_stage_and_says_why(tmp_path):
    with judge_server(batch_end="failed") as server:
        client = JudgeClient(spec(server), means(tmp_path))
        for error in ask(client, 1, 2):
            assert isinstance(error, ResourceError)
            assert "rejected batch batch_1: it was refused" in str(error)
            assert "reward.model.batch=false" in str(error)
        client.close()
        client = JudgeClient(spec(server), means(tmp_path))
        ask(client, 1, 2)  # it is not waited for again
        client.close()
    assert len(server.batches) == 2


def test_a_server_without_batches_is_told_apart(tmp_path):
    with served(web.Application()) as url:
        client = JudgeClient(ServedJudge(url=url, model="judge", batch=True, retry_for=0), means(tmp_path))
        (error,) = ask(client, 1)
        client.close()
    assert isinstance(error, ResourceError)
    assert "does not support batches" in str(error)
    assert "reward.model.batch=false" in str(error)


def test_a_wrong_key_ends_it(tmp_path):
    with judge_server(key="sesame") as server:
        client = JudgeClient(spec(server), means(tmp_path))
        (error,) = ask(client, 1)
        client.close()
    assert isinstance(error, ResourceError)
    assert "refuses the key" in str(error)


def test_a_batch_that_never_ends_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "LONGEST", 0.2)
    with judge_server(batch_polls=10_000) as server:
        client = JudgeClient(spec(server), means(tmp_path))
        (error,) = ask(client, 1)
        client.close()
    assert isinstance(error, JudgeError)
    assert "is still in_progress" in str(error)


def test_a_correction_is_asked_alone(tmp_path):
    """A group waits for the correction last."""
    group = [episode("a", i, histories=[talk("Go.", f"quality 0.{i}")]) for i in (1, 2, 3)]
    with judge_server([replies.MISSING]) as server:
        ruler = Ruler(spec(server))
        ruler.use(means(tmp_path))
        scores = list(judge(ruler, group))
        ruler.close()
    assert [score.reward for score in scores] == pytest.approx([0.1, 0.2, 0.3])
    assert (len(server.batches), len(server.requests)) == (1, 2)


def test_a_budget_stops_a_batch_before_it_is_sent_by_what_it_costs_to_be_read(tmp_path):
    least = len(question(1)[0]["content"]) // 4 * PRICE["input"] / 1e6
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path, Meter(budget=4.5 * least)))
        answers = ask(client, *range(10))
        client.close()
    assert [isinstance(answer, BudgetExceeded) for answer in answers] == [False] * 4 + [True] * 6
    assert sent(server) == [[0, 1, 2, 3]]


# What outlives a kill

SCRIPT = """
import asyncio, sys
from pathlib import Path
from components.rewards.llm import batches
from components.rewards.llm.client import JudgeClient
from tests.rewards.llm.test_batches import means, question, SCHEMA
from components.rewards.llm.models.served import ServedJudge
batches.QUIET, batches.FIRST_PAUSE = 0.1, 0.05
spec = ServedJudge(url=sys.argv[1], model="judge", batch=True, price={"input": 1000.0, "output": 2000.0})
client = JudgeClient(spec, means(Path(sys.argv[2])))
async def work():
    return await asyncio.gather(*(client.ask(question(n), SCHEMA) for n in range(6)))
asyncio.run(work())
"""


def kill_while_it_waits(server, folder):
    """Start a process that sends a batch of six, and kill it while it waits."""
    command = [sys.executable, "-c", SCRIPT, server.url, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment) as child:
        deadline = time.monotonic() + 600
        while not any(batch["looked"] > 1 for batch in server.batches.values()):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)


def test_a_batch_that_was_sent_before_a_kill_is_not_paid_for_again(tmp_path):
    with judge_server(batch_polls=10_000) as server:
        kill_while_it_waits(server, tmp_path)
        server._polls = 0  # it ends while nobody waits
        meter = Meter()
        client = JudgeClient(spec(server), means(tmp_path, meter))
        answers = ask(client, *range(8))  # two more than then
        client.close()
    assert right(answers, *range(8))
    assert sent(server) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert len(server.requests) == 8
    assert meter.spent == pytest.approx(sum(answer.cost for answer in answers))
    assert {answer.share for answer in answers} == {0.5}


def test_what_of_a_batch_was_not_asked_for_this_time_is_there_the_next_time(tmp_path):
    with judge_server(batch_polls=10_000) as server:
        kill_while_it_waits(server, tmp_path)
        server._polls = 0
        for numbers in ((0, 1), (2, 3, 4, 5), (0, 5)):
            client = JudgeClient(spec(server), means(tmp_path))
            assert right(ask(client, *numbers, keep=numbers != (0, 1)), *numbers)
            client.close()
            remembered = SentBatches(tmp_path / "answers")
            assert len(remembered.questions("batch_1")) == 6
            remembered.close()
    assert len(server.batches) == 1
    assert len(server.requests) == 6


def test_a_batch_of_which_all_was_asked_is_forgotten(tmp_path):
    with judge_server() as server:
        client = JudgeClient(spec(server), means(tmp_path))
        ask(client, 1, 2)
        remembered = SentBatches(tmp_path / "answers")
        assert len(remembered.questions("batch_1")) == 2
        client.close()
        assert remembered.questions("batch_1") == []
        remembered.close()


def test_a_batch_that_the_server_has_forgotten_is_asked_one_by_one(tmp_path, caplog):
    with judge_server(batch_polls=10_000) as server:
        kill_while_it_waits(server, tmp_path)
        server.batches.clear()
        client = JudgeClient(spec(server), means(tmp_path))
        assert right(ask(client, 1), 1)
        client.close()
    assert "no longer has batch batch_1" in caplog.text


def test_two_at_once_share_a_batch_that_was_sent(tmp_path):
    with judge_server(batch_polls=10_000) as server:
        kill_while_it_waits(server, tmp_path)
        clients = [JudgeClient(spec(server), means(tmp_path)) for _ in range(2)]

        async def work():
            asked = [client.ask(question(2), SCHEMA) for client in clients]
            asyncio.get_running_loop().call_later(0.3, setattr, server, "_polls", 0)
            return await asyncio.gather(*asked)

        assert right(asyncio.run(work()), 2, 2)
        for client in clients:
            client.close()
    assert len(server.batches) == 1
