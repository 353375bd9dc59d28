"""Samples of a scenario at rising temperature, each trained on under the distribution that it was drawn from."""

from __future__ import annotations

import math

import pytest

from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import Before
from components.algorithms.policy_gradient.training_data import Learning
from components.algorithms.spec import GRPOSpec
from components.inference.protocol import Sampling
from components.inference.transformers_engine import TransformersEngine
from components.models.spec import LoraSpec
from tests.deployment.tiny import TINY
from tests.rollout.worlds import Echo, collect, scenarios


def test_a_group_of_several_temperatures_is_exact(base_dir, tmp_path):
    """A fresh adapter changes nothing: what the trainer computes must be what the engine sampled from."""
    engine = TransformersEngine(base_dir, max_length=512, device="cpu")
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=12)
    found = collect(engine, Echo, scenarios(2), group_size=3, sampling=sampling, temperature_step=0.75)
    assert [one.sampling["temperature"] for one in found] == [0.5, 1.25, 2.0] * 2
    policy = Policy(base_dir, TINY.model_copy(update={"device": "cpu", "lora": LoraSpec(rank=4)}), seed=0)
    before = Before(tmp_path)
    before.measure(policy, found, 4096, reference=False, first=True)
    for one in found:
        sampled = [value for value in one.histories[0].logprobs if not math.isnan(value)]
        assert before.whole("old", one) == pytest.approx(sampled, abs=1e-4)
    learning = Learning(GRPOSpec(), before)
    learning.advantages = {one.id: [1.0] * int(one.metrics["sampled_tokens"]) for one in found}
    packs = learning.packs(found)
    assert {cut.temperature for cut, _ in packs} == {0.5, 1.25, 2.0}
    for cut, pack in packs:
        assert policy.logprobs(pack, cut)[0].tolist() == pytest.approx(pack.logprob_S.tolist(), abs=1e-4)
