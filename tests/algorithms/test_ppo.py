"""PPO: advantages as sums over deltas, statistics of returns, losses of values, and trainings with files.
`test_gradient_matrix_ppo` compares losses and gradients of trainings with the formula."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError
from safetensors.torch import load_file

from components.algorithms.loop.adamw import AdamW
from components.algorithms.policy import logits, packing, reference_logprobs
from components.algorithms.policy_gradient import training_data
from components.algorithms.policy_gradient.returns import token_rewards
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.ppo.critic import ADAPTER, ReturnStatistics, ValueCritic
from components.algorithms.ppo.gae import gae
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.ppo.trainer import adapted, prepare, train_ppo
from components.errors import ArtifactError, TrainingDiverged
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import (
    batch,
    make_context,
    make_history,
    make_policy,
    plain_model,
    relative_difference,
    write_start,
)

SPEC = PPOSpec(
    learning_rate=1e-3,
    pack_tokens=64,
    epochs=2,
    max_grad_norm=1e9,
    max_kl=1e9,
    dual_clip=None,
    value_clip=0.2,
    value_pretraining_steps=0,
)
SHIPPED = PPOSpec(**OmegaConf.load(Path(__file__).parents[2] / "conf" / "algorithm" / "ppo.yaml"))  # type: ignore[arg-type]
KINDS = ("head", "model")

# --- advantages, rewards, coefficient -------------------------------------------------------------------------------


def sum_of_deltas(rewards: list[float], values: list[float], discount: float, lambda_: float) -> list[float]:
    end = len(values)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * after[t] - values[t] for t in range(end)]
    return [sum((discount * lambda_) ** (k - t) * deltas[k] for k in range(t, end)) for t in range(end)]


NUMBER = st.floats(-4, 4)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBER, NUMBER), max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_sums_over_deltas(rows, discount, lambda_):
    rewards, values = [row[0] for row in rows], [row[1] for row in rows]
    expected = sum_of_deltas(rewards, values, discount, lambda_)
    assert gae(rewards, values, discount, lambda_) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.lists(NUMBER, min_size=1, max_size=5), min_size=1, max_size=6), st.floats(0, 0.95))
def test_statistics_are_weighted_means_over_the_rounds(rounds, decay):
    statistics = ReturnStatistics()
    for returns in rounds:
        statistics = statistics.updated(returns, decay)
    share = torch.tensor([decay**ago for ago in reversed(range(len(rounds)))], dtype=torch.float64)
    share = share / share.sum()
    mean, square = (
        sum(
            w * (torch.tensor(returns, dtype=torch.float64) ** power).mean()
            for w, returns in zip(share, rounds, strict=True)
        )
        for power in (1, 2)
    )
    assert statistics.mean == pytest.approx(float(mean), abs=1e-9)
    assert statistics.variance == pytest.approx(float(square - mean**2), abs=1e-9)
    assert statistics.normalised(statistics.denormalised([0.0, 1.5])) == pytest.approx([0.0, 1.5], abs=1e-9)


def test_statistics_of_what_has_no_unit():
    """Constant returns, and returns whose variance overflows."""
    constant = ReturnStatistics().updated([2.0, 2.0], 0.7)
    assert constant.normalised([2.0, 2.001]) == pytest.approx([0.0, 10.0])
    assert constant.denormalised([0.0]) == [2.0]
    assert constant.updated([1e200, -1e200], 0.7) == constant


def test_values_that_make_no_sense_are_refused():
    wrong = {
        "gae_lambda": [-0.01, 1.01],
        "value_gae_lambda": [-0.01, 1.01, None],
        "value_learning_rate_ratio": [0, -1, math.inf],
        "value_norm_decay": [-0.1, 1],
        "value_pretraining_steps": [-1, 1.5],
        "value_learning_rate": [1e-3],
    }
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(ValidationError) as refused:
                PPOSpec.model_validate({key: value})
            assert [error["loc"] for error in refused.value.errors()] == [(key,)], value


def test_rewards_stand_at_the_last_token_of_their_turn():
    assert token_rewards([1.0], [3]) == [0.0, 0.0, 1.0]
    assert token_rewards([0.5, 2.0], [2, 3]) == [0.0, 0.5, 0.0, 0.0, 2.0]
    assert token_rewards([0.5, 2.0, 1.0], [2, 0, 1]) == [0.0, 2.5, 1.0]
    assert token_rewards([0.5, 2.0], [0, 1]) == [2.5]
    assert token_rewards([0.5], [0]) == []


def test_the_coefficient_follows_the_kl():
    assert adapted(0.2, kl=0.16, target=0.1) == pytest.approx(0.3)
    assert adapted(0.2, kl=0.06, target=0.1) == pytest.approx(0.2 / 1.5)
    assert adapted(0.2, kl=-0.01, target=0.1) == pytest.approx(0.2 / 1.5)  # k1 may be below 0
    for kl in (0.07, 0.1, 0.14):
        assert adapted(0.2, kl=kl, target=0.1) == 0.2
    for kl in (0.0, 9.0, math.nan):
        assert adapted(0.2, kl=kl, target=None) == 0.2


# --- loss and gradient ----------------------------------------------------------------------------------------------


def episodes() -> list[Trajectory]:
    """Return two-turn episodes with an observation in between and step rewards; one episode with two histories, one
    with a single token, one truncated."""
    trajectories = batch()
    for index, trajectory in enumerate(trajectories):
        trajectory.step_rewards = [0.1 * index, 0.5 - 0.07 * index]
    trajectories[1].histories += batch(seed=9)[1].histories
    trajectories[1].step_rewards *= 2
    trajectories[3].histories = [make_history([(False, [9, 10, 11]), (True, [12])], [-5.4])]
    trajectories[3].step_rewards = [0.3]
    trajectories[4].histories[0].messages[-1].finish_reason = "length"
    return trajectories


def make_critic(policy, spec: PPOSpec) -> ValueCritic:
    """Return a critic with non-zero values."""
    critic = ValueCritic(policy, spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in critic.parameters.values():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    return critic


def steps(base_dir, folder, spec: PPOSpec, trajectories: list[Trajectory]):
    """Return (policy, critic, tensors at each step, gradients at each step, logs)."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = make_policy(base_dir)
    critic = make_critic(policy, spec)
    optimizer = torch.optim.SGD(
        [{"params": list(policy.parameters.values())}, {"params": list(critic.parameters.values())}]
    )
    tensors: list[dict[str, torch.Tensor]] = []
    gradients: list[dict[str, torch.Tensor]] = []

    def look(*_) -> None:
        own = policy.parameters | critic.parameters
        tensors.append({name: parameter.detach().clone() for name, parameter in own.items()})
        gradients.append({name: parameter.grad.clone() for name, parameter in own.items()})

    optimizer.register_step_pre_hook(look)
    logs: list[dict[str, float]] = []
    train_ppo(spec, make_context(policy, optimizer, trajectories, critic=critic, scratch=folder, on_step=logs.append))
    return policy, critic, tensors, gradients, logs


