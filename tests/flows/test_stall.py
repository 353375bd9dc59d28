"""A stage in which nothing moves is ended, and the log says what it was doing."""

from __future__ import annotations

import logging

import psutil
import pytest

from components.errors import WaitTimeout
from flows.execution.executor import Execution
from flows.experiment.requests import Requests
from flows.stages.base import Context
from tests.flows.pretend import spec_of

HANGING = {"_target_": "tests.faults.world.HangingShop", "train": 16, "heldout": 4}


@pytest.mark.parametrize("placement", ["local", "process"])
def test_an_environment_that_never_returns_ends_its_stage(tmp_path, screen, caplog, placement):
    caplog.set_level(logging.ERROR)
    compute = {"default": placement, "stall_timeout": 2}
    spec = spec_of(tmp_path, environment=HANGING, allow=["tests"], compute=compute)
    execution = Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "logs" / "log")
    with pytest.raises(WaitTimeout, match=r"collect\[sft\]: no progress for 2 s.*compute.stall_timeout"):
        execution.stage("collect[sft]", 0, Requests(spec).demonstrate())
    assert "collect[sft] has stalled" in caplog.text
    assert ("world.py" in caplog.text) == (placement == "local")
    assert [one for one in psutil.Process().children() if "flows.stage" in " ".join(one.cmdline())] == []
    assert not list((tmp_path / "artifacts").glob("?" * 64))
