"""Every online algorithm finds the optimum of a task with a known optimum.

One prompt and one token as the answer; 24 of the 259 tokens are right. The optimum is to always sample a right token.
The head of the tiny model is scaled up, because otherwise no direction of the last layer makes any token likely.
"""

from __future__ import annotations

import pytest
import torch

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy_gradient.spec import (
    CISPOSpec,
    DAPOSpec,
    DrGRPOSpec,
    GRPOSpec,
    GSPOSpec,
    PolicyGradientSpec,
    ReinforcePPSpec,
    RLOOSpec,
)
from components.algorithms.ppo.critic import ValueCritic
from components.algorithms.ppo.spec import PPOSpec
from components.models.distribution import Cut
from tests.algorithms.builders import VOCABULARY, make_context, make_history, make_policy, make_trajectory

PROMPT = [5, 6, 7, 8]
RIGHT = list(range(0, VOCABULARY, 11))
COMMON = {"learning_rate": 1e-2, "beta2": 0.9, "max_kl": 1e9}
GRPO_VARIANTS = [GRPOSpec, DrGRPOSpec, DAPOSpec, GSPOSpec, CISPOSpec, RLOOSpec, ReinforcePPSpec]
ALGORITHMS: dict[str, PolicyGradientSpec] = {
    spec_class.model_fields["name"].default: spec_class(**COMMON) for spec_class in GRPO_VARIANTS
}
ALGORITHMS |= {f"ppo, {kind}": PPOSpec(**COMMON, value=kind, epochs=1, kl_target=None) for kind in ("head", "model")}


def distribution(policy) -> torch.Tensor:
    """Return the (V,) log-probabilities of the answer."""
    [packed] = pack([TokenSequence([*PROMPT, token], [len(PROMPT)]) for token in range(VOCABULARY)], 4096)
    with torch.no_grad():
        return policy.logprobs(packed, Cut())[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_finds_the_right_answers(base_dir, tmp_path, name):
    spec = ALGORITHMS[name]
    policy = make_policy(base_dir)
    policy.model.get_base_model().get_output_embeddings().weight.data.mul_(10)
    groups, critic = [policy.parameters], None
    if isinstance(spec, PPOSpec):
        critic = ValueCritic(policy, spec)
        groups = [policy.parameters, critic.parameters]
    optimizer = torch.optim.AdamW(
        [{"params": list(trajectory.values())} for trajectory in groups],
        betas=(spec.beta1, spec.beta2),
        weight_decay=0.0,
    )
    generator = torch.Generator().manual_seed(0)
    right, step = [], 0
    for number in range(60):
        logps_V = distribution(policy)
        right.append(float(logps_V[RIGHT].exp().sum()))
        drawn = torch.multinomial(logps_V.exp(), 48, replacement=True, generator=generator).tolist()
        episodes = [
            make_trajectory(
                f"g{index // 8}",
                index % 8,
                [make_history([(False, PROMPT), (True, [token])], [float(logps_V[token])])],
                float(token in RIGHT),
                sampling={"temperature": 1.0},
            )
            for index, token in enumerate(drawn)
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        options = {"critic": critic, "step": step, "seed": number, "scratch": folder}
        step, _ = spec.build(make_context(policy, optimizer, episodes, **options)).train()
    assert right[0] < 0.01
    assert right[-1] > 0.95