@pytest.mark.parametrize("after", [logits.identity, None])
def test_one_pass_gives_what_two_do(base_dir, after):
    policy = make_policy(base_dir)
    policy._logit_transform = after
    packed = packing.pack(
        [packing.TokenSequence([5, 6, 7, 8], [2, 3]), packing.TokenSequence([5, 6, 9, 8], [2, 3])], 64
    )[0]
    with torch.no_grad():
        logprob_S, entropy_S, hidden_UD = policy.logprobs_and_hidden(packed, Cut())
        assert torch.equal(logprob_S, policy.logprobs(packed, Cut())[0])
        assert torch.equal(entropy_S, policy.logprobs(packed, Cut())[1])
        assert torch.equal(hidden_UD, policy.hidden(packed))


@pytest.mark.parametrize("kind", KINDS)
def test_neither_the_size_of_packs_nor_their_order_changes_anything(base_dir, tmp_path, monkeypatch, kind):
    spec = SPEC.model_copy(update={"value": kind, "epochs": 1})
    trajectories = batch(size=6)
    results = [
        steps(base_dir, tmp_path / str(size), spec.model_copy(update={"pack_tokens": size}), trajectories)
        for size in (64, 4096)
    ]

    def backwards(sequences, most, **options):
        return packing.plan(list(sequences)[::-1], most, **options)

    for module in (reference_logprobs, training_data):
        monkeypatch.setattr(module, "plan", backwards)
    results.append(steps(base_dir, tmp_path / "backwards", spec, trajectories))
    (_, _, _, [first], [log]), *others = results
    for _, _, _, [other], [their_log] in others:
        assert their_log["loss"] == pytest.approx(log["loss"], rel=1e-5, abs=1e-6)
        assert relative_difference(other, first) <= 1e-5
    assert results[1][4][0]["computed_tokens"] < log["computed_tokens"]


