"""Training in float16: the scaling rule is torch's, the gradient equals that of float32 up to rounding, and an overflow
changes only the scale."""

from __future__ import annotations

import json
import math

import pytest
import torch

from components.algorithms.loop import loss_scale
from components.algorithms.loop.adamw import AdamW
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.preference.spec import DPOSpec, KTOSpec
from components.algorithms.sft.spec import SFTSpec
from components.errors import TrainingDiverged
from components.models.weights import load_model
from tests.algorithms.builders import MODEL, batch, demonstrations, train_in

HALF = MODEL.model_copy(update={"dtype": "float16"})
ALGORITHMS = {
    "grpo": (GRPOSpec(learning_rate=1e-3, epochs=2, minibatches=2), batch),
    "ppo, head": (PPOSpec(learning_rate=1e-3, epochs=2, value_pretraining_steps=2), batch),
    "ppo, model": (PPOSpec(learning_rate=1e-3, epochs=2, value="model", value_pretraining_steps=2), batch),
    "dpo": (DPOSpec(learning_rate=1e-3, batch_size=2, epochs=2), batch),
    "kto": (KTOSpec(learning_rate=1e-3, batch_size=2, epochs=2), batch),
    "sft": (SFTSpec(learning_rate=1e-3, batch_size=2, epochs=2), demonstrations),
}


@pytest.fixture
def run(base_dir, tmp_path):
    """Return a function that trains and returns the checkpoint's folder and the metrics of each step."""
    counted = iter(range(100))

    def call(spec, trajectories, model=HALF, begin=None):
        options = {"start": begin, "reference": begin, "seed": 5}
        out, _, logs = train_in(tmp_path / str(next(counted)), spec, base_dir, trajectories, model, **options)
        return out, logs

    return call


@pytest.fixture
def begins_at(monkeypatch):
    """Set the initial loss scale of trainings in float16."""

    def call(value: float) -> None:
        monkeypatch.setattr(LossScale, "of", lambda dtype: LossScale(True, value) if dtype == "float16" else OFF)

    return call


OFF = LossScale(False, 1.0)


def gradients(run, monkeypatch, spec, trajectories, model) -> torch.Tensor:
    """Return the gradient of the first step as one vector."""
    first: list[torch.Tensor] = []

    def look(optimizer: AdamW, closure=None) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        first.append(torch.cat([p.grad.float().flatten() for p in parameters if p.grad is not None]))

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "step", look)
        run(spec, trajectories, model)
    return first[0]


def reject_step(optimizer: AdamW, closure=None) -> None:
    raise AssertionError("the optimizer takes a step")


# The rule


