"""The documented commands with vLLM, against the argument parser and the configurations of the vLLM that VLLM_PYTHON
has (`make test-vllm`): neither a GPU nor weights are needed, only the configurations of the models."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.inference.engines.vllm import VllmSpec
from components.inference.vllm.server import options
from components.models.spec import ModelSpec
from docs import scale
from flows.experiment.compose import check
from tests.docs.pages import PAGES, ROOT, blocks, commands, words
from tests.test_configs import PROMPTS, missing_requirement

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs vLLM's packages: make test-vllm"),
]

QWEN = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip
CONFIGURATIONS = {
    "smollm2-135m-instruct": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "dtype": "float32",
        "max_position_embeddings": 8192, "vocab_size": 49152,
    },
    "Qwen/Qwen3-0.6B": QWEN | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
    },
    "Qwen/Qwen3-8B": QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    },
}  # fmt: skip
"""Published configurations of the models of the documented commands."""


def folder(model: ModelSpec, root: Path) -> Path:
    """A folder with the configuration of a model."""
    made = root / model.name.replace("/", "--")
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(CONFIGURATIONS[model.name]))
    return made


def ours() -> dict[str, list[str]]:
    """The overrides of each documented command whose run starts a vLLM server, by the command."""
    lines = {line: words(line)[3:] for page in PAGES for line in commands(page) if "inference=vllm" in line}
    lines |= {
        f"scale {name} {'cluster' if cluster else 'GPU'}": scale.command(name, cluster=cluster)
        for name in scale.names()
        for cluster in (False, True)
        if missing_requirement(name) is None
    }
    return {
        label: [word.replace("FILE", str(PROMPTS)) for word in given if "=" in word]
        for label, given in lines.items()
        if "inference=vllm" in given and "inference.urls" not in label
    }


def manual() -> list[str]:
    """The documented command lines of vLLM's server."""
    texts = [block.text for page in PAGES for block in blocks(page)] + [(ROOT / "sky" / "serve.yaml").read_text()]
    joined = [re.sub(r"\\?\n {2,}", " ", text) for text in texts]
    return [line for text in joined for line in re.findall(r"vllm\.entrypoints\.openai\.api_server (.*)", text)]


def test_vllm_accepts_every_documented_command(tmp_path):
    lines: dict[str, tuple[list[str], dict]] = {}
    for label, overrides in ours().items():
        spec = check([*overrides, f"root={tmp_path}"])[0]
        dtype = "bfloat16" if spec.model.dtype == "auto" else spec.model.dtype  # on a GPU
        model = spec.model.model_copy(update={"dtype": dtype})
        base_dir = folder(model, tmp_path)
        spec.inference.check_model(model, base_dir)
        given = options(spec.inference, model, base_dir, 8000, on_cpu=False)
        expected = {"dtype": dtype, "max_length": model.max_length, "logprobs": "processed_logprobs"}
        lines[label] = given, expected | {"rank": max(model.lora.rank, 1)}
    smollm2 = ModelSpec(name="smollm2-135m-instruct", source="package")
    for text in manual():
        names = {"DIR", "MERGED", "/model"}
        words = [str(folder(smollm2, tmp_path)) if word in names else word for word in shlex.split(text)]
        lines[text] = words, {}
    assert len(lines) > 60
    distinct = list(dict.fromkeys(tuple(given) for given, _ in lines.values()))
    answers = dict(zip(distinct, parsed(distinct), strict=True))
    wrong = {}
    for label, (given, expected) in lines.items():
        answer = answers[tuple(given)]
        if "error" in answer or expected.items() - answer.items():
            wrong[label] = answer
    print(f"{len(lines)} commands, {len(distinct)} command lines")
    assert wrong == {}


def test_vllm_refuses_what_is_refused_before_it_starts(tmp_path):
    model = ModelSpec(name="smollm2-135m-instruct", source="package", dtype="bfloat16")
    base_dir = folder(model, tmp_path)
    spec = VllmSpec(arguments={"tensor-parallel-size": 2})
    with pytest.raises(ResourceError, match="has 9 attention heads"):
        spec.check_model(model, base_dir)
    [answer] = parsed([options(spec, model, base_dir, 8000, on_cpu=False)])
    assert "attention heads (9) must be divisible by tensor parallel size (2)" in answer["error"]


def parsed(lines: list) -> list[dict]:
    """vLLM's answers."""
    command = [os.environ["VLLM_PYTHON"], str(Path(__file__).with_name("parse_vllm.py"))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, input=json.dumps(lines), env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
