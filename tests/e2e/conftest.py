"""Whole runs in the process of the tests."""

import json

import pytest


@pytest.fixture
def finished(command):
    """`finished(PLACE, *overrides)`: run in this process, for tests that do not ask about the process."""
    from tests.e2e.test_smoke import FinishedRun

    def run(place, *overrides):
        code, out, errors = command(*place.overrides(*overrides))
        assert code == 0, errors
        return FinishedRun(json.loads(out.splitlines()[-1]), out.splitlines(), errors)

    return run
