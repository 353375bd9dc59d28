"""GRPO compared with TRL's loss, and its trainings with files. `test_gradient_matrix` compares losses and gradients of
all settings with the formulas."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import (
    DrGRPOSpec,
    GRPOSpec,
    ReinforcePPSpec,
)
from components.algorithms.policy_gradient.trainer import _backward, prepare, train_policy_gradient
from components.errors import ArtifactError, TrainingDiverged
from components.inference.transformers.sampling import truncate
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import (
    TEMPERATURE,
    adapter_bytes,
    batch,
    make_context,
    make_history,
    make_policy,
    make_trajectory,
    plain_logprobs,
    plain_model,
    relative_difference,
    train_in,
    trainable,
)
from tests.trajectories.builders import FAILURE

SPEC = GRPOSpec(
    learning_rate=1e-3,
    weight_decay=0.01,
    pack_tokens=64,
    kl_coefficient=0.05,
    clip_high=0.3,
    dual_clip=None,
    max_kl=1e9,
)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


VARIANTS = {
    "reinforce_pp": ReinforcePPSpec(learning_rate=1e-3, weight_decay=0.01, pack_tokens=64),
    "turns": SPEC.model_copy(update={"credit": "turns", "discount": 0.9}),
    "truncated by token": SPEC.model_copy(update={"correction": "truncate", "correction_limit": 1.3}),
}


def varied() -> list[Trajectory]:
    """Return a batch with step rewards, and with a truncated episode."""
    trajectories = batch()
    for index, trajectory in enumerate(trajectories):
        trajectory.step_rewards = [0.1 * index, 0.5 - 0.07 * index]
    trajectories[4].histories[0].messages[-1].finish_reason = "length"
    return trajectories


def test_the_kl_to_itself_is_zero_and_to_the_base_is_not(run, start):
    assert run(SPEC, batch(), reference=start)[2][0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert run(SPEC, batch())[2][0]["kl"] > 1e-3


def test_without_a_kl_loss_the_kl_is_measured_on_packs_of_the_step(run, monkeypatch):
    """The reference computes as many of them as contain eight sequences; the policy computes nothing twice."""
    calls: list[Pack] = []
    logprobs = Policy.logprobs

    def counted(self, pack, *arguments, **options):
        if torch.isfinite(pack.logprob_S).all():  # not those that probe a new policy
            calls.append(pack)
        return logprobs(self, pack, *arguments, **options)

    monkeypatch.setattr(Policy, "logprobs", counted)
    in_loss = run(SPEC, batch())[2][0]["kl"]
    for tokens in (4096, 64):
        calls.clear()
        log = run(SPEC.model_copy(update={"kl_coefficient": 0.0, "pack_tokens": tokens}), batch())[2][0]
        packs = len({id(pack) for pack in calls})
        assert (packs == 1) == (tokens == 4096)
        twice = [len(pack.members) for pack, following in pairwise(calls) if pack is following]
        assert len(calls) == packs + len(twice)
        assert sum(twice) >= 8 > sum(twice) - max(twice)
        if packs == 1:
            assert log["kl"] == pytest.approx(in_loss, rel=1e-4)


def test_the_loss_is_that_of_trl(base_dir, start, tmp_path, monkeypatch):
    """TRL 1.16's `_compute_loss`, given our tokens, masks, advantages and log-probabilities."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from components.models.weights import load_tokenizer

    trajectories = batch()
    policy = make_policy(base_dir)
    groups, _ = prepare(SPEC, make_context(policy, None, trajectories, scratch=tmp_path))
    assert sum(map(len, groups)) == len(trajectories)
    prompt = 12  # tokens before the first answer, the same in every episode of `batch`
    rows = [trajectory.histories[0] for trajectory in trajectories]
    longest = max(len(row.token_ids) for row in rows) - prompt

    def padded(values, fill) -> torch.Tensor:
        return torch.tensor([[*value, *[fill] * (longest - len(value))] for value in values])

    completion_mask = padded([[1] * (len(row.token_ids) - prompt) for row in rows], 0)
    inputs = {
        "prompt_ids": torch.tensor([row.token_ids[:prompt] for row in rows]),
        "prompt_mask": torch.ones(len(rows), prompt, dtype=torch.long),
        "completion_ids": padded([row.token_ids[prompt:] for row in rows], 0),
        "completion_mask": completion_mask,
        "tool_mask": padded([[int(value) for value in row.sampled_mask()[prompt:]] for row in rows], 0),
        "old_per_token_logps": padded([row.logprobs[prompt:] for row in rows], 0.0).nan_to_num(0.0),
        "advantages": torch.tensor([trajectory.advantage for trajectory in trajectories]),
        "num_items_in_batch": torch.tensor(sum(sum(row.sampled_mask()) for row in rows)),
    }
    with torch.no_grad():
        base = plain_model(base_dir, policy)
        with base.disable_adapter():
            logps = [plain_logprobs(base, row.token_ids, TEMPERATURE)[prompt - 1 :].tolist() for row in rows]
    inputs["ref_per_token_logps"] = padded(logps, 0.0)

    for loss_type, changes, theirs_too in [
        ("dapo", {"normalization": "tokens"}, {}),
        ("grpo", {"normalization": "sequences"}, {}),
        ("dr_grpo", {"normalization": "constant", "constant_length": 40}, {"max_completion_length": 40}),
        ("cispo", {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3}, {"epsilon_high": 1.3}),
        ("grpo", {"normalization": "sequences", "dual_clip": 1.5}, {"delta": 1.5}),
        (
            "grpo",
            {"normalization": "sequences", "ratio": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1},
            {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
        ),
        ("dapo", {"entropy_coefficient": 0.1}, {"entropy_coef": 0.1}),
    ]:
        spec = SPEC.model_copy(update={**changes, "max_grad_norm": 1e9})
        trainer = GRPOTrainer(
            model=plain_model(base_dir, policy),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(tmp_path),
                loss_type=loss_type,
                beta=spec.kl_coefficient,
                use_bias_correction_kl=False,  # TRL weighs the KL by the ratio by default; the GRPO paper does not
                temperature=TEMPERATURE,
                **{"epsilon": spec.clip_low, "epsilon_high": spec.clip_high, **theirs_too},
                per_device_train_batch_size=3,
                num_generations=3,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 3}),
            processing_class=load_tokenizer(base_dir),
        )
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        expected = {name: parameter.grad for name, parameter in trainable(trainer.model).items()}

        # Sequence ratios are taken to the trainer's log-probabilities before the first step, but TRL got those of the
        # batch: these are used as the measured ones here, and a second epoch is taken.
        spec = spec.model_copy(update={"epochs": 2})
        old_S = torch.tensor([value for row in rows for value in row.logprobs if not math.isnan(value)])
        save_file({"old": old_S}, tmp_path / "before.safetensors")
        ours = make_policy(base_dir)
        optimizer = torch.optim.SGD(ours.parameters.values(), lr=0.0)
        grads: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(
            lambda *_, ours=ours, grads=grads: grads.update(
                {name: p.grad.clone() for name, p in ours.parameters.items()}
            )
        )
        logs: list[dict[str, float]] = []
        options = {"scratch": tmp_path, "on_step": logs.append, "earlier_steps": [{"step": 1.0, "seconds": 1.0}]}
        train_policy_gradient(spec, make_context(ours, optimizer, trajectories, **options))
        assert logs[0]["loss"] == pytest.approx(loss.item(), abs=1e-5), (loss_type, changes)
        assert relative_difference(grads, expected) <= 1e-5, (loss_type, changes)


