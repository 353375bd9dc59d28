"""The adapter that is trained, saved, loaded by plain PEFT, merged and sampled from is one and the same, in every
family of models whose weights transformers renames, joins or transposes."""

from __future__ import annotations

import contextlib
import functools
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.algorithms.policy import sharded
from components.algorithms.policy.adapter import Adapter
from components.algorithms.policy.full_finetuning import FullFinetuning
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.errors import ArtifactError, ResourceError
from components.models import targets, trained_weights
from components.models.distribution import Cut
from components.models.spec import LoraSpec, ModelSpec
from components.models.stored_names import skeleton, to_parameters
from components.models.weights import load_model, prepare
from tests.algorithms.builders import MODEL, batch, plain_logprobs, train_in
from tests.algorithms.test_families import EXPECTED as ALL
from tests.models.families import write

QUICK = [
    *("deepseek_v3", "ernie4_5_moe", "gemma3", "glm4_moe", "gpt2", "gpt_oss", "minimax_m2", "mixtral", "olmoe"),
    *("phimoe", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
]
REFUSED = {
    "hrm_text": r"adapter of .*gate_proj.* cannot be merged .* hold .*gate_up_proj.weight as \(",
    "laguna": r"PEFT reads another adapter .*shared_experts",
}
IDS = torch.arange(3, 27).unsqueeze(0) * 7 % 250 + 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda family: write(family, folder / family))


def plain(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")  # the others have no float64
    return model


@torch.no_grad()
def logprobs(model):
    """Return those of the model in float64."""
    logprobs = torch.log_softmax(model.double()(input_ids=IDS, use_cache=False).logits, -1)
    model.float()
    return logprobs


def spec(base_dir, **lora):
    return ModelSpec(name=str(base_dir), lora=LoraSpec(rank=4, alpha=8.0, **lora))


def perturbed(parameters):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers, of families
@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*ALL} - {*QUICK, *REFUSED}))]
)
def test_every_reader_of_an_adapter_has_the_trained_policy(family, folders, tmp_path):
    base_dir = folders(family)
    adapter = Adapter(plain(base_dir), spec(base_dir), seed=0)
    perturbed(adapter.parameters)
    adapter.check_base(base_dir)
    adapter.save(tmp_path / "adapter")
    adapter.check_saved(tmp_path / "adapter", base_dir)
    trained = logprobs(adapter.model)
    assert (trained - logprobs(plain(base_dir))).abs().max() > 0.01
    torch.testing.assert_close(logprobs(PeftModel.from_pretrained(plain(base_dir), tmp_path / "adapter")), trained)
    trained_weights.merge(base_dir, tmp_path / "adapter", tmp_path / "merged")
    merged = plain(tmp_path / "merged")
    before, after = plain(base_dir).state_dict(), merged.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    sampled = to_parameters(base_dir, dict(trained_weights.changed_tensors(base_dir, tmp_path / "adapter")))
    assert changed == sampled.keys()
    assert all(torch.equal(merged.get_parameter(name), tensor) for name, tensor in sampled.items())
    assert not any(".gate." in name or ".router." in name or "vis" in name for name in changed)
    if family != "jetmoe":  # whose experts are layers of its own kind, which are left alone
        assert any("experts" in name for name in before) == any("experts" in name for name in changed)
    torch.testing.assert_close(logprobs(merged), trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "gemma3"])
def test_plain_peft_reads_a_trained_checkpoint(family, folders, tmp_path):
    base_dir = folders(family)
    model = MODEL.model_copy(update={"name": str(base_dir), "source": "hub"})
    algorithm = GRPOSpec(learning_rate=3e-2, max_kl=1e3)
    out, _, _ = train_in(tmp_path, algorithm, base_dir, batch(), model)
    policy = Policy(base_dir, model, seed=0)
    policy.load(policy.folder(out))
    before, after = plain(base_dir).double(), PeftModel.from_pretrained(plain(base_dir), out / "adapter").double()
    for trajectory in batch():
        (history,) = trajectory.histories
        sampled = [place for place, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
        (packed,) = pack([TokenSequence(history.token_ids, sampled)], 100)
        for reader, expected in ((contextlib.nullcontext, after), (policy.as_reference, before)):
            with torch.no_grad(), reader():
                values = policy.logprobs(packed, Cut(0.7))[0].double()
                plain_values = plain_logprobs(expected, history.token_ids, 0.7)[[place - 1 for place in sampled]]
            torch.testing.assert_close(values, plain_values, atol=2e-4, rtol=0)
    assert (plain_values - plain_logprobs(after, history.token_ids, 0.7)[[p - 1 for p in sampled]]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "gpt2", "qwen3_5_moe"])
def test_all_weights_are_written_back_under_the_names_of_the_files(family, folders, tmp_path):
    base_dir = folders(family)
    whole = FullFinetuning(plain(base_dir), ModelSpec(name=str(base_dir), lora=None), base_dir)
    with whole.as_reference():
        torch.testing.assert_close(logprobs(whole.model), logprobs(plain(base_dir)))
    perturbed(whole.parameters)
    whole.save(tmp_path / "weights")
    trained = logprobs(whole.model)
    trained_weights.merge(base_dir, tmp_path / "weights", tmp_path / "merged")
    assert torch.equal(logprobs(plain(tmp_path / "merged")), trained)
    assert not any("vis" in name for name in load_file(tmp_path / "weights" / trained_weights.FILE))
    again = FullFinetuning(plain(base_dir), ModelSpec(name=str(base_dir), lora=None), base_dir)
    again.load(tmp_path / "weights")
    assert torch.equal(logprobs(again.model), trained)


