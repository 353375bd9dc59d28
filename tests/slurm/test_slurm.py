"""A training on a Slurm cluster through SkyPilot: `make test-slurm`, which makes both on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

SITE = Path(os.environ.get("ESPALIER_SLURM", "/nowhere"))
CODE = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SITE.is_dir(), reason="there is no cluster: make test-slurm"),
]
TRAINING = ["+experiment=smoke", "rounds=0", "warmup.algorithm.epochs=60", "compute.save_every=0"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder that this machine and the node have in common."""
    folder = SITE / f"shared-{os.getpid()}"
    for name in ("", "store", "node"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o777)
    return folder


def command(root, *overrides):
    return [sys.executable, "-m", "flows.run", *TRAINING, f"root={root}", *overrides]


def placed(shared, *more):
    place = "compute.places.sky_slurm"
    return [
        f"store={(shared / 'store').as_uri()}",
        "compute=sky",
        "compute.default=local",
        "compute.stages.train=sky_slurm",
        f"{place}.python={SITE / 'bin' / 'python'}",
        f"{place}.root={shared / 'node'}",
        f"{place}.cpus=1+",
        f"{place}.memory=2+",
        *more,
    ]


def sent(shared):
    """Of a sweep whose points run there."""
    place = "hydra.launcher.places.sky_slurm"
    return [
        f"store={(shared / 'store').as_uri()}",
        "hydra/launcher=sky",
        "hydra.launcher.place=sky_slurm",
        f"{place}.python={SITE / 'bin' / 'python'}",
        f"{place}.root={shared / 'node'}",
        f"{place}.cpus=1+",
        f"{place}.memory=2+",
    ]


def slurm(*arguments):
    environment = {**os.environ, "SLURM_CONF": str(SITE / "etc" / "slurm.conf")}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600).stdout.split()


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.5)
    return found


def training(shared):
    """Files of a training that has begun on the node."""
    return [path for path in (shared / "node").glob("artifacts/.scratch/*/*") if path.stat().st_size]


def result(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def locally(tmp_path_factory):
    done = subprocess.run(
        command(tmp_path_factory.mktemp("local")), cwd=CODE, capture_output=True, text=True, timeout=900
    )
    return result(done)["policy_digest"]


@pytest.mark.parametrize("managed", [False, True], ids=["cluster", "managed job"])
def test_a_training_that_is_killed_goes_on_and_ends_as_it_does_here(locally, shared, tmp_path, managed):
    for one in (shared / "store", shared / "node"):
        subprocess.run(["find", str(one), "-mindepth", "1", "-delete"], check=True)
    killed = []

    def kill():
        until(lambda: training(shared), 900)
        time.sleep(3)
        killed.extend(slurm("squeue", "-h", "-o", "%i"))
        slurm("scancel", *killed)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    more = ["compute.places.sky_slurm.managed=true"] if managed else []
    done = subprocess.run(
        command(tmp_path, *placed(shared, *more)), cwd=CODE, capture_output=True, text=True, timeout=1500
    )
    found = result(done)
    assert killed
    assert found["policy_digest"] == locally
    assert managed or "lost its machines" in done.stderr
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 120)


def test_what_a_stage_takes_longer_there(shared, tmp_path):
    """On a cluster that is launched for it, on one that is up; against a process of its own here, which has to import
    what it needs too, and against the run's own process."""

    def seconds(name, *overrides):
        root = tmp_path / name
        result(subprocess.run(
            [sys.executable, "-m", "flows.run", "+experiment=smoke", "rounds=2", f"root={root}", "seed=9", *overrides],
            cwd=CODE, capture_output=True, text=True, timeout=1500,
        ))  # fmt: skip
        [record] = (root / "records").glob("*.json")
        stages = json.loads(record.read_text())["stages"]
        return [one["seconds"] for one in stages if one["label"].startswith("train")]

    there = seconds("there", *placed(shared))
    fresh = seconds("fresh", "compute.stages.train=process")
    here = seconds("here")
    print(
        f"\ntrain[sft], [1], [2] took {there} s there, {fresh} s in a process of their own here, {here} s in the run's"
    )
    cold, warm, inside = there[0] - fresh[0], max(there[1:]) - fresh[0], max(there[1:]) - here[1]
    print(f"longer there: cold {cold:.0f} s, warm {warm:.0f} s; than in the run's own process {inside:.0f} s")
    assert cold < 60