def test_the_result_does_not_depend_on_the_size_of_packs(run):
    results = [run(SPEC.model_copy(update={"pack_tokens": size}), batch(size=6)) for size in (64, 200, 4096)]
    first, _, (log,) = results[0]
    for out, _, (other,) in results[1:]:
        assert other["loss"] == pytest.approx(log["loss"], abs=1e-6)
        assert other["computed_tokens"] < log["computed_tokens"] <= log["tokens"]
        assert relative_difference(adapter(out), adapter(first)) <= 5e-6


CUTS = {"top_p": st.floats(0.2, 0.95), "top_k": st.integers(2, 60), "min_p": st.floats(0.3, 0.95)}


@pytest.mark.parametrize("kind", CUTS)
@given(data=st.data())
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_under_a_cut_the_gradient_does_not_depend_on_the_size_of_packs(policy, tmp_path_factory, kind, data):
    """Most tokens of another policy lie outside this policy's truncated distribution: each is added to its own
    distribution, and not to that of another episode with the same prefix."""
    cut = {kind: data.draw(CUTS[kind], kind)}
    seed, sizes = data.draw(st.integers(0, 99), "seed"), (64, data.draw(st.integers(65, 300), "pack_tokens"), 4096)
    gradients, losses = [], []
    for size in sizes:
        trajectories = batch(seed, groups=2, size=4)
        for trajectory in trajectories:
            trajectory.sampling = {"temperature": TEMPERATURE, **cut}
        spec = GRPOSpec(pack_tokens=size, max_grad_norm=1e9, kl_coefficient=0.1, entropy_coefficient=0.1)
        _, learning = prepare(
            spec, make_context(policy, None, trajectories, scratch=tmp_path_factory.mktemp("scratch"))
        )
        policy.model.zero_grad()
        losses.append(_backward(spec, policy, learning.packs(trajectories))["loss"])
        gradients.append({name: tensor.grad.clone() for name, tensor in policy.parameters.items()})
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-5)
        assert relative_difference(gradient, gradients[0]) <= 1e-4