def test_named_layers_are_adapted_and_routers_only_on_request(folders):
    def trained(family, *names, **lora):
        base_dir = folders(family)
        parameters = Adapter(plain(base_dir), spec(base_dir, target_modules=list(names), **lora), seed=0).parameters
        return {name.partition(".lora_")[0].removeprefix("base_model.model.model.") for name in parameters}

    experts = {"layers.0.mlp.experts", "layers.0.mlp.experts.base_layer"}
    routed = trained("qwen3_moe", "all-linear", "gate")
    assert routed - trained("qwen3_moe", "all-linear") == {"layers.0.mlp.gate", "layers.1.mlp.gate"}
    assert experts < routed
    assert trained("qwen3_moe", "layers.0.mlp.experts") == experts
    assert trained("deepseek_v3", "layers.0.mlp.gate_proj") == {"layers.0.mlp.gate_proj"}
    assert all("language_model" in name for name in trained("gemma3", "q_proj"))
    assert trained("mixtral", "lm_head") == {"base_model.model.lm_head"}
    with pytest.raises(ResourceError, match=r"gate_proj, wq is no layer .* all-linear or some of experts, gate,"):
        targets.check(folders("qwen3_moe"), LoraSpec(target_modules=["q_proj", "gate_proj", "wq"]))
    with pytest.raises(ResourceError, match=r"model.lora.dropout = 0.1: .*experts\.down_proj; expected 0"):
        trained("qwen3_moe", "experts", dropout=0.1)


def test_layers_of_a_saved_adapter_are_named_as_in_its_configuration():
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    cases = [
        (["q_proj"], parameters, ["q_proj", "mlp.experts"]),
        (None, parameters, ["mlp.experts"]),
        (None, None, []),
        (r".*\.q_proj", None, r".*\.q_proj"),
    ]
    for modules, own, expected in cases:
        assert targets.names_of({"target_modules": modules, "target_parameters": own}) == expected
    with pytest.raises(
        ArtifactError, match=r"target_modules = '\.\*q_proj' with target_parameters = .*a list of names"
    ):
        targets.names_of({"target_modules": ".*q_proj", "target_parameters": parameters})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_an_adapter_that_cannot_be_read_or_merged_is_refused_before_it_is_trained(family, folders):
    base_dir = folders(family)
    with pytest.raises(ResourceError, match=REFUSED[family]):
        Adapter(plain(base_dir), spec(base_dir), seed=0).check_base(base_dir)


def test_a_config_that_names_fewer_layers_than_were_trained_ends_the_training(folders, tmp_path):
    """The tensors of the file then have no layer in plain PEFT."""
    base_dir = folders("qwen3_moe")
    adapter = Adapter(plain(base_dir), spec(base_dir), seed=0)
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": None}))
    with pytest.raises(ArtifactError, match=r"PEFT reads another .*experts.* differs, and 11 more"):
        adapter.check_saved(tmp_path, base_dir)


def test_only_models_of_layers_embeddings_and_head_are_sharded(folders):
    """The others are refused before any weight is."""
    for family, problem in (
        ("gemma3", "has model.vision_tower, .* beside its language model"),
        ("gpt2", "has no layers"),
    ):
        with pytest.raises(ResourceError, match=f"strategy fsdp: .* {problem}.*; expected strategy ddp"):
            sharded.shard(plain(folders(family)), spec(folders(family)), [], "fsdp")
    for family in ("qwen3_5", "qwen3_moe"):
        sharded.check(skeleton(folders(family)), spec(folders(family)), "zero2")


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3_moe"])
def test_four_bits_hold_the_rounded_weights_of_the_language_model(family, tmp_path):
    pytest.importorskip("bitsandbytes")
    base_dir = write(family, tmp_path / "base", hidden_size=64, intermediate_size=128)
    rounded = prepare(ModelSpec(name=str(base_dir), quantization="nf4"), tmp_path)
    with torch.no_grad():
        stored, computed = (
            load_model(rounded)(input_ids=IDS).logits,
            load_model(rounded, quantization="nf4")(IDS).logits,
        )
    assert torch.equal(stored, computed)
    before, after = plain(base_dir).state_dict(), plain(rounded).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("vision" in name or "experts" in name for name in changed)


def test_layers_in_four_bits_that_peft_adapts_as_parameters_are_refused(folders):
    pytest.importorskip("bitsandbytes")
    model = ModelSpec(name=str(folders("deepseek_v3")), quantization="nf4")
    rounded = load_model(folders("deepseek_v3"), quantization="nf4")
    with pytest.raises(ResourceError, match=r"model\.quantization: .* in 4 bits \(6 such layers\)"):
        Adapter(rounded, model, seed=0)