def test_the_value_model_leaves_the_gradient_of_the_policy_alone(base_dir, tmp_path):
    """The gradient of a head reaches the policy's adapter, that of a separate value model does not."""
    policy = {}
    for kind in KINDS:
        for weight in (0.1, 5.0):
            spec = SPEC.model_copy(update={"value": kind, "value_coefficient": weight, "epochs": 1})
            _, _, _, [actual], _ = steps(base_dir, tmp_path / f"{kind}{weight}", spec, episodes())
            policy[kind, weight] = {name: tensor for name, tensor in actual.items() if ".default." in name}
    assert relative_difference(policy["model", 0.1], policy["model", 5.0]) == 0.0
    assert relative_difference(policy["head", 0.1], policy["head", 5.0]) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_policy_and_critic_are_scaled_down_each(base_dir, tmp_path, kind):
    free, tight = (
        steps(base_dir, tmp_path / name, SPEC.model_copy(update=more), batch())
        for name, more in {
            "free": {"value": kind, "epochs": 1},
            "tight": {"value": kind, "epochs": 1, "max_grad_norm": 1e-3},
        }.items()
    )
    for part, name in (("default", "grad_norm"), ("critic", "value_grad_norm")):
        norms = [
            sum(float(grad.square().sum()) for key, grad in grads[0].items() if part in key) ** 0.5
            for _, _, _, grads, _ in (free, tight)
        ]
        assert norms == [pytest.approx(free[4][0][name], rel=1e-5), pytest.approx(1e-3, rel=1e-2)]
        assert tight[4][0][name] == pytest.approx(norms[0], rel=1e-5)


# --- whole trainings ------------------------------------------------------------------------------------------------


def statistics(folder: Path) -> ReturnStatistics:
    return ReturnStatistics(**json.loads((folder / "critic" / "critic.json").read_text())["returns"])


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "log.jsonl"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_values_learn_what_comes(run, kind):
    """The first tokens of a scenario determine its reward."""
    trajectories = batch(groups=4, size=2)
    for trajectory in trajectories:
        trajectory.reward = float(int(trajectory.group[1:]) % 2)
    ratio = {"head": 20.0, "model": 4.0}[kind]
    spec = SPEC.model_copy(
        update={
            "value": kind,
            "value_learning_rate_ratio": ratio,
            "epochs": 30,
            "value_clip": None,
            "max_grad_norm": 1.0,
        }
    )
    _, _, logs = run(spec, trajectories)
    assert logs[-1]["value_loss"] < 0.2 * logs[0]["value_loss"]
    assert abs(logs[0]["explained_variance"]) < 1e-6  # the head starts at zero
    assert logs[-1]["explained_variance"] > 0.7
    for name in ("kl", "kl_coefficient", "kl_sampler", "clip_fraction", "value_clip_fraction", "entropy", "grad_norm"):
        assert all(math.isfinite(log[name]) for log in logs)


