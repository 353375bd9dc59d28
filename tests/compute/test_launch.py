"""Launch of the processes of one training, and the error if one of them dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.compute.launch import main, rendezvous_options
from components.compute.runners import StageProcess
from components.compute.spec import ComputeSpec
from components.compute.torchrun.spec import TorchrunPlace
from components.errors import ResourceError, SpecError
from components.specs import validate

NODES = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}


def test_rendezvous_is_this_machine_or_the_first_node():
    assert rendezvous_options({}, 29500) == ["--standalone"]
    single_node = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    assert rendezvous_options(single_node, 29500) == ["--standalone"]
    assert rendezvous_options(NODES, 4000) == [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=4000",
    ]


def test_invalid_list_of_nodes_is_rejected(monkeypatch, capsys):
    for wrong in ({"NUM_NODES": "3"}, {"NODE_RANK": "2"}, {"NODE_RANK": "first"}):
        environment = NODES | {f"SKYPILOT_{name}": value for name, value in wrong.items()}
        with pytest.raises(ResourceError, match=r"SKYPILOT_NODE_IPS lists 2 nodes.*expected as many nodes as listed"):
            rendezvous_options(environment, 29500)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert main(["--processes", "2", "--", "flows.stage"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["type"] == "ResourceError"


def test_command_of_a_place():
    place = TorchrunPlace(processes=4, strategy="fsdp", timeout=60)
    start = place.command(StageProcess(Path("root"), Path("log"), options=["--store", "s3://x"]))
    assert start[0] == sys.executable
    assert " ".join(start[1:]) == (
        "-m components.compute.launch --processes 4 --log log -- "
        "flows.stage --store s3://x --strategy fsdp --group-timeout 60.0"
    )


def test_invalid_place_is_rejected():
    for key, value in {"processes": 0, "strategy": "zero9", "timeout": 0}.items():
        with pytest.raises(SpecError, match=rf"places\.many\.\S*{key}"):
            validate(ComputeSpec, {"places": {"many": {"name": "torchrun", key: value}}})


def test_a_process_that_is_killed_ends_all_and_is_named(tmp_path):
    """The other process would wait for the killed one."""
    (tmp_path / "dies.py").write_text(
        "import os, sys, time\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "components.compute.launch", "--processes", "2", "--log", "the log", "--", "dies"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    message = json.loads(done.stdout)["error"]["message"]
    assert message.startswith("training process 1 ended by SIGKILL")
    assert message.endswith("its last output is in the log")