@pytest.fixture(scope="module")
def policy(base_dir):
    return make_policy(base_dir)


def test_what_the_policy_did_not_sample_is_in_no_loss(run):
    """One observation follows the last answer; an earlier one affects the gradient only through the answers to it."""

    def made(observation: list[int], role: str) -> list[Trajectory]:
        trajectories = batch()
        for trajectory in trajectories:
            history = trajectory.histories[0]
            history.token_ids += observation
            history.logprobs += [
                0.5 if role == "known" else float("nan")
            ] * 3  # belongs to no sampled token and is never read
        return trajectories

    first = run(SPEC, made([7, 8, 9], "unknown"))[0]
    for other in (made([20, 21, 22], "unknown"), made([7, 8, 9], "known")):
        assert adapter_bytes(run(SPEC, other)[0]) == adapter_bytes(first)


def test_greedy_episodes_are_refused(run):
    trajectories = batch()
    trajectories[4].sampling = {"temperature": 0.0}
    with pytest.raises(ArtifactError, match="s1/1"):
        run(SPEC, trajectories)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.3}, {"top_k": 9, "min_p": 0.1}])
def test_the_ratio_is_taken_to_the_cut_distribution(run, base_dir, sampling):
    """On policy, the KL divergence from the sampler is 0 only if both truncate the distribution in the same way."""
    model = plain_model(base_dir, make_policy(base_dir))
    trajectories = batch()
    for trajectory in trajectories:
        trajectory.sampling = {"temperature": TEMPERATURE, **sampling}
        (h,) = trajectory.histories
        for index in (index for index, sampled in enumerate(h.sampled_mask()) if sampled):
            with torch.no_grad():
                logits_V = model(input_ids=torch.tensor([h.token_ids[:index]])).logits[0, -1]
            logps_V = truncate((logits_V / TEMPERATURE).log_softmax(-1), Cut(TEMPERATURE, **sampling))
            h.token_ids[index] = int(logps_V.argmax())  # tokens that could be sampled
            h.logprobs[index] = float(logps_V.max())
    _, _, (log,) = run(SPEC, trajectories)
    assert log["kl_sampler"] == pytest.approx(0.0, abs=1e-5)
    for trajectory in trajectories:
        trajectory.sampling = {"temperature": TEMPERATURE}
    _, _, (log,) = run(SPEC, trajectories)
    assert log["kl_sampler"] > 1e-4


