"""Full fine-tuning: the gradient of all weights, the reference, saved files and their readers."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.algorithms.loop.adamw import MASTER, AdamW, adamw
from components.algorithms.policy import full_finetuning
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import trainer
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.train import policy_digest
from components.errors import ArtifactError, ResourceError
from components.inference.protocol import ChatRequest, Sampling
from components.models import trained_weights
from components.models.weights import load_model
from tests.algorithms.builders import (
    MODEL,
    TEMPERATURE,
    batch,
    demonstrations,
    make_context,
    plain_logprobs,
    relative_difference,
    train_in,
    write_start,
)

WHOLE = MODEL.model_copy(update={"lora": None})
SPEC = GRPOSpec(
    learning_rate=1e-4, kl_coefficient=0.2, kl_estimator="k3", max_grad_norm=1e9, pack_tokens=64, dual_clip=None
)


@pytest.fixture(scope="module")
def moved(base_dir, tmp_path_factory):
    """Write a checkpoint whose weights all differ from those of the base."""
    folder = tmp_path_factory.mktemp("moved")
    policy = Policy(base_dir, WHOLE, seed=0)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    policy.save(policy.folder(folder))
    return folder


@pytest.fixture(scope="module")
def trained(base_dir, tmp_path_factory):
    return run(base_dir, tmp_path_factory.mktemp("trained"), batch(), SPEC)


def run(base_dir, folder, trajectories, spec, model=WHOLE, start=None, reference=None):
    return train_in(folder, spec, base_dir, trajectories, model, start=start, reference=reference, seed=1)[0]


@pytest.mark.parametrize("reference", ["base", "checkpoint"])
def test_the_gradient_of_every_weight_is_that_of_the_formula(base_dir, moved, tmp_path, reference):
    policy, trajectories = Policy(base_dir, WHOLE, seed=0), batch()
    policy.load(policy.folder(moved))
    own = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    plain, frozen = (AutoModelForCausalLM.from_pretrained(base_dir) for _ in range(2))
    plain.load_state_dict({**plain.state_dict(), **own}, strict=False)
    plain.tie_weights()
    if reference == "checkpoint":  # weights between those of the policy and the base
        between = {name: (own[name] + tensor) / 2 for name, tensor in dict(frozen.named_parameters()).items()}
        frozen.load_state_dict({**frozen.state_dict(), **between}, strict=False)
        frozen.tie_weights()
        other = Policy(base_dir, WHOLE, seed=0)
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                parameter.copy_(between[name])
        other.save(other.folder(tmp_path / "reference"))
        policy.use_reference(policy.folder(tmp_path / "reference"))

    optimizer, actual = torch.optim.AdamW(policy.parameters.values(), lr=0.0), {}
    optimizer.register_step_pre_hook(
        lambda *_: actual.update({name: parameter.grad.clone() for name, parameter in policy.parameters.items()})
    )
    options = {"step": 0, "seed": 0, "scratch": tmp_path, "on_step": lambda _: None}
    still = SPEC.model_copy(update={"learning_rate": 0.0})
    trainer.train_policy_gradient(still, make_context(policy, optimizer, trajectories, **options))

    total, loss = sum(sum(h.sampled_mask()) for trajectory in trajectories for h in trajectory.histories), 0.0
    for trajectory in trajectories:
        for row in trajectory.histories:
            position = torch.tensor(row.sampled_mask()[1:])
            logp = plain_logprobs(plain, row.token_ids, TEMPERATURE)[position]
            with torch.no_grad():
                ref = plain_logprobs(frozen, row.token_ids, TEMPERATURE)[position]
            old = torch.tensor(row.logprobs[1:])[position]
            ratio = (logp - old.where(~old.isnan(), logp.detach())).exp()
            clipped = ratio.clamp(1 - SPEC.clip_low, 1 + SPEC.clip_high)
            kl = (ref - logp).exp() - (ref - logp) - 1
            surrogate = torch.minimum(ratio * trajectory.advantage, clipped * trajectory.advantage)
            loss = loss + (SPEC.kl_coefficient * kl - surrogate).sum() / total
    loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert relative_difference(actual, expected) < 1e-5
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter, own[name]), name  # the trained weights are restored after the reference


def test_every_weight_learns_and_the_base_stays(base_dir, trained):
    before, after = load_file(base_dir / "model.safetensors"), load_file(trained / "weights" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_training_goes_on_from_its_checkpoint(base_dir, trained, tmp_path):
    """The moments are restored from the checkpoint: two rounds differ from the same round twice."""
    moments = load_file(trained / "optimizer.safetensors")
    again = run(base_dir, tmp_path, batch(), SPEC, start=trained, reference=trained)
    later = load_file(again / "optimizer.safetensors")
    assert moments.keys() == later.keys()
    assert json.loads((again / "trainer.json").read_text())["step"] == 2
    assert policy_digest(again) != policy_digest(trained)


def test_the_engine_and_the_export_compute_what_was_trained(base_dir, trained, tmp_path):
    from components.inference.transformers.engine import TransformersEngine

    policy = Policy(base_dir, WHOLE, seed=0)
    policy.load(policy.folder(trained))
    engine = TransformersEngine(base_dir, device="cpu", max_length=256)
    engine.load_policy("a", str(trained_weights.folder_of(trained)))
    request = ChatRequest([{"role": "user", "content": "Hello."}], [], "a", Sampling(max_tokens=8), seed=3)
    answer = asyncio.run(engine.chat(request))
    trained_weights.merge(base_dir, trained_weights.folder_of(trained), tmp_path / "export")
    exported = load_model(tmp_path / "export")
    named = dict(exported.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in policy.parameters.items())
    ids = answer.prompt_token_ids + answer.token_ids
    expected = plain_logprobs(exported, ids, 1.0)[len(answer.prompt_token_ids) - 1 :].tolist()
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    engine.load_policy("base", None)
    restored = dict(engine.model.named_parameters())
    assert all(torch.equal(p, restored[name]) for name, p in load_model(base_dir).named_parameters())


def test_an_export_says_in_which_type_its_weights_are(base_dir, tmp_path):
    """The base is float32; weights trained in bfloat16 are exported in bfloat16."""
    out = run(base_dir, tmp_path, demonstrations(), SFTSpec(), WHOLE.model_copy(update={"dtype": "bfloat16"}))
    trained_weights.merge(base_dir, trained_weights.folder_of(out), tmp_path / "export")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16


def test_each_setting_of_the_optimizer_reaches_torchs_adamw():
    spec = SFTSpec(learning_rate=0.05, beta1=0.5, beta2=0.7, weight_decay=0.3)
    start = torch.randn(7, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    for parameter, optimizer in (
        (ours, adamw(spec, [[ours]])),
        (theirs, torch.optim.AdamW([theirs], lr=0.05, betas=(0.5, 0.7), weight_decay=0.3)),
    ):
        for step in range(1, 4):
            parameter.grad = start * step
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_steps_smaller_than_bfloat16_add_up():
    """The float32 copy takes torch's own steps; plain AdamW on bfloat16 does not move."""
    draw = torch.Generator().manual_seed(0)
    begin = torch.randn(50, generator=draw).to(torch.bfloat16)
    short, stuck, exact = (torch.nn.Parameter(begin.clone().to(t)) for t in (torch.bfloat16,) * 2 + (torch.float32,))
    ours = AdamW([short], lr=1e-6, weight_decay=0.1)
    others = [torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.1) for parameter in (stuck, exact)]
    for _ in range(300):
        gradient = torch.randn(50, generator=draw).to(torch.bfloat16) + 1
        for parameter in (short, stuck, exact):
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in (ours, *others):
            optimizer.step()
    assert torch.equal(ours.state[short][MASTER], exact.data)
    assert torch.equal(short.data, exact.data.to(torch.bfloat16))
    assert short.grad.dtype == torch.bfloat16
    large = begin.abs() > 0.5  # where a step is far below a unit in the last place
    assert torch.equal(stuck.data[large], begin[large])


