"""What the tests of flows share: tiny stages, consoles and executions."""

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flows.stages import STAGES
from flows.stages.base import Context, Stage, StageSpec
from flows.terminal.console import Console


class AddSpec(StageSpec):
    amount: float
    width: int = 1

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(exclude={"width"})


def add(spec, inputs, draft, context):
    """Adds `amount` to the numbers of its inputs; keeps what it got so far in scratch, one file a part."""
    parts = [float((artifact.path / "number").read_text()) for artifact in inputs.values()] + [spec.amount]
    total = 0.0
    for index, part in enumerate(parts):
        context.progress(index, len(parts), {"loss": total})
        done = context.scratch / str(index)
        done.write_text(str(part))
        total += part
    if total < 0:
        raise ValueError("below zero")
    (draft.path / "number").write_text(str(total))
    (draft.path / "log").write_text(str(spec.width))
    return {"total": total, "seed": float(context.seed), "unknown": float("nan")}


@pytest.fixture
def tiny_stages(monkeypatch):
    """A stage `add` in the registry."""
    monkeypatch.setitem(STAGES, "add", Stage("add", 1, AddSpec, "number", 1, add, volatile=("log",)))
    return STAGES


@pytest.fixture
def unhurried(monkeypatch):
    """A busy machine: stopped stages and their threads get minutes for their cleanup before they are killed."""
    for module in ("components.compute.runners", "flows.execution.overlap", "flows.execution.parallel"):
        monkeypatch.setattr(f"{module}.GRACE", 300.0)


@pytest.fixture
def context(tmp_path):
    return Context.at(tmp_path)


@pytest.fixture
def root_logger():
    """Restore the root logger, which the commands configure."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def refused(answered):
    """Run `flows.run` with what it refuses; return what it says."""

    def run(*arguments: str) -> str:
        code, out, said = answered(*arguments)
        assert (code, out, "Traceback" in said) == (2, "", False)
        return said

    return run


@pytest.fixture
def recorded(monkeypatch, answered):
    """Run `flows.run` with a flow that records its arguments; return the exit code, the calls and standard error."""
    import flows

    def run(*arguments: str, ends=lambda: {"success": 0.5}) -> tuple[object, list[SimpleNamespace], str]:
        calls = []

        def flow(spec, *, overrides, sweep=None, prune=None):
            calls.append(SimpleNamespace(spec=spec, overrides=overrides, sweep=sweep))
            return ends()

        session = SimpleNamespace(run=flow)
        monkeypatch.setitem(sys.modules, "flows.session", session)
        monkeypatch.setattr(flows, "session", session, raising=False)
        code, _, said = answered(*arguments)
        return code, calls, said

    return run


@pytest.fixture
def screen():
    """A console that writes into a text."""
    stream = io.StringIO()
    return Console(stream), stream


@pytest.fixture
def execution(tmp_path, screen):
    """The execution of an experiment that is neither tracked nor recorded."""
    from components.specs import validate
    from flows.execution.executor import Execution
    from flows.experiment.spec import ExperimentSpec
    from tests.flows.test_online_rl import DATA

    spec = validate(ExperimentSpec, {**DATA, "root": str(tmp_path)})
    return Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "log")