def test_a_token_that_has_left_the_cut_distribution_has_a_finite_ratio(run):
    trajectories = batch()
    for trajectory in trajectories:
        trajectory.sampling = {"temperature": 1.0, "top_k": 1}
    _, _, (log,) = run(SPEC.model_copy(update={"max_kl": 1e9}), trajectories)
    assert all(math.isfinite(value) for value in log.values())


def test_turns_need_a_step_reward_each(run):
    trajectories = varied()
    trajectories[2].step_rewards = [1.0]
    with pytest.raises(ArtifactError, match=r"s0/2 has 1 step rewards for 2 turns"):
        run(VARIANTS["turns"], trajectories)


@pytest.mark.parametrize("name", ["reinforce_pp", "truncated by token"])
def test_what_was_measured_before_the_first_step_survives_a_kill(base_dir, start, tmp_path, name):
    spec = VARIANTS[name].model_copy(update={"epochs": 3})

    def trained(folder: str, stop_at: int | None = None) -> bytes:
        def on_step(metrics: dict[str, float]) -> None:
            if metrics["step"] == stop_at:
                raise KeyboardInterrupt

        options = {"start": start, "save_every": 0.0, "on_step": on_step}
        return adapter_bytes(train_in(tmp_path / folder, spec, base_dir, varied(), **options)[0])

    with pytest.raises(KeyboardInterrupt):
        trained("stopped", stop_at=2)
    assert trained("stopped") == trained("whole")


def test_failed_and_unscored_episodes_take_no_part(run):
    odd = batch(seed=5, groups=2, size=2)
    for trajectory in odd[:2]:
        trajectory.failure = FAILURE
    odd[2].reward = None  # leaves a group of one, without another episode to compare with
    several = batch(groups=3, size=4)
    several[0].failure, several[5].reward = FAILURE, None
    several[0].reward = 1e6
    alone = [trajectory for index, trajectory in enumerate(batch(groups=3, size=4)) if index not in (0, 5)]
    for trajectory in odd:
        trajectory.scenario = type(trajectory.scenario)(f"odd-{trajectory.group}", {}, "train")
        trajectory.id = f"{trajectory.group}/{trajectory.sample}"
    spec = SPEC.model_copy(update={"scale": "group"})  # a group of one counts in the standard deviation of the batch
    assert adapter_bytes(run(spec, [*several, *odd])[0]) == adapter_bytes(run(spec, alone)[0])


def test_without_spread_everything_stays_as_it_is_byte_for_byte(run):
    begin = run(SPEC, batch())[0]  # a checkpoint with moments
    same = batch(seed=1)
    for trajectory in same:
        trajectory.reward = 0.7
    out, metrics, logs = run(SPEC, same, begin=begin)
    assert metrics == {"skipped": 1.0}
    assert logs == []
    assert adapter_bytes(out) == adapter_bytes(begin)
    for name in ("optimizer.safetensors", "trainer.json", "rng.safetensors", "adapter/adapter_config.json"):
        assert (out / name).read_bytes() == (begin / name).read_bytes(), name


def test_groups_without_spread_do_not_change_the_others(run):
    extra = batch(seed=1)
    for trajectory in extra:
        trajectory.reward = 1.0
        trajectory.scenario = type(trajectory.scenario)(f"flat-{trajectory.group}", {}, "train")
        trajectory.id = f"{trajectory.group}/{trajectory.sample}"
    spec = SPEC.model_copy(update={"scale": "group"})  # they count in the standard deviation of the batch
    with_them, without = run(spec, [*batch(), *extra]), run(spec, batch())
    assert with_them[1]["sampled_tokens"] == without[1]["sampled_tokens"]
    assert with_them[2][0]["loss"] == pytest.approx(without[2][0]["loss"], abs=1e-6)