def values_of(base_dir: Path, folder: Path, spec: PPOSpec, trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the values of a checkpoint's critic for each sampled token, in the unit of the rewards."""
    policy = make_policy(base_dir)
    policy.load(policy.folder(folder))
    critic = ValueCritic(policy, spec)
    critic.load(folder / "critic")
    sequences = [
        packing.TokenSequence(
            history_.token_ids, [index for index, sampled in enumerate(history_.sampled_mask()) if sampled]
        )
        for trajectory in trajectories
        for history_ in trajectory.histories
    ]
    result: list[float] = []
    for trajectory in packing.pack(sequences, 4096):
        with torch.no_grad():
            result += critic.statistics.denormalised(critic.logprobs_and_values(trajectory, Cut())[1].tolist())
    return result


@pytest.mark.parametrize(
    ("reward", "before"), [(-250.0, 0), (1.0, 3)], ids=["from the start", "after three rounds without one"]
)
def test_ten_rounds_on_a_constant_reward_bring_the_values_to_it(run, base_dir, reward, before):
    """With the defaults of conf/algorithm/ppo.yaml, on new episodes each round; within 5 %, at every token of new
    episodes."""
    begin, reference = None, None
    for number in range(before + 10):
        trajectories = batch(seed=number, groups=6, size=2, off_policy=0.0)
        for trajectory in trajectories:
            trajectory.reward = 0.0 if number < before else reward
        begin, _, _ = run(SHIPPED, trajectories, begin=begin, reference=reference)
        reference = reference or begin
    values = values_of(base_dir, begin, SHIPPED, batch(seed=99))
    assert max(abs(value - reward) for value in values) < 0.05 * abs(reward)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_critic_learns_before_the_policy_moves(run, monkeypatch, kind):
    spec = SPEC.model_copy(
        update={"value": kind, "value_pretraining_steps": 3, "minibatches": 2, "epochs": 1, "warmup_steps": 4}
    )
    rates: list[list[float]] = []
    learning: list[list[bool]] = []
    take = AdamW.step

    def look(optimizer: AdamW) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        learning.append([any(p.grad is not None for p in group["params"]) for group in optimizer.param_groups])
        take(optimizer)

    monkeypatch.setattr(AdamW, "step", look)
    out, metrics, logs = run(spec, batch())
    again, _, next_logs = run(spec, batch(seed=1), begin=out)
    assert [log["step"] for log in logs] == [-2, -1, 0, 1, 2]
    assert [log["step"] for log in next_logs] == [3, 4]  # a critic from a checkpoint is not pretrained
    rate, rising = spec.learning_rate, (0.25, 0.5, 0.75, 1.0)
    assert learning == [[False, True]] * 3 + [[True, True]] * 4  # learning rates of the policy and of the critic
    assert [critic for _, critic in rates] == pytest.approx([10 * rate] * 3 + [10 * rate * share for share in rising])
    assert [policy for policy, _ in rates[3:]] == pytest.approx([rate * share for share in rising])
    trainer = json.loads((out / "trainer.json").read_text())
    assert trainer["step"] == 2
    of_critic = {name: steps for name, steps in trainer["optimizer_steps"].items() if "critic" in name}
    assert set(of_critic.values()) == {5.0}
    assert {steps for name, steps in trainer["optimizer_steps"].items() if name not in of_critic} == {2.0}
    assert metrics["pretraining_seconds"] > 0
    assert "explained_variance_before" in metrics
    assert json.loads((again / "critic" / "critic.json").read_text())["rounds"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_of_a_new_critic_is_least_squares(base_dir, tmp_path, kind):
    """The head's gradient is that of 1/2 (v - (G - mean) / deviation)² at v = 0, with the policy's hidden states and
    the future rewards G, for any λ."""
    spec = SPEC.model_copy(update={"value": kind, "value_pretraining_steps": 1, "value_gae_lambda": 0.5})
    trajectories, policy = batch(), make_policy(base_dir)
    critic = ValueCritic(policy, spec)
    optimizer = torch.optim.SGD(
        [{"params": list(policy.parameters.values())}, {"params": list(critic.parameters.values())}]
    )
    gradient: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradient.append({name: p.grad.clone() for name, p in critic.parameters.items()})
    )
    parameters = {name: p.detach().clone() for name, p in policy.parameters.items()}
    actions, [log] = prepare(spec, make_context(policy, optimizer, trajectories, critic=critic, scratch=tmp_path))
    assert all(torch.equal(parameters[name], p) for name, p in policy.parameters.items())

    hidden, to_come = [], []
    model = plain_model(base_dir, policy)
    for trajectory in trajectories:
        [h] = trajectory.histories
        targets = [index - 1 for index, sampled in enumerate(h.sampled_mask()) if sampled]
        with torch.no_grad():
            hidden.append(
                model(input_ids=torch.tensor([h.token_ids]), output_hidden_states=True).hidden_states[-1][0, targets]
            )
        kl = torch.tensor(actions.before.kl(trajectory, "k1"), dtype=torch.float64)
        token_rewards = -spec.kl_coefficient * kl
        token_rewards[-1] += trajectory.reward
        to_come.append(token_rewards.flip(0).cumsum(0).flip(0))
    hidden_AD, to_come_A = torch.cat(hidden), torch.cat(to_come)
    target_A = ((to_come_A - to_come_A.mean()) / to_come_A.std(correction=0)).float()
    assert log["loss"] == pytest.approx(0.5, rel=1e-5)
    assert log["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    expected = {
        "critic.weight": -(target_A[:, None] * hidden_AD).mean(0),
        "critic.bias": -target_A.mean(),
    }
    assert torch.allclose(gradient[0]["critic.weight"], expected["critic.weight"], atol=1e-6)
    assert torch.allclose(gradient[0]["critic.bias"], expected["critic.bias"], atol=1e-6)
    values = torch.cat([torch.tensor(actions.before.whole("values", trajectory)) for trajectory in trajectories])
    expected_A = -1.0 * 1e-2 * (hidden_AD @ expected["critic.weight"] + expected["critic.bias"])
    assert torch.allclose(values, expected_A, atol=1e-6)  # measured after the step: SGD with 10 · learning_rate


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_round_goes_on_with_critic_moments_and_coefficient(run, kind, base_dir):
    spec = SPEC.model_copy(update={"value": kind, "kl_target": 10.0})
    first, _, logs = run(spec, batch())
    assert {log["kl_coefficient"] for log in logs} == {0.02}
    record = json.loads((first / "critic" / "critic.json").read_text())
    assert {name: record[name] for name in ("value", "kl_coefficient", "rounds")} == {
        "value": kind,
        "kl_coefficient": pytest.approx(0.02 / 1.5),
        "rounds": 1,
    }
    saved = load_file(first / "critic" / "critic.safetensors")
    assert float(saved["critic.weight"].abs().max()) > 1e-3

    second, _, logs = run(spec, batch(seed=1), begin=first)
    assert {log["kl_coefficient"] for log in logs} == {0.02 / 1.5}
    assert [log["step"] for log in logs] == [3.0, 4.0]
    assert set(json.loads((second / "trainer.json").read_text())["optimizer_steps"].values()) == {4.0}
    still, _, _ = run(spec.model_copy(update={"learning_rate": 1e-30}), batch(seed=1), begin=first)
    assert all(
        torch.equal(tensor, saved[name]) for name, tensor in load_file(still / "critic" / "critic.safetensors").items()
    )

    remaining, _, logs = run(spec.model_copy(update={"kl_target": None}), batch(seed=1), begin=first)
    assert {log["kl_coefficient"] for log in logs} == {0.02}
    assert json.loads((remaining / "critic" / "critic.json").read_text())["kl_coefficient"] == 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_from_is_a_plain_adapter_of_the_policy(run, start, kind):
    out, _, _ = run(SPEC.model_copy(update={"value": kind}), batch())
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    tensors = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (start, out)]
    assert set(tensors[0]) == set(tensors[1])
    assert (start / "adapter" / "adapter_config.json").read_bytes() == (
        out / "adapter" / "adapter_config.json"
    ).read_bytes()
    critic = load_file(out / "critic" / "critic.safetensors")
    assert len(critic) == (2 if kind == "head" else 2 + len(tensors[0]))


