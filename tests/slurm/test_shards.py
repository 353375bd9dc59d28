"""Shards of a stage as jobs of a Slurm cluster, through SkyPilot: `make test-slurm`.

The solver of `Mortal` notes each scenario that it solves, so that what was computed twice is known. It waits at one
scenario, or ends its process there, once.
"""

import io
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from components.errors import EspalierError
from components.trajectories.store import read_trajectories
from flows.execution.executor import Execution
from flows.experiment.requests import Requests
from flows.stages.base import Context, StagePart
from flows.stages.execute import find_stage, run_stage
from flows.stages.shard import shard_request
from flows.terminal.console import Console
from tests.flows.pretend import spec_of

SITE = Path(os.environ.get("ESPALIER_SLURM", "/nowhere"))
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SITE.is_dir(), reason="there is no cluster: make test-slurm"),
]


@pytest.fixture
def shared(tmp_path):
    """A folder that this machine and the node have in common, with one for each part of the test."""
    folder = SITE / f"shards-{os.getpid()}-{tmp_path.name}"
    for name in ("", "store", "node", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o777)
    return folder


def spec(root, shared, trap=-1, fate="kill", **compute):
    """An experiment with six demonstrations, which are collected on the cluster."""
    node = {"name": "sky", "infra": "slurm", "autostop": None, "cpus": "1+", "memory": "2+"}
    node |= {"python": str(SITE / "bin" / "python"), "root": str(shared / "node")}
    places = {name: {"name": name} for name in ("local", "process")} | {"sky": node}
    environment = {"_target_": "tests.flows.mortal.Mortal", "folder": str(shared / "notes")}
    return spec_of(
        root,
        allow=["tests"],
        store=(shared / "store").as_uri(),
        environment={**environment, "trap": trap, "fate": fate},
        warmup={"demonstrations": 6, "filter": {"_target_": "components.filters.successful.Successful"}},
        compute={"places": places, "stages": {"collect": "sky"}, **compute},
    )


@pytest.fixture
def whole(tmp_path, shared):
    """The collection that was not split, of this machine, and the numbers of its scenarios in order."""
    artifact, _ = run_stage(Requests(spec(tmp_path, shared)).demonstrate(), Context.at(tmp_path / "whole"))
    rows = read_trajectories(artifact.path / "trajectories.parquet")
    (shared / "notes" / "solved").unlink()
    return artifact, [int(row.scenario.id.rpartition("-")[2]) for row in rows]


def solved(shared):
    """Take the notes of the scenarios that were solved."""
    path = shared / "notes" / "solved"
    numbers = sorted(map(int, path.read_text().split()))
    path.unlink()
    return numbers


def collect(spec, log, screen):
    """Collect the demonstrations, with messages to the screen. Return the artifact or the error."""
    run = Execution(spec, Context.at(spec.root, spec.store), Console(screen), None, log)
    start = time.monotonic()
    try:
        result = run.make("collect[sft]", 0, Requests(spec).demonstrate()).artifact
    except EspalierError as error:
        result = error
    finally:
        print(f"\n{time.monotonic() - start:.0f} s\n{screen.getvalue()}")
        run.close(600.0)  # until its clusters are down
    return result


def slurm(*arguments):
    environment = {**os.environ, "SLURM_CONF": str(SITE / "etc" / "slurm.conf")}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600).stdout.split()


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.5)
    return value


def test_a_shard_whose_cluster_is_lost_alone_is_computed_again(whole, shared, tmp_path):
    artifact, order = whole
    killed, screen = [], io.StringIO()

    def kill():
        until((shared / "notes" / "trapped").is_file, 1500)
        until(lambda: len((shared / "notes" / "solved").read_text().split()) == 5, 900)  # the other shard is done
        time.sleep(10)
        [name] = re.findall(r"shard 2/2 waits for .* as the cluster (\S+)", screen.getvalue())
        jobs = dict(line.split("=") for line in slurm("squeue", "-h", "-o", "%i=%j"))
        killed.extend(job for job, full in jobs.items() if re.fullmatch(rf"{name}-[0-9a-f]+", full))
        slurm("scancel", *killed)

    threading.Thread(target=kill, daemon=True).start()
    split = spec(tmp_path / "split", shared, trap=order[4], fate="wait", stage_shards={"collect": 2})
    joined = collect(split, tmp_path / "log", screen)
    assert len(killed) == 1
    assert (joined.key, joined.digest, joined.metrics["shards"]) == (artifact.key, artifact.digest, 2)
    assert "collect shard 2/2: " in screen.getvalue()
    assert "lost its machines" in screen.getvalue()
    assert solved(shared) == sorted(order + order[3:5])
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 180)


def test_a_shard_whose_process_is_killed_alone_is_missing_for_the_next_command(whole, shared, tmp_path):
    """Four rows a shard make two shards of six rows."""
    artifact, order = whole
    split = spec(tmp_path / "split", shared, trap=order[4], shard_rows=4, stages={"collect": "sky"}, default="process")
    error = collect(split, tmp_path / "log", io.StringIO())
    assert isinstance(error, EspalierError)
    assert "collect[sft] shard 2/2: collect shard 2/2 ended on" in str(error)
    context, request = Context.at(tmp_path / "split", split.store), Requests(split).demonstrate()
    stored = [find_stage(shard_request(request, StagePart(index, 2)), context) for index in range(2)]
    assert [shard is not None for shard in stored] == [True, False]
    solved(shared)
    joined = collect(split, tmp_path / "log", screen := io.StringIO())
    assert "2 shards on sky, 1 of them cached" in screen.getvalue()
    assert (joined.key, joined.digest) == (artifact.key, artifact.digest)
    assert solved(shared) == sorted(order[3:])
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 180)