def test_episodes_without_sampled_tokens_are_nothing_to_learn_from(run):
    empty = batch(groups=1)
    for trajectory in empty:
        trajectory.histories = [make_history([(False, [5, 6, 7])], [])]
    assert run(SPEC, empty)[1] == {"skipped": 1.0}
    mixed = [*batch(groups=2)]
    mixed[0].histories = [make_history([(False, [5, 6, 7])], [])]
    for normalization in ("tokens", "sequences"):
        _, _, (log,) = run(SPEC.model_copy(update={"normalization": normalization, "kl_coefficient": 0.0}), mixed)
        assert math.isfinite(log["loss"])


def test_missing_logprobs_leave_the_loss_finite(run):
    trajectories = batch()
    for index, trajectory in enumerate(trajectories):
        logprobs = trajectory.histories[0].logprobs
        logprobs[:] = [(math.nan, -math.inf, -600.0)[index % 3]] * len(logprobs)
    _, _, (log,) = run(SPEC.model_copy(update={"max_kl": 1e12}), trajectories)
    assert all(math.isfinite(value) for value in log.values())


def test_the_kl_to_the_sampler_is_a_mean_over_the_tokens_whose_logprob_is_known(run, base_dir):
    trajectories = batch()
    model = plain_model(base_dir, make_policy(base_dir))
    estimates, gaps = [], []
    for index, trajectory in enumerate(trajectories):
        (only,) = trajectory.histories
        if index % 3:
            only.logprobs[:] = [math.nan] * len(only.logprobs)
            continue
        new_T = plain_logprobs(model, only.token_ids, TEMPERATURE)
        for position in (index for index, sampled in enumerate(only.sampled_mask()) if sampled):
            ratio = math.exp(new_T[position - 1].item() - only.logprobs[position])
            estimates.append(ratio - 1 - math.log(ratio))
            gaps.append(abs(math.log(ratio)))
    _, _, (log,) = run(SPEC, trajectories)
    assert log["kl_sampler"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)
    assert log["sampler_gap"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_steps_after_the_first_are_not_in_the_gap_to_the_sampler(run):
    """The mean KL divergence of the steps contains what the steps before changed."""
    spec = SPEC.model_copy(update={"minibatches": 2, "epochs": 2, "learning_rate": 1e-2})
    _, metrics, logs = run(spec, batch(off_policy=0.0))
    assert ["sampler_gap" in log for log in logs] == [True, False, False, False]
    assert metrics["sampler_gap"] == logs[0]["sampler_gap"]
    assert metrics["kl_sampler"] > logs[0]["kl_sampler"]


def test_epochs_and_minibatches_count_steps(run):
    spec = SPEC.model_copy(update={"epochs": 2, "minibatches": 3, "warmup_steps": 4})
    out, metrics, logs = run(spec, batch())
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 5, 6]
    rates = [spec.learning_rate * share for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    assert [log["learning_rate"] for log in logs] == pytest.approx(rates)
    assert json.loads((out / "trainer.json").read_text())["step"] == 6
    tokens = sum(sum(trajectory.histories[0].sampled_mask()) for trajectory in batch())
    assert metrics["sampled_tokens"] == 2 * tokens
    assert sum(log["sampled_tokens"] for log in logs[:3]) == tokens
    assert metrics["loss"] == pytest.approx(sum(log["loss"] for log in logs) / 6)
    assert [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()] == logs
    after = run(spec, batch(), begin=out)[2]
    assert [log["step"] for log in after] == [7, 8, 9, 10, 11, 12]
    assert {log["learning_rate"] for log in after} == {spec.learning_rate}


def test_more_minibatches_than_groups_with_signal_take_fewer_steps(run):
    _, _, logs = run(SPEC.model_copy(update={"minibatches": 8}), batch(groups=3))
    assert len(logs) == 3


def test_the_second_step_on_a_batch_is_off_policy(run):
    on_policy = batch(off_policy=0.0)
    _, _, logs = run(SPEC.model_copy(update={"epochs": 3, "learning_rate": 1e-2}), on_policy)
    assert logs[2]["kl_sampler"] > logs[1]["kl_sampler"] * 1.01


def diverged(folder: Path) -> dict:
    """Return the record of the first training in a folder, which wrote no checkpoint."""
    assert list((folder / "0" / "out").iterdir()) == []
    return json.loads((folder / "0" / "scratch" / "diverged.json").read_text())


def test_a_kl_blow_up_stops_before_a_checkpoint_is_written(run, tmp_path):
    with pytest.raises(TrainingDiverged, match=r"gradient step 1: .*kl_sampler.*max_kl allows 1e-09"):
        run(SPEC.model_copy(update={"max_kl": 1e-9}), batch())
    record = diverged(tmp_path)
    assert record["step"] == 1
    assert record["kl_sampler"] > 1e-9
    assert sorted(record["trajectories"]) == sorted(trajectory.id for trajectory in batch())


def test_weights_that_are_no_numbers_after_the_last_step_are_not_written(run, tmp_path):
    warm: dict = {}

    def spoil(_) -> None:
        (policy,) = warm.values()
        next(iter(policy.parameters.values())).data[0, 0] = math.inf

    with pytest.raises(TrainingDiverged, match="not_finite 1"):
        run(SPEC, batch(), warm=warm, on_step=spoil)
    assert diverged(tmp_path)["not_finite"] == 1


def test_a_warm_policy_is_clean_after_a_failure(run, monkeypatch):
    warm: dict = {}
    with pytest.raises(TrainingDiverged):
        run(SPEC.model_copy(update={"max_kl": 1e-9}), batch(), warm=warm)

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SPEC.model_copy(update={"epochs": 2}), batch(), warm=warm, on_step=interrupted)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)  # between backward and step
        with pytest.raises(KeyboardInterrupt):
            run(SPEC, batch(), warm=warm)
    assert adapter_bytes(run(SPEC, batch(), warm=warm)[0]) == adapter_bytes(run(SPEC, batch())[0])