def test_a_value_model_begins_as_the_policy_and_a_warm_one_is_as_a_cold_one(run, base_dir, tmp_path):
    spec = SPEC.model_copy(update={"value": "model"})
    still = spec.model_copy(update={"learning_rate": 1e-30})
    begin = write_start(base_dir, tmp_path / "begin", seed=4)
    out, _, _ = run(still, batch(), begin=begin)
    policy = load_file(begin / "adapter" / "adapter_model.safetensors")
    critic = load_file(out / "critic" / "critic.safetensors")
    for name, tensor in policy.items():
        assert torch.equal(critic[name.replace(".weight", f".{ADAPTER}.weight")], tensor)

    warm: dict = {}
    first, _, _ = run(spec, batch(), reference=begin, warm=warm)
    cold = files(run(spec, batch(seed=1), begin=first, reference=begin)[0])
    assert files(run(spec, batch(seed=1), begin=first, reference=begin, warm=warm)[0]) == cold
    assert files(run(spec, batch(), reference=begin, warm=warm)[0]) == files(first)
    grpo = GRPOSpec(learning_rate=1e-3, kl_coefficient=0.1)
    assert files(run(grpo, batch(), begin=first, warm=warm)[0]) == files(run(grpo, batch(), begin=first)[0])


def test_a_critic_of_another_kind_is_refused(run):
    first, _, _ = run(SPEC, batch())
    with pytest.raises(ArtifactError, match=r"algorithm\.value=head"):
        run(SPEC.model_copy(update={"value": "model"}), batch(), begin=first)


