"""Killed trainings resume at the same sample and produce the same bytes as uninterrupted ones."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from components.algorithms.loop import parts
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.errors import ArtifactDamaged
from tests.algorithms.builders import MODEL, batch, demonstrations, train
from tests.algorithms.test_checkpoint import DROPOUT, ROOT, differing

ALGORITHMS = {
    "grpo": (GRPOSpec(learning_rate=1e-3, epochs=2, minibatches=2, warmup_steps=5), batch),
    "ppo, head": (
        PPOSpec(learning_rate=1e-3, epochs=2, minibatches=2, warmup_steps=5, value_pretraining_steps=3),
        batch,
    ),
    "ppo, model": (
        PPOSpec(learning_rate=1e-3, epochs=2, minibatches=2, value="model", value_pretraining_steps=1),
        batch,
    ),
    "ppo, not pretrained": (PPOSpec(learning_rate=1e-3, epochs=2, minibatches=2, value_pretraining_steps=0), batch),
    "sft": (SFTSpec(learning_rate=1e-3, epochs=2, batch_size=3, warmup_steps=3), demonstrations),
    "grpo, whole": (GRPOSpec(learning_rate=1e-4, epochs=2, minibatches=2, kl_coefficient=0.1), batch),
    "grpo, float16": (GRPOSpec(learning_rate=1e-3, epochs=2, minibatches=2, entropy_coefficient=1000.0), batch),
}
MODELS = {
    "grpo, whole": MODEL.model_copy(update={"lora": None, "dtype": "bfloat16"}),
    "grpo, float16": DROPOUT.model_copy(update={"dtype": "float16"}),
}
"""Models of some trainings; all others train an adapter with dropout."""
OnStep = Callable[[dict[str, float]], None]


def run(base_dir: Path, name: str, folder: Path, on_step: OnStep = lambda _: None, every: float = 0.0) -> Path:
    """Run one training, or resume it in a second call with the same folder. Return the folder of the checkpoint."""
    spec, make = ALGORITHMS[name]
    totals: list[int] = []
    out, scratch = folder / "out", folder / "scratch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    scratch.mkdir(exist_ok=True)
    arguments = {"start": None, "reference": None, "out": out, "scratch": scratch, "seed": 11, "save_every": every}
    callbacks = {"on_step": on_step, "on_total": totals.append}
    train(spec, MODELS.get(name, DROPOUT), base_dir, make(), **callbacks, **arguments)  # type: ignore[arg-type]
    assert set(totals) == {len(lines(out))}
    return out


def run_until_killed(base_dir: Path, folder: Path) -> None:
    """Run each training in a fork of this process that is killed with SIGKILL after its first step."""
    for name in ALGORITHMS:
        (folder / name).mkdir()
        pid = os.fork()
        if pid == 0:
            try:
                run(base_dir, name, folder / name, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            finally:
                traceback.print_exc()  # nothing but an error comes here
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, name


@pytest.fixture(scope="module")
def killed(base_dir, tmp_path_factory) -> Path:
    """Return the folder with the trainings that were killed after their first step, in processes of their own."""
    folder = tmp_path_factory.mktemp("killed")
    module = "from pathlib import Path; from tests.algorithms.test_unfinished import run_until_killed"
    code = f"{module}; run_until_killed(Path({str(base_dir)!r}), Path({str(folder)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


class Interrupted(Exception):
    """Raised by the test to interrupt a run."""


def stopped_after(base_dir: Path, name: str, folder: Path, step: int) -> None:
    """Run a training that is interrupted after `step` steps, with the last step saved."""
    steps_left = step

    def on_step(_: dict[str, float]) -> None:
        nonlocal steps_left
        steps_left -= 1
        if not steps_left:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(base_dir, name, folder, on_step)


@pytest.fixture(scope="module")
def undisturbed(base_dir, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {name: run(base_dir, name, folder / name) for name in ALGORITHMS}


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_and_stopped_again_it_ends_in_the_same_bytes(base_dir, killed, undisturbed, name):
    folder = killed / name
    stopped_after(base_dir, name, folder, 3)
    recorded: list[dict[str, float]] = []
    out = run(base_dir, name, folder, recorded.append)
    assert differing(undisturbed[name], out) == []
    whole = lines(undisturbed[name])
    assert len(whole) >= 4
    assert [metrics["step"] for metrics in recorded] == [metrics["step"] for metrics in whole]
    spec, _ = ALGORITHMS[name]
    first = 1 - spec.value_pretraining_steps if isinstance(spec, PPOSpec) else 1
    assert [metrics["step"] for metrics in whole] == list(range(first, first + len(whole)))
    assert [metrics["loss"] for metrics in lines(out)] == [metrics["loss"] for metrics in whole]


@pytest.mark.parametrize("name", ["grpo", "ppo, head", "ppo, model", "sft"])
def test_stopped_after_its_last_step_it_takes_none_again(base_dir, tmp_path, undisturbed, name, monkeypatch):
    steps = len(lines(undisturbed[name]))
    stopped_after(base_dir, name, tmp_path, steps)
    monkeypatch.setattr(torch.optim.AdamW, "step", None)  # any optimizer step fails
    assert differing(undisturbed[name], run(base_dir, name, tmp_path)) == []


@pytest.mark.parametrize("name", ["grpo", "ppo, head", "sft"])
def test_stopped_between_saves_it_saves_what_it_had(base_dir, tmp_path, undisturbed, name):
    """Ctrl-C and SIGTERM arrive as KeyboardInterrupt."""

    recorded: list[dict[str, float]] = []

    def stop(metrics: dict[str, float]) -> None:
        recorded.append(metrics)
        if len(recorded) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(base_dir, name, tmp_path, stop, every=1e9)
    assert [path.name for path in (tmp_path / "scratch" / "unfinished").iterdir()] == ["00000002"]
    assert differing(undisturbed[name], run(base_dir, name, tmp_path)) == []


def test_stopped_within_the_update_of_the_weights_it_goes_back_to_the_last_save(base_dir, tmp_path, undisturbed):
    step = torch.optim.AdamW.step
    with pytest.MonkeyPatch.context() as patch:

        def torn(self, *args, **kwargs):
            step(self, *args, **kwargs)
            if len(list((tmp_path / "scratch" / "unfinished").glob("0*"))):
                raise KeyboardInterrupt

        patch.setattr(torch.optim.AdamW, "step", torn)
        with pytest.raises(KeyboardInterrupt):
            run(base_dir, "grpo", tmp_path)
    assert [path.name for path in (tmp_path / "scratch" / "unfinished").iterdir()] == ["00000001"]
    assert differing(undisturbed["grpo"], run(base_dir, "grpo", tmp_path)) == []


@pytest.mark.parametrize("file", [parts.STATE, parts.RANDOM, parts.RECORD])
def test_a_damaged_state_is_not_used(base_dir, tmp_path, undisturbed, file, caplog):
    stopped_after(base_dir, "grpo", tmp_path, 2)
    [state] = (tmp_path / "scratch" / "unfinished").iterdir()
    damaged = state / "0-of-1" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    recorded: list[dict[str, float]] = []
    out = run(base_dir, "grpo", tmp_path, recorded.append)
    assert differing(undisturbed["grpo"], out) == []
    assert str(state) in caplog.text


def test_a_state_is_written_while_the_next_steps_compute(base_dir, tmp_path, undisturbed, monkeypatch):
    """It is written after two further steps have changed weights, moments and random state."""
    write, third_step = parts.write, threading.Event()

    def late(*arguments):
        assert third_step.wait(60)
        write(*arguments)

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            third_step.set()
            raise Interrupted

    monkeypatch.setattr(parts, "write", late)
    with pytest.raises(Interrupted):
        run(base_dir, "grpo", tmp_path, stop, every=1e-9)
    assert [path.name for path in (tmp_path / "scratch" / "unfinished").iterdir()] == ["00000001"]
    assert differing(undisturbed["grpo"], run(base_dir, "grpo", tmp_path)) == []


@pytest.mark.parametrize("content", [None, b"garbage", "shorter"])
def test_damaged_measurements_name_the_folder_to_remove(base_dir, tmp_path, content):
    stopped_after(base_dir, "ppo, head", tmp_path, 5)
    file = tmp_path / "scratch" / "before.safetensors"
    file.unlink()
    if content == "shorter":
        save_file({"old": torch.zeros(3)}, file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ArtifactDamaged, match=f"remove {tmp_path / 'scratch'} to start it again"):
        run(base_dir, "ppo, head", tmp_path)


def test_garbage_beside_the_state_is_ignored(base_dir, tmp_path, undisturbed, caplog):
    stopped_after(base_dir, "grpo", tmp_path, 2)
    folder = tmp_path / "scratch" / "unfinished"
    (folder / "99999999").touch()
    (folder / "99999998" / "0-of-2").mkdir(parents=True)
    empty = {"steps": []}
    for number, record in enumerate(([], {"files": {}, **empty}, {"files": 1})):
        part = folder / f"9000000{number}" / "0-of-1"
        part.mkdir(parents=True)
        (part / parts.RECORD).write_text(json.dumps(record))
    part = folder / "90000009" / "0-of-1"
    part.mkdir(parents=True)
    (part / parts.RECORD).write_text(json.dumps({**empty, "files": parts._digests(part, empty)}))
    (tmp_path / "scratch" / "guards.jsonl").write_bytes(b'1\n[]\n{"step": "x"}\n\xff\n' + b"[" * 100_000)
    assert differing(undisturbed["grpo"], run(base_dir, "grpo", tmp_path)) == []
    assert caplog.text.count("cannot be used, the training resumes from an earlier state") == 4


def test_a_state_of_another_training_names_the_folder_to_remove(base_dir, tmp_path):
    stopped_after(base_dir, "grpo", tmp_path, 2)
    [state] = (tmp_path / "scratch" / "unfinished").iterdir()
    part = state / "0-of-1"
    save_file({"other/value": torch.zeros(3)}, part / parts.STATE)
    record = json.loads((part / parts.RECORD).read_text())
    del record["files"]
    (part / parts.RECORD).write_text(json.dumps({**record, "files": parts._digests(part, record)}))
    with pytest.raises(ArtifactDamaged, match="is no state of this training"):
        run(base_dir, "grpo", tmp_path)


def test_a_save_that_fails_costs_a_warning(base_dir, tmp_path, undisturbed, monkeypatch, caplog):
    """The limit of a file's size takes the place of a full disk; safetensors raises an error of its own."""
    write, limits = parts.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(parts, "write", limited)
    assert differing(undisturbed["grpo"], run(base_dir, "grpo", tmp_path)) == []
    assert "File too large" in caplog.text
    assert list((tmp_path / "scratch" / "unfinished").iterdir()) == []