def test_unknown_sampling_counts_as_temperature_one(run):
    plain, stated = batch(), batch()
    for trajectory in plain:
        trajectory.sampling = {}
    for trajectory in stated:
        trajectory.sampling = {"temperature": 1.0}
    assert adapter_bytes(run(SPEC, plain)[0]) == adapter_bytes(run(SPEC, stated)[0])


def test_advantages_are_set_on_the_trajectories(base_dir, tmp_path):
    trajectories = [make_trajectory("a", index, [], reward) for index, reward in enumerate([1.0, 0.0])]
    trajectories += [make_trajectory("b", index, [], None) for index in range(2)]
    prepare(DrGRPOSpec(), make_context(make_policy(base_dir), None, trajectories, scratch=tmp_path))
    assert [trajectory.advantage for trajectory in trajectories] == [0.5, -0.5, None, None]


def test_the_checkpoint_holds_its_four_files(run):
    out = run(SPEC, batch())[0]
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "log.jsonl",
        "optimizer.safetensors",
        "rng.safetensors",
        "trainer.json",
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GRPOSpec(scale="group"), {"advantage_divisor", "reward_range"}),
        (GRPOSpec(scale="batch"), {"advantage_divisor", "reward_range"}),
        (DrGRPOSpec(), set()),
        (ReinforcePPSpec(), set()),  # its token rewards have no return of the episode
    ],
)
def test_a_training_states_what_it_divides_by(run, spec, expected):
    _, metrics, _ = run(spec.model_copy(update={"minibatches": 1}), batch(size=2))
    assert {"advantage_divisor", "reward_range"} & set(metrics) == expected
    if expected:
        rewards = [trajectory.reward for trajectory in batch(size=2)]
        assert metrics["reward_range"] == pytest.approx(max(rewards) - min(rewards))