def test_a_training_in_several_processes_there(shared, tmp_path):
    """The steps are those of one process here; the last bits differ, for sums are in another order."""
    place = "compute.places.sky_slurm"
    steps = {}
    more = {"here": [], "there": placed(shared, f"{place}.processes=2", f"{place}.strategy=fsdp")}
    for name, overrides in more.items():
        root = tmp_path / name
        result(subprocess.run(
            [sys.executable, "-m", "flows.run", "+experiment=smoke", "rounds=1", f"root={root}", "seed=10", *overrides],
            cwd=CODE, capture_output=True, text=True, timeout=1500,
        ))  # fmt: skip
        [record] = (root / "records").glob("*.json")
        keys = {one["label"]: one["key"] for one in json.loads(record.read_text())["stages"]}
        log = (root / "artifacts" / keys["train[sft]"] / "log.jsonl").read_text()
        steps[name] = [json.loads(line) for line in log.splitlines()]
    assert len(steps["here"]) == len(steps["there"]) > 0
    for here, there in zip(steps["here"], steps["there"], strict=True):
        for figure in ("loss", "grad_norm"):
            assert there[figure] == pytest.approx(here[figure], rel=1e-4, abs=1e-7)
    text = "".join(path.read_text() for path in (tmp_path / "there" / "logs").glob("*sky_slurm.log"))
    assert "[0] INFO" in text  # so a process is marked that is one of several


def test_a_cluster_goes_down_when_its_run_is_killed(shared, tmp_path):
    child = subprocess.Popen(
        command(tmp_path, *placed(shared, "seed=7")), cwd=CODE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(lambda: slurm("squeue", "-h", "-o", "%i"), 900)
    child.send_signal(signal.SIGKILL)
    child.wait(600)
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 300)


def test_an_accelerator_that_is_not_there(shared, tmp_path):
    wanted = "compute.places.sky_slurm.accelerators=H200:1"
    done = subprocess.run(
        command(tmp_path, *placed(shared, wanted, "seed=8")), cwd=CODE, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 2
    assert "H200:1" in done.stderr
    assert "is not available" in done.stderr
    assert "Traceback" not in done.stderr


def test_points_of_a_sweep_are_jobs_there_and_one_of_them_fails(shared, tmp_path):
    """The model of the second is on no hub. A point that ran there is found here by its stages."""
    smoke = ["+experiment=smoke", "rounds=0", "seed=12"]

    def run(*arguments):
        line = [sys.executable, "-m", "flows.run", *smoke, f"root={tmp_path}", *arguments]
        start = time.monotonic()
        done = subprocess.run(line, cwd=CODE, capture_output=True, text=True, timeout=1500)
        print(f"\n{arguments[0]}: {time.monotonic() - start:.0f} s")
        return done

    done = run("-m", *sent(shared), "model.source=random,hub")
    assert "Traceback" not in done.stderr
    [folder] = (tmp_path / "sweeps").iterdir()
    first, second = json.loads((folder / "summary.json").read_text())["points"]
    assert (first["status"], second["status"]) == ("finished", "failed"), done.stderr
    assert done.returncode == 2, done.stderr  # what failed, only the user can help
    assert "tiny" in second["error"]
    assert "  run it alone: " in done.stderr
    assert Path(first["result"]["report"]).is_file()
    assert {one.stem for one in (tmp_path / "records").glob("*.json")} >= {first["result"]["run_id"]}
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 120)
    found = result(run(f"store={(shared / 'store').as_uri()}"))
    assert set(found["stages"].values()) == {"cached"}
    assert found["policy_digest"] == first["result"]["policy_digest"]


def test_the_machines_of_a_sweep_go_down_when_it_is_interrupted(shared, tmp_path):
    line = command(tmp_path, "-m", "seed=21,22", *sent(shared), "hydra.launcher.n_jobs=2")
    child = subprocess.Popen(
        line, cwd=CODE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: len(slurm("squeue", "-h", "-o", "%i")) == 2, 900)
    time.sleep(20)  # the points have begun, or are about to
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=600)[1]
    assert child.returncode == 130, said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    until(lambda: not slurm("squeue", "-h", "-o", "%i"), 180)