def test_the_scale_is_that_of_torch(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale.INITIAL, growth_interval=3)
    ours = LossScale.of("float16")
    assert ours.value == torch.amp.GradScaler("cpu").get_scale()
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.Adam([weight], lr=0.1) for weight in weights]
    generator = torch.Generator().manual_seed(0)
    overflows = 0
    for _ in range(60):
        factor = math.inf if torch.rand((), generator=generator) < 0.2 else float(torch.rand((), generator=generator))
        scaler.scale((weights[0] * factor).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()

        ours.backward((weights[1] * factor).sum())
        ours.unscale([weights[1]])
        overflowed = ours.overflowed({"loss": 0.0, "grad_norm": float(weights[1].grad.norm())})
        overflows += overflowed
        if not overflowed:
            optimizers[1].step()
        ours.update(overflowed)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        assert ours.value == scaler.get_scale()
        assert ours.steps == scaler._growth_tracker.item()
        assert torch.equal(*weights)
    assert 5 < overflows < 20


def test_it_does_not_fall_below_one():
    scale = LossScale(True, 2.0)
    assert scale.overflowed({"loss": 0.0, "grad_norm": math.inf})
    scale.update(True)
    assert scale.value == 1.0
    assert not scale.overflowed({"loss": 0.0, "grad_norm": math.inf})  # the guard responds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types_are_not_scaled(dtype):
    scale = LossScale.of(dtype)
    assert scale.value == 1.0
    scale.update(True)
    scale.load({"value": 8.0, "steps": 1})
    assert (scale.value, scale.state()) == (1.0, {})
    assert not scale.overflowed({"loss": 0.0, "grad_norm": math.inf})


# The gradient


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_that_of_float32_up_to_rounding(run, monkeypatch, name):
    spec, make = ALGORITHMS[name]
    exact, half, brain = (
        gradients(run, monkeypatch, spec, make(), MODEL.model_copy(update={"dtype": dtype}))
        for dtype in ("float32", "float16", "bfloat16")
    )
    half_error, brain_error = ((gradient - exact).norm() / exact.norm() for gradient in (half, brain))
    assert half_error < 2e-2
    assert half_error < brain_error / 2


def test_gradients_that_float16_rounds_to_zero_are_kept_by_the_scale(run, monkeypatch, begins_at):
    spec = GRPOSpec(learning_rate=1e-3, normalization="constant", constant_length=10_000_000)
    exact = gradients(run, monkeypatch, spec, batch(), MODEL)
    scaled = gradients(run, monkeypatch, spec, batch(), HALF)
    begins_at(1.0)
    lost = gradients(run, monkeypatch, spec, batch(), HALF)
    assert (scaled - exact).norm() < 2e-2 * exact.norm()
    assert (lost - exact).norm() > 0.2 * exact.norm()


# Overflows


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_overflows_changes_nothing_but_the_scale(run, begins_at, monkeypatch, name):
    spec, make = ALGORITHMS[name]
    if isinstance(spec, PPOSpec):  # the head alone, in float32, does not overflow
        spec = spec.model_copy(update={"value_pretraining_steps": 0})
    begins_at(2.0**60)
    states: list[dict] = []
    update = LossScale.update

    def look(scale: LossScale, overflowed: bool) -> None:
        states.append({"overflowed": overflowed, "value": scale.value})
        update(scale, overflowed)

    monkeypatch.setattr(LossScale, "update", look)
    monkeypatch.setattr(AdamW, "step", reject_step)
    out, logs = run(spec, make())
    assert len(logs) >= 2
    assert all(state["overflowed"] for state in states)
    assert [log["loss_scale"] for log in logs] == [2.0 ** (60 - index) for index in range(len(logs))]
    assert {log["skipped_steps"] for log in logs} == {log["overflowed_steps"] for log in logs} == {1.0}
    trainer = json.loads((out / "trainer.json").read_text())
    assert trainer["loss_scale"] == {"value": 2.0 ** (60 - len(logs)), "steps": 0}
    assert trainer["optimizer_steps"] == {}
    assert not (out / "strikes.jsonl").exists()


def test_the_scale_falls_until_a_step_can_be_taken_and_the_next_round_goes_on_with_it(run, begins_at):
    spec = GRPOSpec(learning_rate=1e-3, epochs=20)
    begins_at(2.0**30)
    out, logs = run(spec, batch())
    steps = [log for log in logs if not log["skipped_steps"]]
    assert 0 < len(steps) < len(logs)
    value = steps[-1]["loss_scale"]
    _, after = run(spec, batch(seed=1), begin=out)
    assert after[0]["loss_scale"] == value
    assert "loss_scale" not in json.loads((run(spec, batch(), MODEL)[0] / "trainer.json").read_text())


def test_a_loss_that_is_not_finite_is_the_guards(run):
    trajectories = batch()
    trajectories[0].reward = 1e38  # its square, and so the deviation of the batch, is not finite in float32
    spec = PPOSpec(value_norm_decay=None, value_pretraining_steps=0)
    with pytest.raises(TrainingDiverged, match=r"model\.dtype=float32: the largest float16 is 65504"):
        run(spec, trajectories)


def test_an_engine_computes_in_it(base_dir):
    assert next(load_model(base_dir, dtype="float16").parameters()).dtype == torch.float16
