"""`model.dtype: auto` in plan, run and remote stage, and the presets of `conf/model`."""

from __future__ import annotations

import json

import pytest
import yaml

from components.artifacts import stage_key
from components.compute.place import Offer
from components.models import precision
from flows.experiment.compose import compose
from flows.experiment.config_loader import CONF
from flows.experiment.prerequisites import lacking
from flows.planning.plan import plan
from flows.stages.base import Request
from flows.stages.execute import stage_and_spec
from tests.flows.test_online_rl import Recorder

PRESETS = [path for path in (CONF / "model").glob("*.yaml") if "- hf\n" in path.read_text()]
EXPECTED = [
    *(f"qwen3_{size}" for size in ("0_6b", "1_7b", "4b", "8b", "14b", "32b")),
    *("qwen3_5_4b", "llama3_2_1b", "llama3_2_3b", "llama3_1_8b", "gemma3_1b", "gemma3_4b", "gpt_oss_20b", "lfm2_1_2b"),
    *("qwen_coder_0_5b", "gemma3_270m_base"),
]
"""Presets that there are at least."""


@pytest.fixture(autouse=True)
def _without_bfloat16(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "pick_device", lambda device: "cpu")


@pytest.fixture
def bfloat16(tmp_path):
    """Overrides for a local model whose weights are stored in bfloat16."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return ["model=hf", f"model.name={tmp_path / 'model'}", f"root={tmp_path / 'root'}"]


def test_plan_run_and_remote_stage_have_equal_keys_without_auto(bfloat16, tmp_path):
    remote = [
        "compute=sky",
        "compute.default=local",
        "compute.stages.train=sky_h100",
        "compute.stages.evaluate=sky_h100",
    ]
    spec = compose(["+experiment=smoke", *bfloat16, *remote, "store=s3://bucket/prefix"]).model_copy(
        update={"store": None}
    )
    recorder = Recorder(tmp_path, spec=spec)
    requests = recorder.requests
    for label, request in requests.items():
        sent = json.loads(json.dumps(request.to_json()))
        stage, part = stage_and_spec(Request.from_json(sent))
        assert (
            stage_key(stage.name, stage.version, part.key_part(), request.inputs, request.seed) == recorder.keys[label]
        )
        assert '"dtype": "auto"' not in json.dumps(part.key_part()), label
        expected = "bfloat16" if spec.compute.place(stage.name).remote else "float32"
        assert (label, request.spec.get("model", {}).get("dtype", expected)) == (label, expected)
    planned = plan(spec, ask=lambda places: {name: Offer("H100:1", 2.0) for name in places})
    keys = {stage.label: stage.key for stage in planned.stages if stage.key is not None}
    assert {"evaluate[start]", "collect[sft]"} <= keys.keys()
    assert {label: recorder.keys[label] for label in keys} == keys
    assert requests["deploy"].spec["experiment"]["model"]["dtype"] == "bfloat16"
    assert requests["train[1]"].spec["algorithm"]["correction"] == "truncate"
    assert any("model.dtype=auto is float32 where collect runs" in note for note in planned.notes)
    assert any("model.dtype=auto resolves to" in note for note in planned.notes)


def test_a_place_that_cannot_train_in_what_auto_is_there_is_refused_before_the_run(bfloat16, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: MULTI_CPU\nmixed_precision: fp16\nnum_processes: 2\nuse_cpu: true\n")
    place = ["compute=accelerate", f"compute.config_file={file}", "model.device=cpu", "collect.scenarios=8"]
    spec = compose(["+experiment=smoke", *bfloat16, *place])
    (problem,) = [text for text in lacking(spec) if "dtype" in text]
    assert "mixed_precision = fp16: is model.dtype=float16, but model.dtype=float32" in problem


def test_each_preset_composes_and_is_planned(tmp_path):
    assert set(EXPECTED) <= {path.stem for path in PRESETS}
    for path in PRESETS:
        spec = compose([f"model={path.stem}", "name=preset", "rounds=1", f"root={tmp_path}"])
        limit = int(path.read_text().partition("# up to ")[2].split()[0])
        assert (path.stem, spec.model.name) == (path.stem, yaml.safe_load(path.read_text())["name"])
        assert spec.model.lora is not None, path.stem
        assert 2048 <= spec.model.max_length <= limit, path.stem
        planned = plan(spec)
        notes = [note for note in planned.notes if note.startswith("model.dtype=auto resolves to float32")]
        resolved = spec.model.source == "hub" and spec.model.dtype == "auto"
        assert (path.stem, len(notes)) == (path.stem, int(resolved))
    stated = [path.stem for path in (CONF / "model").glob("*.yaml") if "dtype: float32" in path.read_text()]
    assert len(stated) <= 2, stated
