"""Tests of temperature_step: each sample is trained on under its own sampling distribution."""

from __future__ import annotations

import math

import pytest

from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.policy_gradient.training_data import Learning
from components.inference.protocol import Sampling
from components.inference.transformers.engine import TransformersEngine
from components.models.spec import LoraSpec
from tests.deployment.tiny import TINY
from tests.rollout.worlds import Echo, collect, scenarios


def test_a_group_of_several_temperatures_is_exact(base_dir, tmp_path):
    """A fresh adapter changes nothing: what the trainer computes must be what the engine sampled from."""
    engine = TransformersEngine(base_dir, max_length=512, device="cpu")
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=12)
    trajectories = collect(engine, Echo, scenarios(2), group_size=3, sampling=sampling, temperature_step=0.75)
    assert [trajectory.sampling["temperature"] for trajectory in trajectories] == [0.5, 1.25, 2.0] * 2
    policy = Policy(base_dir, TINY.model_copy(update={"device": "cpu", "lora": LoraSpec(rank=4)}), seed=0)
    before = ReferenceLogprobs(tmp_path)
    before.measure(policy, trajectories, 4096, reference=False, first=True)
    for trajectory in trajectories:
        sampled = [value for value in trajectory.histories[0].logprobs if not math.isnan(value)]
        assert before.whole("old", trajectory) == pytest.approx(sampled, abs=1e-4)
    learning = Learning(GRPOSpec(), before)
    learning.advantages = {
        trajectory.id: [1.0] * int(trajectory.metrics["sampled_tokens"]) for trajectory in trajectories
    }
    packs = learning.packs(trajectories)
    assert {cut.temperature for cut, _ in packs} == {0.5, 1.25, 2.0}
    for cut, planned in packs:
        pack = planned.lay_out()
        assert policy.logprobs(pack, cut)[0].tolist() == pytest.approx(pack.logprob_S.tolist(), abs=1e-4)
