"""States of trainings with sharded weights: processes that are killed at any moment leave a complete one, which any
number of processes resume from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.algorithms.loop import parts, resume
from components.algorithms.loop.adamw import FLOAT32_STATE, MASTER, adamw
from components.algorithms.policy import sharded
from components.algorithms.sft.spec import SFTSpec
from components.models.files import write_tensors
from tests.algorithms.builders import MODEL, batch, make_policy, train_in
from tests.algorithms.test_checkpoint import ROOT, differing

ALL_WEIGHTS = MODEL.model_copy(update={"lora": None, "dtype": "bfloat16"})
SPEC = SFTSpec(batch_size=4, learning_rate=1e-3, pack_tokens=64, epochs=2)
STEPS = 6


def test_a_file_that_is_written_a_tensor_at_a_time_is_that_of_the_library(tmp_path):
    tensors = {
        name: torch.randn(shape).to(dtype)
        for name, shape, dtype in (
            ("b", (3, 5), torch.bfloat16),
            ("größe", (7,), torch.float32),
            ("a", (), torch.float32),
            ("none", (0, 4), torch.float16),
            ("Z", (2, 1), torch.float16),
            ("a.b", (1,), torch.bfloat16),
        )
    }
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, tmp_path / "whole", metadata=metadata)
        write_tensors(tmp_path / "single", tensors, reversed(tensors.items()), metadata)
        assert (tmp_path / "single").read_bytes() == (tmp_path / "whole").read_bytes()


# --- processes ------------------------------------------------------------------------------------------------------


def together(count: int, function: Callable[[], None]) -> bool:
    """Run a function in forks that form a process group; when one ends with an error or is killed, kill the others.
    Return True if all succeeded."""
    from torch import distributed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pids = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                distributed.init_process_group("gloo", address, rank=rank, world_size=count)
                function()
                distributed.barrier()
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        pids.add(pid)
    succeeded = True
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            succeeded = False
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return succeeded


def train(base_dir: Path, folder: Path, *, strategy: Any = "fsdp", **options: Any) -> list[dict[str, float]]:
    options = {"save_every": 0.0} | options
    return train_in(folder, SPEC, base_dir, batch(groups=4), ALL_WEIGHTS, strategy=strategy, **options)[2]


def kill_at(moment: str, folder: Path) -> dict[str, Any]:
    """Arrange that a process kills itself. Return options of its training."""
    from torch import distributed

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write, remove, rank = parts.write, shutil.rmtree, distributed.get_rank()

    def without_its_part(part: Path, *arguments: Any) -> None:
        if int(part.parent.name) == 2:
            while not (part.parent / "0-of-2").is_dir():
                pass
            kill()
        write(part, *arguments)

    def after_its_part(part: Path, *arguments: Any) -> None:
        write(part, *arguments)
        if int(part.parent.name) == 3:
            kill()

    def while_the_old_one_is_removed(path: Path, **options: Any) -> None:
        if Path(path).name == "00000003" and parts.complete(Path(path)):
            (path / "0-of-2" / parts.STATE).unlink()
            kill()
        remove(path, **options)

    def in_the_background(metrics: dict[str, float]) -> None:
        if metrics["step"] == 5:
            kill()

    if moment == "before its part is written" and rank == 1:
        parts.write = without_its_part
    elif moment == "after its part is written" and rank == 0:
        parts.write = after_its_part
    elif moment == "while the old one is removed":
        resume.shutil.rmtree = while_the_old_one_is_removed  # type: ignore[attr-defined]
    elif moment == "while the next step computes" and rank == 1:
        return {"save_every": 1e-9, "on_step": in_the_background}
    return {}


MOMENTS = {
    "before its part is written": 1,
    "after its part is written": 2,
    "while the old one is removed": 4,
    "while the next step computes": 4,
}
"""Moments of kills, and the step from which the training is resumed at the earliest."""
GROUPS = {"2": (2, "fsdp"), "1": (1, "ddp"), "3": (3, "fsdp"), "1, offloaded": (1, "fsdp_offload")}
"""Processes that resume from the last state, and their strategy."""


def kill_and_resume(base_dir: Path, folder: Path) -> dict[str, Any]:
    """Train without a kill, and in another folder with kills in several attempts; from the last state with other
    numbers of processes too. Return the steps of the states, and the logs."""

    def log(name: str, **options: Any) -> None:
        logs = train(base_dir, folder / name, **options)
        written = folder / f"{name}.{os.getpid()}"  # each process writes its own
        written.write_text(json.dumps(logs))
        written.replace(folder / f"{name}.json")

    assert together(2, lambda: log("whole"))
    states, scratch = {}, folder / "killed" / "scratch" / "unfinished"
    for moment in MOMENTS:
        assert not together(2, lambda: log("killed", **kill_at(moment, folder)))  # noqa: B023
        states[moment] = [int(path.name) for path in sorted(scratch.iterdir()) if parts.complete(path)]
    for name, (count, strategy) in GROUPS.items():
        shutil.copytree(folder / "killed", folder / name)
        state = folder / name / "scratch" / "unfinished" / f"{states[moment][-1]:08d}"
        assert together(count, lambda: digest(base_dir, state, strategy))  # noqa: B023
        assert together(count, lambda: log(name, strategy=strategy))  # noqa: B023
    return states


def digest(base_dir: Path, state: Path, strategy: Any) -> None:
    """Load a state and write the digest of all its tensors, gathered."""
    from torch import distributed

    policy = make_policy(base_dir, model=ALL_WEIGHTS, strategy=strategy)
    optimizer = adamw(SPEC, [list(policy.parameters.values())])
    parts.load(parts.complete(state), optimizer, list(policy.parameters))
    content = hashlib.sha256()
    for name, parameter in policy.parameters.items():
        values = {MASTER: parameter, **optimizer.state[parameter]}
        for kind in FLOAT32_STATE:
            tensor = sharded.gather_tensor(values[kind])
            assert tensor.dtype == torch.float32
            content.update(f"{name} {kind} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        assert torch.equal(
            sharded.gather_tensor(parameter).bfloat16(), sharded.gather_tensor(values[MASTER]).bfloat16()
        )
    if not distributed.get_rank():
        state.parents[2].joinpath("digest").write_text(content.hexdigest())


@pytest.fixture(scope="module")
def killed(base_dir, tmp_path_factory) -> tuple[Path, dict[str, list[int]]]:
    """Return the folder of `kill_and_resume` and its result. It forks, so it runs in a process of its own."""
    folder = tmp_path_factory.mktemp("killed")
    code = (
        "import json, sys; from pathlib import Path; from tests.algorithms.test_parts import kill_and_resume\n"
        "print(json.dumps(kill_and_resume(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(base_dir), str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder, json.loads(done.stdout)


def logs(path: Path) -> list[float]:
    return [log["loss"] for log in json.loads(path.read_text())]


def test_a_complete_state_is_left_at_any_moment_and_the_training_ends_in_the_same_bytes(killed):
    folder, states = killed
    for moment, earliest in MOMENTS.items():
        assert states[moment][-1] >= earliest, moment
    assert len(logs(folder / "whole.json")) == STEPS
    assert differing(folder / "whole" / "out", folder / "2" / "out") == []
    assert logs(folder / "2.json") == logs(folder / "whole.json")
    assert sorted(path.name for path in (folder / "2/scratch/unfinished" / f"{STEPS:08d}").iterdir()) == [
        "0-of-2",
        "1-of-2",
    ]


def test_other_numbers_of_processes_resume_from_the_same_numbers(killed):
    """What they load is equal; their steps sum gradients in another order."""
    folder, _ = killed
    assert len({(folder / name / "digest").read_text() for name in GROUPS}) == 1
    for name in GROUPS.keys() - {"2"}:
        assert logs(folder / f"{name}.json") == pytest.approx(logs(folder / "whole.json"), abs=2e-3)
        ours, expected = (load_file(folder / run / "out/weights/model.safetensors") for run in (name, "whole"))
        for key, tensor in expected.items():
            assert (ours[key] - tensor).float().abs().mean() < 0.1 * SPEC.learning_rate
