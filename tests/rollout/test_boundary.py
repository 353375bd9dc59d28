"""Tests of the boundary to foreign code: which exceptions are failures of that code, and what is said of them."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest

from components.errors import BoundaryError, BudgetExceeded, EngineError, EnvironmentFailed, ResourceError, SpecError
from components.exceptions import is_foreign, place
from components.rewards.judge import judge
from flows.terminal.console import Console, logging_to
from flows.terminal.exit_codes import describe_error
from tests.rollout.worlds import Echo, Parrot, collect, scenarios
from tests.trajectories.builders import episode


def test_a_mistake_of_the_user_and_an_interrupt_are_no_failures_of_foreign_code():
    for error, ours, foreign in (
        (KeyError("x"), (), True),
        (SystemExit(3), (), True),
        (StopIteration(), (), True),
        (TimeoutError(), (BoundaryError,), True),
        (EngineError("x"), (), True),
        (EngineError("x"), (BoundaryError,), False),
        (EngineError("x"), (EnvironmentFailed,), True),
        (BudgetExceeded("x"), (BudgetExceeded,), False),
        (SpecError([]), (), False),
        (ResourceError("x"), (), False),
        (KeyboardInterrupt(), (), False),
        (GeneratorExit(), (), False),
        (asyncio.CancelledError(), (), False),  # no task runs, so it is not about a task of the foreign code
    ):
        assert is_foreign(error, *ours) is foreign, (error, ours)


@pytest.mark.parametrize("requested", [True, False])
def test_a_cancellation_is_foreign_only_if_nobody_requested_it(requested):
    async def judged() -> bool:
        task = asyncio.current_task()
        assert task is not None
        if requested:
            task.cancel()
        try:
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        except asyncio.CancelledError as error:
            return is_foreign(error)

    assert asyncio.run(judged()) is not requested


USER_CODE = """
import json

from components.errors import JudgeError
class World:
    def step(self, action):
        return {}["price"]

def divided(trajectory):
    return share(1, 0)

def share(part, whole):
    return part / whole

def loaded(trajectory):
    return json.loads("")

def refused(trajectory):
    raise JudgeError("no price")
"""


@pytest.fixture
def stock(tmp_path, monkeypatch):
    """Module of a user, in the package `mine`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "stock.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    import mine.stock

    yield mine.stock
    del sys.modules["mine.stock"], sys.modules["mine"]


def test_an_exception_of_a_reward_names_the_innermost_line_of_the_users_code(stock):
    for function, message in (
        (stock.divided, "division by zero (mine/stock.py:13, in share)"),
        # its innermost frames are those of the standard library
        (stock.loaded, "Expecting value: line 1 column 1 (char 0) (mine/stock.py:16, in loaded)"),
        (stock.refused, "no price"),
    ):
        (score,) = judge(function, [episode("a")])
        assert score.failure.message == message


def test_an_exception_of_an_environment_names_the_innermost_line_of_the_users_code(stock):
    world = type("World", (Echo,), {"step": stock.World.step})
    (trajectory, *_) = collect(Parrot(), world, scenarios(1), group_size=1, max_failures=1)
    assert trajectory.failure.message == "step: KeyError: 'price' (mine/stock.py:7, in step)"


def test_the_log_has_each_traceback_once(stock, tmp_path):
    with logging_to(tmp_path / "run.log", Console(io.StringIO())):
        list(judge(stock.divided, [episode("a"), episode("b")]))
        list(judge(stock.refused, [episode("a")]))
    log = (tmp_path / "run.log").read_text()
    assert log.count("Traceback") == 2
    assert log.count("return part / whole") == 1
    assert log.count('raise JudgeError("no price")') == 1


def test_an_unexpected_exception_of_user_code_ends_a_command_with_its_line(stock):
    with pytest.raises(ZeroDivisionError) as raised:
        stock.divided(None)
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # without the frame of this test
    assert describe_error(raised.value) == ("ZeroDivisionError: division by zero (mine/stock.py:13, in share)", 1)


def test_an_exception_outside_the_users_code_names_no_line():
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next
    assert place(raised.value) == ""
    assert describe_error(raised.value) is None
