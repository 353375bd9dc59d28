"""The policy and its reference: dropout, reference log-probabilities, trained parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.algorithms.policy import logits
from components.algorithms.policy import policy as policy_module
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.models.distribution import Cut
from components.models.spec import LoraSpec
from tests.algorithms.builders import MODEL, make_policy, plain_logprobs, plain_model, relative_difference

TOKENS = [5, 9, 17, 3, 200, 44]
(PACK,) = pack([TokenSequence(TOKENS, list(range(1, len(TOKENS))))], 100)


def logprobs(policy: Policy) -> list[float]:
    with torch.no_grad():
        return policy.logprobs(PACK, Cut())[0].tolist()


def reference_logprobs(policy: Policy) -> list[float]:
    with policy.as_reference():
        return policy.logprobs(PACK, Cut())[0].tolist()


def test_a_fresh_adapter_changes_nothing(base_dir):
    policy = Policy(base_dir, MODEL, seed=0)
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    expected = plain_logprobs(base, TOKENS, 1.0).tolist()
    assert logprobs(policy) == pytest.approx(expected, abs=1e-5)
    assert reference_logprobs(policy) == logprobs(policy)


def test_the_seed_decides_the_adapter(base_dir):
    first, again, other = (Policy(base_dir, MODEL, seed=seed).adapter.tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_reference_is_the_base_or_a_saved_adapter(base_dir, tmp_path):
    policy, other = make_policy(base_dir, seed=0), make_policy(base_dir, seed=1)
    other.save(tmp_path)
    own, learning = logprobs(policy), list(policy.parameters)
    base = plain_logprobs(AutoModelForCausalLM.from_pretrained(base_dir), TOKENS, 1.0).tolist()
    for adapter_dir, expected in [(None, base), (tmp_path, logprobs(other)), (None, base)]:
        policy.use_reference(adapter_dir)
        assert reference_logprobs(policy) == pytest.approx(expected, abs=1e-5)
        assert logprobs(policy) == own
        assert list(policy.parameters) == learning


def test_after_an_error_inside_the_reference_the_policy_is_itself_again(base_dir, tmp_path):
    policy = make_policy(base_dir)
    make_policy(base_dir, seed=1).save(tmp_path)
    own = logprobs(policy)
    for adapter_dir in (None, tmp_path):
        policy.use_reference(adapter_dir)
        with pytest.raises(KeyboardInterrupt), policy.as_reference():
            raise KeyboardInterrupt
        assert logprobs(policy) == own


def test_only_what_learns_drops_out(base_dir, tmp_path):
    lora = LoraSpec(rank=4, alpha=8.0, dropout=0.5)
    policy = make_policy(base_dir, model=MODEL.model_copy(update={"lora": lora}))
    policy.save(tmp_path)
    assert logprobs(policy) != logprobs(policy)
    plain = plain_model(base_dir, policy).eval()
    for adapter_dir in (None, tmp_path):
        policy.use_reference(adapter_dir)
        state = torch.get_rng_state()
        assert reference_logprobs(policy) == reference_logprobs(policy)
        assert torch.equal(torch.get_rng_state(), state)
    assert reference_logprobs(policy) == pytest.approx(plain_logprobs(plain, TOKENS, 1.0).tolist(), abs=1e-5)
    assert logprobs(policy) != logprobs(policy)


def test_dropout_in_the_base_model_is_off_as_it_is_while_sampling(base_dir, tmp_path):
    shutil.copytree(base_dir, tmp_path / "model")
    path = Path(tmp_path / "model" / "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))
    with_it, without = make_policy(tmp_path / "model"), make_policy(base_dir)
    assert with_it.model.config.attention_dropout == 0.5
    assert logprobs(with_it) == logprobs(without)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_a_few_rows_at_a_time_change_nothing(base_dir, monkeypatch, entropy_gradient):
    sequences = [TokenSequence([5, 6, 7, *range(20, 20 + length)], list(range(3, 3 + length))) for length in (9, 4, 6)]
    [packed] = pack(sequences, 1000)
    result = []
    for rows in (1000, 4):
        monkeypatch.setattr(policy_module, "LOGIT_ROWS", rows)
        policy = make_policy(base_dir)
        logprob_S, entropy_S = policy.logprobs(packed, Cut(0.8), entropy_gradient=entropy_gradient)
        assert entropy_S.requires_grad is entropy_gradient
        (logprob_S.sum() + (entropy_S.sum() if entropy_gradient else 0)).backward()
        grads = {name: parameter.grad for name, parameter in policy.parameters.items()}
        result.append((logprob_S.detach(), entropy_S.detach(), grads))
    (all_at_once, few) = result
    assert torch.allclose(all_at_once[0], few[0], atol=1e-6)
    assert torch.allclose(all_at_once[1], few[1], atol=1e-6)
    assert relative_difference(few[2], all_at_once[2]) <= 1e-5


def test_a_model_that_changes_its_logits_after_the_head_is_computed_whole(base_dir, monkeypatch):
    """Some models scale their logits: then the model's own forward pass is used, and the result equals it."""
    policy = make_policy(base_dir)
    plain = logprobs(policy)
    assert policy._logit_transform is logits.identity
    monkeypatch.setattr(policy, "_logit_transform", None)
    assert logprobs(policy) == pytest.approx(plain, abs=1e-6)


def test_layers_that_are_computed_again_give_the_same_gradient(base_dir):
    from transformers.modeling_layers import GradientCheckpointingLayer

    packs = pack([TokenSequence([5, 6, 7, 8, 9], [2, 4]), TokenSequence([5, 6, 10, 11], [3])], 100)[0]
    result = []
    for again in (False, True):
        policy = make_policy(base_dir)
        policy.checkpoint_layers(again)
        calls = []
        layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        logprob_S, _ = policy.logprobs(packs, Cut())
        logprob_S.sum().backward()
        assert len(calls) == 1 + again
        inside = [
            module for layer in layers for name, module in layer.named_modules() if name and "lora_dropout" not in name
        ]
        assert not any(module.training for module in inside)
        result.append({name: parameter.grad for name, parameter in policy.parameters.items()})
    assert all(torch.equal(result[0][name], result[1][name]) for name in result[0])
