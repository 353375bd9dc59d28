"""Common model families are computed as tries; models that a trie cannot represent are computed as padded rows, with a
warning."""

from __future__ import annotations

import pytest
import torch
import transformers

from components.algorithms.policy import logits, packing
from components.algorithms.policy import policy as policy_module
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.policy_gradient.trainer import train_policy_gradient
from components.models.distribution import Cut
from components.models.spec import ModelSpec
from components.models.weights import prepare
from components.models.widening import widened
from tests.algorithms.builders import batch, make_context, relative_difference

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def save(folder, config, factor: float = 5) -> ModelSpec:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)  # makes attention far from uniform
    model.save_pretrained(folder)
    return ModelSpec(name="some", source="random", device="cpu", max_length=32)


RECURRENT = transformers.Qwen3NextConfig(
    **SMALL,
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=0,
)
BIASED = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
"""Biases by distance, computed from the padding."""
TEMPERATURE = transformers.Llama4TextConfig(
    **SMALL, attn_temperature_tuning=True, floor_scale=4, no_rope_layers=[1, 0], moe_layers=[]
)
GIVEN = [
    TokenSequence([5, 6, 7, 8, *end], [5, 7, 9, 11], weight=weight)
    for weight, end in ((1.0, range(9, 18)), (-0.5, range(10, 19)), (0.7, [9, 10, 30, 31, 32, 33, 34, 35, 36]))
]


ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "Llama": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma": {},
    "Gemma2": WINDOW | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": WINDOW | MIXED,
    "Mistral": WINDOW,
    "Mixtral": WINDOW | EXPERTS,
    "Qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {},
    "GptOss": WINDOW | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Phi3": WINDOW,
    "Olmo3": WINDOW | MIXED,
    "Cohere2": WINDOW | MIXED,
    "Exaone4": WINDOW | MIXED,
    "Glm": {},
    "Glm4": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "DeepseekV3": {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    | {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "Llama4Text": {"moe_layers": []}
    | {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    | {"attn_temperature_tuning": False, "intermediate_size_mlp": 48},
}
LONG = [
    TokenSequence([5, 6, 7, 8, *end], range(3, 4 + len(end)), weight=weight)
    for weight, end in ((1.0, range(9, 25)), (-0.5, range(10, 30)), (0.7, [*range(9, 16), *range(40, 48)]))
]
"""Sequences longer than the windows, which branch within and beyond them."""


def family(name: str) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{name}Config")(**(SMALL | ENDS | FAMILIES[name]))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT, of GPT-2's transposed layers
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT, of experts
def test_families_are_computed_as_tries_exactly(tmp_path, caplog):
    """Log-probabilities and gradients in float64 are those of transformers' eager attention, each sequence by itself.
    Some norms and angles are computed in float32."""
    for name in FAMILIES:
        policy = Policy(tmp_path / name, save(tmp_path / name, family(name), factor=3), seed=0)
        assert policy._layout is packing.trie_layout, (name, caplog.text)
        policy.model.double()
        if hasattr(policy.base, "set_experts_implementation"):
            policy.base.set_experts_implementation("eager")
        (packed,) = pack(LONG, 100)
        logprob_S, _ = policy.logprobs(packed, Cut())
        (logprob_S * packed.weight_S).sum().backward()
        actual = {name: parameter.grad for name, parameter in policy.parameters.items()}
        policy.model.zero_grad()
        policy.base.set_attn_implementation("eager")
        alone_S = backward_alone(policy, LONG)
        assert (logprob_S - alone_S).abs().max() < 1e-5, name
        expected = {name: parameter.grad for name, parameter in policy.parameters.items()}
        assert relative_difference(actual, expected) < 1e-5, name
    assert not caplog.records


def backward_alone(policy: Policy, sequences: list[TokenSequence]) -> torch.Tensor:
    """Add the gradient of the weighted log-probabilities of sequences by themselves. Return the (S,) log-probabilities
    of their targets."""
    alone = []
    for sequence in sequences:
        token_ids_T = torch.tensor(sequence.token_ids)
        logps_TV = policy.model(input_ids=token_ids_T[None]).logits[0].float().log_softmax(-1)
        own_S = torch.stack([logps_TV[target - 1, token_ids_T[target]] for target in sequence.targets])
        (own_S.sum() * sequence.weight).backward()
        alone.append(own_S.detach())
    return torch.cat(alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT, of experts that this model does not have
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (TEMPERATURE, "whose temperature depends on the place of a token in its row"),
        (RECURRENT, "GatedDeltaNet"),
        (BIASED, "own"),
    ],
    ids=["temperature", "recurrent", "biased"],
)
def test_what_a_trie_cannot_say_is_computed_in_padded_rows(tmp_path, config, why, caplog):
    policy = Policy(tmp_path, save(tmp_path, config), seed=0)
    assert policy._layout is packing.padded_layout
    assert "is trained on padded batches" in caplog.text
    assert why in caplog.text
    assert policy.padded
    (packed,) = pack(GIVEN, 100, padded=True)
    logprob_S, _ = policy.logprobs(packed, Cut())
    (logprob_S * packed.weight_S).sum().backward()
    actual = {name: parameter.grad for name, parameter in policy.parameters.items()}
    policy.model.zero_grad()
    alone_S = backward_alone(policy, GIVEN)
    torch.testing.assert_close(logprob_S.detach(), alone_S, atol=2e-5, rtol=1e-5)
    assert relative_difference(actual, {name: parameter.grad for name, parameter in policy.parameters.items()}) <= 1e-4


def wider(folder, config) -> ModelSpec:
    """Return a bfloat16 model with the rounding of a trained model: it is not magnified."""
    return save(folder, config, factor=2).model_copy(update={"dtype": "bfloat16"})


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_rounding_in_bfloat16_is_no_other_attention(tmp_path, family, caplog):
    policy = Policy(tmp_path, wider(tmp_path, getattr(transformers, f"{family}Config")(**SMALL)), seed=0)
    assert policy._layout is packing.trie_layout
    assert not caplog.records


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT, of experts that this model does not have
@pytest.mark.parametrize("config", [TEMPERATURE, RECURRENT], ids=["temperature", "recurrent"])
def test_other_attention_shows_in_bfloat16_too(tmp_path, config, caplog):
    assert Policy(tmp_path, save(tmp_path, config).model_copy(update={"dtype": "bfloat16"}), seed=0).padded
    assert "is trained on padded batches" in caplog.text


def test_widened_computes_what_a_float32_copy_does(tmp_path):
    wider(tmp_path, RECURRENT)
    narrow, wide = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    before = {name: parameter.clone() for name, parameter in narrow.named_parameters()}
    wide.load_state_dict(narrow.state_dict())
    tokens_BT = torch.arange(3, 20)[None]
    with torch.no_grad(), widened(narrow):
        torch.testing.assert_close(narrow(tokens_BT).logits, wide(tokens_BT).logits)
    assert all(torch.equal(parameter, before[name]) for name, parameter in narrow.named_parameters())


def test_a_trained_model_in_bfloat16_shares_prefixes(tmp_path_factory, caplog):
    """SmolLM2 is a Llama; even without a trie, its log-probabilities of unlikely tokens differ by up to half a nat from
    float32."""
    spec = ModelSpec(name="smollm2-135m-instruct", source="package", dtype="bfloat16", device="cpu", max_length=512)
    policy = Policy(prepare(spec, tmp_path_factory.mktemp("weights")), spec, seed=0)
    assert policy._layout is packing.trie_layout
    assert not caplog.records


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT, of experts that this model does not have
def test_the_budget_and_the_count_are_those_of_the_padded_rows(tmp_path):
    policy = Policy(tmp_path, save(tmp_path, RECURRENT).model_copy(update={"max_length": 64}), seed=0)
    trajectories = batch(groups=3, size=4)
    for trajectory in trajectories:
        trajectory.histories[0].token_ids = [token % 47 + 3 for token in trajectory.histories[0].token_ids]
    recorded: list[int] = []
    policy.base.base_model.register_forward_pre_hook(
        lambda _, __, row: recorded.append(row["input_ids"].numel()), with_kwargs=True
    )
    logs: list[dict[str, float]] = []
    spec = GRPOSpec(pack_tokens=100, kl_coefficient=0.0, measure_kl=False, max_kl=1e9)
    optimizer = torch.optim.AdamW(policy.parameters.values())
    context = make_context(policy, optimizer, trajectories, scratch=tmp_path, on_step=logs.append)
    train_policy_gradient(spec, context)
    assert logs[0]["computed_tokens"] == sum(recorded)
    assert max(recorded) <= 100
    assert len(recorded) < len(trajectories)  # several rows in each pack


AFTER = {
    "Gemma2": (transformers.Gemma2Config, {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None}),
    "Gemma3": (transformers.Gemma3TextConfig, {"final_logit_softcapping": 2.0}),
    "Cohere": (transformers.CohereConfig, {"logit_scale": 0.3}),
    "Granite": (transformers.GraniteConfig, {"logits_scaling": 3.0}),
}


@pytest.mark.parametrize("family", AFTER)
def test_capped_and_scaled_logits_are_made_in_parts(tmp_path, monkeypatch, family):
    """The result equals that of the model's own forward pass."""
    kind, extra = AFTER[family]
    policy = Policy(tmp_path, save(tmp_path, kind(**SMALL, **extra)), seed=0)
    monkeypatch.setattr(policy_module, "LOGIT_ROWS", 4)
    rows: list[int] = []
    policy.base.get_output_embeddings().register_forward_hook(
        lambda _, inputs, __: rows.append(inputs[0].shape[:-1].numel())
    )
    (packed,) = pack(GIVEN, 100, padded=policy.padded)
    results = []
    for transform in (policy._logit_transform, None):
        monkeypatch.setattr(policy, "_logit_transform", transform)
        policy.model.zero_grad()
        rows.clear()
        logprob_S, entropy_S = policy.logprobs(packed, Cut(0.7), entropy_gradient=True)
        ((logprob_S + 0.1 * entropy_S) * packed.weight_S).sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in policy.parameters.items()}
        results.append((max(rows), logprob_S.detach(), entropy_S.detach(), grads))
    (in_parts, in_one_pass) = results
    assert in_parts[0] == 4 < len(packed.predicting_U) <= in_one_pass[0]
    torch.testing.assert_close(in_parts[1], in_one_pass[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(in_parts[2], in_one_pass[2], atol=1e-6, rtol=1e-6)
    assert relative_difference(in_parts[3], in_one_pass[3]) <= 1e-5


@pytest.mark.parametrize("family", AFTER)
def test_what_comes_after_the_head_is_found_in_bfloat16_too(tmp_path, family):
    kind, extra = AFTER[family]
    spec = save(tmp_path, kind(**SMALL, **extra), factor=2).model_copy(update={"dtype": "bfloat16"})
    assert Policy(tmp_path, spec, seed=0)._logit_transform not in (None, logits.identity)


def test_what_a_config_says_of_logits_is_believed_where_the_model_does_it(tmp_path, monkeypatch):
    spec = save(tmp_path, transformers.LlamaConfig(**SMALL, logit_scale=0.3))  # Llama ignores this key
    assert Policy(tmp_path, spec, seed=0)._logit_transform is logits.identity
    forward = transformers.LlamaForCausalLM.forward

    def shifted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits.abs()
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", shifted)
    assert Policy(tmp_path, spec, seed=0)._logit_transform is None
