"""Tests of the boundary to foreign code: which exceptions are failures of that code."""

from __future__ import annotations

import asyncio

import pytest

from components.errors import BoundaryError, BudgetExceeded, EngineError, EnvironmentFailed, ResourceError, SpecError
from components.exceptions import is_foreign


@pytest.mark.parametrize(
    ("error", "ours", "foreign"),
    [
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
    ],
    ids=repr,
)
def test_a_mistake_of_the_user_and_an_interrupt_are_no_failures_of_foreign_code(error, ours, foreign):
    assert is_foreign(error, *ours) is foreign


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
