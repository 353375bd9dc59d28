"""Proof of the content of a policy on a vLLM server: a server that computes with other weights is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.errors import ResourceError, StalePolicy
from components.inference.vllm import proof
from components.inference.vllm.proof import ContentProof, reference_logprobs
from tests.deployment.tiny import write_adapter
from tests.inference.test_vllm import requests, seen

RELOAD = ("/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume")
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def whole(base_dir: Path, out: Path, factor: float, without: str | None = None) -> Path:
    """Write trained weights: those of the base, some of them multiplied by a factor."""
    out.mkdir()
    tensors = load_file(base_dir / "model.safetensors")
    tensors = {name: tensor * (factor if "mlp" in name else 1) for name, tensor in tensors.items() if name != without}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_the_reference_is_that_of_peft_in_float64(base_dir, adapter_dir, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    weights = whole(base_dir, tmp_path / "weights", 1.5)
    for folder in (None, adapter_dir, weights):
        model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float64)
        if folder == weights:
            model.load_state_dict(load_file(weights / "model.safetensors"), strict=False)
        elif folder is not None:
            model = PeftModel.from_pretrained(model, folder).to(torch.float64)
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        expected = logprobs_TV[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
        assert reference_logprobs(base_dir, folder and str(folder), PROMPT) == pytest.approx(expected, abs=1e-5)


def test_a_stale_adapter_is_detected_after_a_load_and_after_a_sleep(start, connect, base_dir, adapter_dir, tmp_path):
    other = write_adapter(base_dir, tmp_path / "other", seed=2)
    engine = connect(start(prove=True))
    engine.load_policy("v1", str(adapter_dir))
    engine.load_policy("v2", str(other))
    engine.load_policy("base", None)
    engine = connect(start(prove=True, fault="stale"))
    engine.load_policy("v1", str(adapter_dir))
    with pytest.raises(StalePolicy, match=rf"computes policy@v2 with other weights than those of {other}: .* nats"):
        engine.load_policy("v2", str(other))
    assert engine.policy == "v1"
    for level in (1, 2):
        server = start(prove=True, sleep=level)
        engine = connect(server)
        engine.load_policy("v1", str(adapter_dir))
        engine.release()
        engine.load_policy("v1", str(adapter_dir))
        engine.release()
        engine.load_policy("base", None)
        assert len(seen(server, "/collective_rpc")) == 2 * (level == 2)
        assert sum("prompt_logprobs" in body for body in seen(server, "/v1/completions")) == 3
    engine = connect(start(prove=True, sleep=1, fault="discarded"))
    engine.load_policy("v1", str(adapter_dir))
    engine.release()
    with pytest.raises(StalePolicy, match=r"computes policy@v1 with other weights"):
        engine.load_policy("v1", str(adapter_dir))


def test_a_server_is_given_all_weights_of_each_policy(start, connect, base_dir, tmp_path):
    """Each engine loads its first policy: it cannot know which one another stage has loaded."""
    folders = [whole(base_dir, tmp_path / name, factor) for name, factor in (("v1", 1.5), ("v2", 0.5))]
    server = start(prove=True, max_lora_rank=0)
    engine = connect(server)
    for version, folder in (("v1", folders[0]), ("v2", folders[1]), ("v2", folders[1]), ("base", None)):
        engine.load_policy(version, folder and str(folder))
        assert engine.policy == version
    connect(server).load_policy("base", None)
    reads = [body["kwargs"]["weights_path"] for body in seen(server, "/collective_rpc")]
    assert reads == [*map(str, folders), str(base_dir), str(base_dir)]
    assert "--enable-lora" not in server._command
    assert [path for path, _ in requests(server) if path in RELOAD] == [*RELOAD] * 4
    with pytest.raises(ResourceError, match=r"lacks 1 weights of the model, such as model.norm.weight"):
        engine.load_policy("v3", str(whole(base_dir, tmp_path / "part", 1.0, without="model.norm.weight")))
    assert engine.policy == "base"
    stale, cached = connect(start(prove=True, max_lora_rank=0, fault="stale")), start(max_lora_rank=0, fault="cached")
    stale.load_policy("v1", str(folders[0]))
    with pytest.raises(StalePolicy, match="with other weights than those of"):
        stale.load_policy("v2", str(folders[1]))
    assert stale.policy == ""
    with pytest.raises(StalePolicy, match="keeps keys and values of other weights"):
        connect(cached).load_policy("v1", str(folders[0]))


class Server:
    url = "http://there"
    served: list[float]

    def prompt_logprobs(self, name, prompt):
        return self.served


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_differences_are_judged_by_the_dtype_and_by_the_policy_before(monkeypatch, dtype):
    expected = {"a": [-1.0, -2.0], "b": [-1.004, -2.004], "c": [-1.0, -2.0005]}
    monkeypatch.setattr(proof, "reference_logprobs", lambda base_dir, folder, prompt: expected[folder])
    server, checked = Server(), ContentProof(Path("base"), [1, 2, 3], dtype)
    tolerance = {"float32": 1e-4, "bfloat16": 0.05}[dtype]
    server.served = [-1.0 - 0.9 * tolerance, -2.0 + 0.9 * tolerance]
    checked.check(server, "a", "a")
    for served in ([-1.0 - 1.5 * tolerance, -2.0 - 1.5 * tolerance], [float("nan"), -2.0]):
        server.served = served
        with pytest.raises(StalePolicy, match="with other weights than those of a"):
            checked.check(server, "a", "a")
    if dtype == "bfloat16":  # the rounding hides a difference of 0.004 nats, but not that it is missing
        server.served = expected["a"]
        checked.check(server, "a", "a")
        with pytest.raises(StalePolicy, match=r"computes b with the weights of a: .* differ by 0\.004 nats"):
            checked.check(server, "b", "b")
        checked.check(server, "c", "c")