def test_gradients_of_many_packs_add_up(base_dir):
    """In bfloat16, 256 + 1 is 256."""
    policy = Policy(base_dir, WHOLE.model_copy(update={"dtype": "bfloat16"}), seed=0)
    weight = next(iter(policy.parameters.values()))
    for _ in range(600):
        weight.sum().backward()
    assert weight.dtype == torch.bfloat16
    assert weight.grad.eq(600).all()


@pytest.mark.parametrize(
    ("model", "kind", "message"), [(WHOLE, MODEL, "no full weights"), (MODEL, WHOLE, "no adapter")]
)
def test_a_checkpoint_of_the_other_kind_is_refused(base_dir, moved, start, tmp_path, model, kind, message):
    other = start if kind is MODEL else moved
    with pytest.raises(ArtifactError, match=rf"{message}.*model\.lora"):
        run(base_dir, tmp_path, batch(), SPEC, model, start=other)


def test_weights_of_another_model_are_refused(base_dir, moved, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(moved / "weights" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    (tmp_path / "weights").mkdir()
    save_file(tensors, tmp_path / "weights" / "model.safetensors")
    policy = Policy(base_dir, WHOLE, seed=0)
    with pytest.raises(ArtifactError, match="another model"):
        policy.load(tmp_path / "weights")
    with pytest.raises(ArtifactError, match="another model"):
        dict(trained_weights.changed_tensors(base_dir, tmp_path / "weights"))


def test_weights_that_the_files_name_otherwise_are_refused_before_training(base_dir, tmp_path, monkeypatch):

    monkeypatch.setattr(full_finetuning, "shapes", lambda folder: {"other.weight": (1,)})
    with pytest.raises(ResourceError, match=r"model\.lora=null.*model\.embed_tokens"):
        Policy(base_dir, WHOLE, seed=0)


def test_only_the_random_start_needs_a_seed(base_dir):
    """Only an adapter starts from random numbers, full fine-tuning does not."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Policy(base_dir, WHOLE, seed=7)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_adapter_checkpoint_stays_what_it_was(base_dir, tmp_path):
    folder = write_start(base_dir, tmp_path / "start")
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert trained_weights.folder_of(folder) == folder / "adapter"


def test_a_supervised_training_in_bfloat16_goes_on_with_its_float32_state(base_dir, trained, tmp_path):
    model = WHOLE.model_copy(update={"dtype": "bfloat16"})
    spec = SFTSpec(learning_rate=1e-4)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = run(base_dir, tmp_path / "first", demonstrations(), spec, model)
    second = run(base_dir, tmp_path / "second", demonstrations(), spec, model, start=first)
    for folder in (first, second):
        state = load_file(folder / "optimizer.safetensors")
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert any(name.endswith(MASTER) for name in state)
    assert policy_digest(second) != policy_digest(first)


def test_tied_weights_that_are_stored_twice_are_sampled_from(base_dir, tmp_path):
    """Some models on the hub are stored this way."""
    import shutil

    from safetensors.torch import save_file

    from components.inference.transformers.engine import TransformersEngine

    shutil.copytree(base_dir, tmp_path / "twice")
    tensors = load_file(base_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice" / "model.safetensors", metadata={"format": "pt"})
    spec = WHOLE.model_copy(update={"name": str(tmp_path / "twice"), "source": "hub"})
    policy = Policy(tmp_path / "twice", spec, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.mul_(1.01)
    policy.save(policy.folder(tmp_path))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= load_file(tmp_path / "weights/model.safetensors").keys()
    engine = TransformersEngine(tmp_path / "twice", device="cpu", max_length=256)
    engine.load_policy("a", str(tmp_path / "weights"))
    named = dict(engine.model.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in policy.parameters.items())
