"""Training and generation on a simulated device: no operation mixes its tensors with those of the CPU, and results are
those of the CPU."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.inference.protocol import ChatRequest, Sampling, TextRequest
from components.inference.transformers import engine as engines
from tests.algorithms.builders import MODEL, batch, make_context, make_policy
from tests.deployment.tiny import write_adapter
from tests.models.simulated_device import WAITED, OnDevice, SimulatedDevice


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(MODEL, tmp_path_factory.mktemp("models"))


def test_mixing_devices_is_an_error():
    with SimulatedDevice():
        here = torch.arange(3, device="meta")
        assert (here + torch.tensor([1, 2, 3], device="meta")).tolist() == [1, 3, 5]
        assert (here + torch.tensor(1)).tolist() == [1, 2, 3]  # numbers are allowed
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            here + torch.tensor([1, 2, 3])
        with pytest.raises(TypeError, match=r"use Tensor\.cpu"):
            here.numpy()
        assert here.cpu().numpy().tolist() == [0, 1, 2]


def trained(policy, scratch, options, spec=GRPOSpec, **context):
    optimizer = torch.optim.AdamW(policy.parameters.values())
    scratch.mkdir()
    algorithm = spec(learning_rate=1e-2, **options)
    algorithm.build(make_context(policy, optimizer, batch(), scratch=scratch, **context)).train()
    return {name: parameter.detach() for name, parameter in policy.parameters.items()}


@pytest.mark.parametrize("options", [{}, {"kl_coefficient": 0.1}, {"ratio": "sequence"}])
def test_a_gradient_step_is_that_of_the_cpu(base_dir, tmp_path, options):
    expected = trained(make_policy(base_dir), tmp_path / "cpu", options)
    policy = make_policy(base_dir)
    with SimulatedDevice():
        policy.model.to("meta")
        policy.device = "meta"
        found = trained(policy, tmp_path / "device", options)
    for name, parameter in found.items():
        assert isinstance(parameter, OnDevice)
        torch.testing.assert_close(parameter.values, expected[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("spec", "options", "before"),
    [
        (GRPOSpec, {}, 0),
        (GRPOSpec, {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}, 0),
        (GRPOSpec, {"ratio": "sequence", "correction": "truncate", "correction_level": "sequence"}, 1),
        (SFTSpec, {"batch_size": 9}, 0),
    ],
)
def test_a_step_waits_for_the_device_at_its_end_only(base_dir, tmp_path, spec, options, before):
    """Once for the sums of its packs and once for the norm of its gradient, for any number of packs. before: waits
    before the first step, for the log-probabilities of the old policy."""
    for pack_tokens in (64, 4096):
        policy = make_policy(base_dir)
        with SimulatedDevice():
            policy.model.to("meta")
            policy.device = "meta"
            scratch = tmp_path / str(pack_tokens)
            trained(policy, scratch, {"pack_tokens": pack_tokens, **options}, spec, base_dir=base_dir)
        assert sum(WAITED.values()) == 2 + before, (pack_tokens, WAITED)


def responses(base_dir, adapter, device, **options):
    """Return tokens and log-probabilities of responses, and the number of waits per pass."""
    samplings = (
        Sampling(max_tokens=6),
        Sampling(0, max_tokens=6),
        Sampling(0.7, top_p=0.9, max_tokens=6),
        Sampling(1.0, top_k=5, min_p=0.01, max_tokens=6),
    )
    asked = [
        ChatRequest([{"role": "user", "content": "hello " + "a" * index}], [], "v1", sampling, index)
        for index, sampling in enumerate(samplings)
    ]
    engine = engines.TransformersEngine(base_dir, max_length=128, device=device, slots=2, **options)
    engine.load_policy("v1", str(adapter))

    async def all_of_them():
        scored = TextRequest([5, 6, 7, 8], "v1", Sampling(max_tokens=3), alternatives=2, scores_prompt=True)
        return await asyncio.gather(*(engine.chat(one) for one in asked), engine.complete(scored))

    WAITED.clear()
    completions = asyncio.run(all_of_them())
    logprobs = [value for one in completions for value in one.logprobs] + completions[-1].prompt_logprobs
    return [one.token_ids for one in completions], logprobs, Counter(WAITED), engine.counters["passes"]


def test_responses_are_those_of_the_cpu(base_dir, tmp_path, on_device):
    adapter = write_adapter(base_dir, tmp_path / "adapter", seed=1)
    expected, expected_logprobs, _, _ = responses(base_dir, adapter, "cpu")
    on_device()
    with SimulatedDevice():
        found, logprobs, waits, passes = responses(base_dir, adapter, "meta")
    assert found == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert waits["aten.index_put_.default"] == 0  # indices on the CPU would be copied in every layer
    assert waits["aten._local_scalar_dense.default"] <= passes  # the width of the cache