def test_what_the_policy_did_not_sample_is_no_action(run, base_dir, tmp_path):
    """Tokens after the last answer are in no loss, and of the tokens before it only the sampled ones are."""
    result, changed = episodes(), episodes()
    for trajectory in (*result, *changed):
        for h in trajectory.histories:
            h.token_ids += [7, 8, 9] if trajectory in result else [20, 21, 22]
            h.logprobs += [math.nan] * 3
    assert files(run(SPEC, result)[0]) == files(run(SPEC, changed)[0])
    policy = make_policy(base_dir)
    critic = make_critic(policy, SPEC)
    actions, _ = prepare(
        SPEC, make_context(policy, torch.optim.SGD(critic.parameters.values()), result, critic=critic, scratch=tmp_path)
    )
    sampled = [
        token
        for trajectory in result
        for h in trajectory.histories
        for token, is_sampled in zip(h.token_ids, h.sampled_mask(), strict=True)
        if is_sampled
    ]
    assert len(actions.return_A) == len(sampled)
    packs = [planned.lay_out() for _, planned in actions.packs(result)]
    assert sorted(int(token) for packed in packs for token in packed.token_S) == sorted(sampled)


def test_failed_and_unscored_episodes_take_no_part(run):
    several = batch()
    several[0].reward = None
    alone = batch()[1:]
    assert files(run(SPEC, several)[0]) == files(run(SPEC, alone)[0])


def test_nothing_to_learn_from_leaves_everything_as_it_is(run):
    begin, _, _ = run(SPEC, batch())
    unscored = batch()
    for trajectory in unscored:
        trajectory.reward = None
    out, metrics, logs = run(SPEC, unscored, begin=begin)
    assert metrics == {"skipped": 1.0}
    assert logs == []
    assert files(out) == files(begin)


def test_equal_episodes_still_teach_the_critic(run):
    same = batch()
    for trajectory in same:
        trajectory.reward = 0.7
    _, _, logs = run(SPEC.model_copy(update={"value_clip": None, "value_norm_decay": None}), same)
    assert logs[1]["value_loss"] < logs[0]["value_loss"]


def test_values_that_leave_the_floats_stop_the_training(run):
    trajectories = batch()
    trajectories[0].reward = 1e30
    raw = SPEC.model_copy(update={"value_norm_decay": None})
    for spec in (raw, raw.model_copy(update={"value_pretraining_steps": 2})):
        with pytest.raises(TrainingDiverged, match="non_finite"):
            run(spec, trajectories)
    for values in run(SPEC, trajectories)[2]:  # normalised returns do not overflow
        assert math.isfinite(values["value_loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_that_warns_changes_nothing_and_one_that_skips_leaves_all_as_it_is(run, start, kind):
    """Each trajectory is measured separately in between; the gradients of policy and critic are restored."""
    spec = SPEC.model_copy(update={"value": kind})
    strict = spec.model_copy(update={"max_kl": 1e-9, "high_kl": "warn"})
    warned = files(run(strict, episodes())[0])
    strikes = [json.loads(line) for line in warned.pop("guards.jsonl").splitlines()]
    assert [strike["step"] for strike in strikes] == [1, 2]
    assert "value_grad_norm" in strikes[0]["worst"][0]
    assert warned == files(run(spec, episodes())[0])
    out, metrics, _ = run(strict.model_copy(update={"high_kl": "skip"}), episodes())
    assert metrics["skipped_steps"] == 2
    assert not load_file(out / "critic" / "critic.safetensors")["critic.weight"].any()
    name = "adapter/adapter_model.safetensors"
    assert (out / name).read_bytes() == (start / name).read_bytes()


def test_a_single_token_is_a_whole_episode(run):
    trajectories = batch(groups=1, size=1)
    trajectories[0].histories = [make_history([(False, [5, 6]), (True, [7])], [-5.5])]
    _, _, logs = run(SPEC, trajectories)
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert "explained_variance" not in logs[0]  # a single return has no variance
