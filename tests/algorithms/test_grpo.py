"""GRPO against a straightforward implementation (plain PEFT model, one sequence after another, AdamW), and against
TRL's own loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.algorithms import checkpoint, grpo
from components.algorithms.spec import GRPOSpec
from components.algorithms.train import train
from components.errors import ArtifactError, TrainingDiverged
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import (
    MODEL,
    TEMPERATURE,
    batch,
    history,
    make_policy,
    plain_logprobs,
    plain_model,
    relative_difference,
    trainable,
    trajectory,
    write_start,
)
from tests.trajectories.builders import FAILURE

SPEC = GRPOSpec(learning_rate=1e-3, weight_decay=0.01, pack_tokens=64, kl_coefficient=0.05, clip_high=0.3)


@pytest.fixture
def run(base_dir, start, tmp_path):
    """train(spec, trajectories, ...) -> (folder of the new checkpoint, metrics, logs by step)."""
    count = iter(range(100))

    def call(spec: GRPOSpec, trajectories: list[Trajectory], *, begin: Path = start, on_step=None, **more):
        out, scratch = tmp_path / f"out{(number := next(count))}", tmp_path / f"scratch{number}"
        out.mkdir()
        scratch.mkdir()
        logs: list[dict[str, float]] = []
        metrics = train(
            spec,
            MODEL,
            base_dir,
            trajectories,
            start=begin,
            out=out,
            scratch=scratch,
            seed=3,
            on_step=on_step or logs.append,
            **{"reference": None, **more},
        )
        return out, metrics, logs

    call.folder = tmp_path
    return call


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def written_out(spec: GRPOSpec, groups: list[list[Trajectory]], model, reference) -> torch.Tensor:
    """The loss as the papers write it: GRPO eq. 3 with DAPO's or GRPO's own normalisation."""
    members = [one for group in groups for one in group]
    tokens = sum(sum(h.sampled_mask()) for one in members for h in one.histories)
    total = torch.zeros(())
    for group in groups:
        rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for one, advantage in zip(group, advantages.float(), strict=True):
            losses = []
            for h in one.histories:
                new_T = plain_logprobs(model, h.token_ids, one.sampling["temperature"])
                with torch.no_grad():
                    reference_T = plain_logprobs(reference, h.token_ids, one.sampling["temperature"])
                for index in (index for index, sampled in enumerate(h.sampled_mask()) if sampled):
                    ratio = torch.exp(new_T[index - 1] - h.logprobs[index])
                    inside = torch.clip(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
                    difference = reference_T[index - 1] - new_T[index - 1]
                    kl = torch.exp(difference) - difference - 1
                    losses.append(-torch.min(ratio * advantage, inside * advantage) + spec.kl_coefficient * kl)
            share = tokens if spec.normalization == "tokens" else len(losses) * len(members)
            total = total + torch.stack(losses).sum() / share
    return total


def reference_step(spec: GRPOSpec, base_dir: Path, groups, reference=None):
    """(loss, gradient norm, tensors of the adapter after one step)."""
    policy = make_policy(base_dir)
    model = plain_model(base_dir, policy)
    if reference is None:
        reference = AutoModelForCausalLM.from_pretrained(base_dir, attn_implementation="sdpa")
    loss = written_out(spec, groups, model, reference)
    loss.backward()
    parameters = list(trainable(model).values())
    norm = torch.nn.utils.clip_grad_norm_(parameters, spec.max_grad_norm)
    betas = (spec.beta1, spec.beta2)
    torch.optim.AdamW(parameters, lr=spec.learning_rate, betas=betas, weight_decay=spec.weight_decay).step()
    from peft import get_peft_model_state_dict

    return loss.item(), norm.item(), get_peft_model_state_dict(model)


def by_group(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    names = list(dict.fromkeys(one.group for one in trajectories))
    return [[one for one in trajectories if one.group == name] for name in names]


@pytest.mark.parametrize("normalization", ["tokens", "sequences"])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05])
def test_one_step_is_the_papers(run, base_dir, start, normalization, kl_coefficient):
    spec = SPEC.model_copy(update={"normalization": normalization, "kl_coefficient": kl_coefficient})
    out, _, (log,) = run(spec, batch())
    loss, norm, expected = reference_step(spec, base_dir, by_group(batch()))
    assert log["loss"] == pytest.approx(loss, abs=1e-5)
    assert log["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert 0.05 < log["clip_fraction"] < 0.95  # both branches of the clip are in the test
    before, after = adapter(start), adapter(out)
    moved = {name: after[name] - before[name] for name in after}
    assert relative_difference(moved, {name: expected[name] - before[name] for name in after}) <= 1e-3
    assert relative_difference(after, expected) <= 1e-6


def test_kl_to_the_checkpoint_from_which_the_rounds_began(run, base_dir, tmp_path):
    other = write_start(base_dir, tmp_path / "reference", seed=7)
    spec = SPEC.model_copy(update={"kl_coefficient": 0.5})
    out, _, (log,) = run(spec, batch(), reference=other)
    frozen = plain_model(base_dir, make_policy(base_dir, seed=7))
    loss, norm, expected = reference_step(spec, base_dir, by_group(batch()), frozen)
    assert log["loss"] == pytest.approx(loss, abs=1e-5)
    assert log["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert relative_difference(adapter(out), expected) <= 1e-6
    from_base = run(spec, batch())[2][0]
    assert abs(from_base["kl"] - log["kl"]) > 1e-3


def test_the_kl_to_itself_is_zero_and_to_the_base_is_not(run, start):
    assert run(SPEC, batch(), reference=start)[2][0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert run(SPEC, batch())[2][0]["kl"] > 1e-3


def test_the_loss_is_that_of_trl(base_dir, start, tmp_path, monkeypatch):
    """TRL 1.16's `_compute_loss`, given our tokens, masks, advantages and log-probabilities."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from components.models.weights import load_tokenizer

    trajectories = batch()
    groups = grpo.with_advantages(trajectories, scale=True)
    assert sum(map(len, groups)) == len(trajectories)
    prompt = 12  # tokens before the first answer, the same in every episode of `batch`
    rows = [one.histories[0] for one in trajectories]
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
        "advantages": torch.tensor([one.advantage for one in trajectories]),
        "num_items_in_batch": torch.tensor(sum(sum(row.sampled_mask()) for row in rows)),
    }
    policy = make_policy(base_dir)
    with torch.no_grad():
        base = plain_model(base_dir, policy)
        with base.disable_adapter():
            logps = [plain_logprobs(base, row.token_ids, TEMPERATURE)[prompt - 1 :].tolist() for row in rows]
    inputs["ref_per_token_logps"] = padded(logps, 0.0)

    for normalization, loss_type in [("tokens", "dapo"), ("sequences", "grpo")]:
        spec = SPEC.model_copy(update={"normalization": normalization, "max_grad_norm": 1e9})
        trainer = GRPOTrainer(
            model=plain_model(base_dir, policy),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(tmp_path),
                loss_type=loss_type,
                beta=spec.kl_coefficient,
                use_bias_correction_kl=False,  # TRL weighs the KL by the ratio by default; the GRPO paper does not
                epsilon=spec.clip_low,
                epsilon_high=spec.clip_high,
                temperature=TEMPERATURE,
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
        theirs = {name: parameter.grad for name, parameter in trainable(trainer.model).items()}

        ours = make_policy(base_dir)
        optimizer = torch.optim.SGD(ours.parameters.values(), lr=0.0)
        grads: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(
            lambda *_, ours=ours, grads=grads: grads.update(
                {name: p.grad.clone() for name, p in ours.parameters.items()}
            )
        )
        logs: list[dict[str, float]] = []
        grpo.train_grpo(spec, ours, optimizer, trajectories, step=0, seed=0, scratch=tmp_path, on_step=logs.append)
        assert logs[0]["loss"] == pytest.approx(loss.item(), abs=1e-5), loss_type
        assert relative_difference(grads, theirs) <= 1e-5, loss_type


def test_the_result_does_not_depend_on_the_size_of_packs(run):
    results = [run(SPEC.model_copy(update={"pack_tokens": size}), batch(size=6)) for size in (64, 200, 4096)]
    first, _, (log,) = results[0]
    for out, _, (other,) in results[1:]:
        assert other["loss"] == pytest.approx(log["loss"], abs=1e-6)
        assert other["computed_tokens"] < log["computed_tokens"] <= log["tokens"]
        assert relative_difference(adapter(out), adapter(first)) <= 1e-6


def test_several_histories_of_one_episode_share_its_advantage(run, base_dir):
    def made() -> list[Trajectory]:
        trajectories = batch(groups=2)
        extra = batch(seed=9, groups=2)
        for one, other in zip(trajectories[::2], extra, strict=False):
            one.histories += other.histories
        return trajectories

    for normalization in ("tokens", "sequences"):
        spec = SPEC.model_copy(update={"normalization": normalization})
        out, _, (log,) = run(spec, made())
        loss, _, expected = reference_step(spec, base_dir, by_group(made()))
        assert log["loss"] == pytest.approx(loss, abs=1e-5)
        assert relative_difference(adapter(out), expected) <= 1e-6


def test_episodes_of_several_temperatures_are_each_computed_at_their_own(run, base_dir):
    def made() -> list[Trajectory]:
        trajectories = batch()
        for index, one in enumerate(trajectories):
            one.sampling = {"temperature": (0.5, 1.0, 1.5)[index % 3], "top_p": 1.0, "top_k": 0}
        return trajectories

    out, _, (log,) = run(SPEC, made())
    loss, _, expected = reference_step(SPEC, base_dir, by_group(made()))
    assert log["loss"] == pytest.approx(loss, abs=1e-5)
    assert relative_difference(adapter(out), expected) <= 1e-6


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}])
def test_episodes_not_drawn_from_the_whole_distribution_are_refused(run, sampling):
    trajectories = batch()
    trajectories[4].sampling = {"temperature": 1.0, **sampling}
    with pytest.raises(ArtifactError, match="s1/1"):
        run(SPEC, trajectories)


def test_failed_and_unscored_episodes_take_no_part(run):
    odd = batch(seed=5, groups=2, size=2)
    for one in odd[:2]:
        one.failure = FAILURE
    odd[2].reward = None  # leaves a group of one, which has nothing to be compared with
    several = batch(groups=3, size=4)
    several[0].failure, several[5].reward = FAILURE, None
    several[0].reward = 1e6
    alone = [one for index, one in enumerate(batch(groups=3, size=4)) if index not in (0, 5)]
    for one in odd:
        one.scenario = type(one.scenario)(f"odd-{one.group}", {}, "train")
    assert adapter_bytes(run(SPEC, [*several, *odd])[0]) == adapter_bytes(run(SPEC, alone)[0])


def adapter_bytes(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_without_spread_everything_stays_as_it_is_byte_for_byte(run):
    begin = run(SPEC, batch())[0]  # a checkpoint with moments
    same = batch(seed=1)
    for one in same:
        one.reward = 0.7
    out, metrics, logs = run(SPEC, same, begin=begin)
    assert metrics == {"skipped": 1.0}
    assert logs == []
    assert adapter_bytes(out) == adapter_bytes(begin)
    for name in ("optimizer.safetensors", "trainer.json", "rng.safetensors", "adapter/adapter_config.json"):
        assert (out / name).read_bytes() == (begin / name).read_bytes(), name


def test_groups_without_spread_do_not_change_the_others(run):
    extra = batch(seed=1)
    for one in extra:
        one.reward = 1.0
        one.scenario = type(one.scenario)(f"flat-{one.group}", {}, "train")
    with_them, without = run(SPEC, [*batch(), *extra]), run(SPEC, batch())
    assert with_them[1]["sampled_tokens"] == without[1]["sampled_tokens"]
    assert with_them[2][0]["loss"] == pytest.approx(without[2][0]["loss"], abs=1e-6)


def test_episodes_without_sampled_tokens_are_nothing_to_learn_from(run):
    empty = batch(groups=1)
    for one in empty:
        one.histories = [history([(False, [5, 6, 7])], [])]
    assert run(SPEC, empty)[1] == {"skipped": 1.0}
    mixed = [*batch(groups=2)]
    mixed[0].histories = [history([(False, [5, 6, 7])], [])]
    for normalization in ("tokens", "sequences"):
        _, _, (log,) = run(SPEC.model_copy(update={"normalization": normalization, "kl_coefficient": 0.0}), mixed)
        assert math.isfinite(log["loss"])


def test_missing_logprobs_leave_the_loss_finite(run):
    trajectories = batch()
    for index, one in enumerate(trajectories):
        logprobs = one.histories[0].logprobs
        logprobs[:] = [(math.nan, -math.inf, -600.0)[index % 3]] * len(logprobs)
    _, _, (log,) = run(SPEC.model_copy(update={"max_kl": 1e12}), trajectories)
    assert all(math.isfinite(value) for value in log.values())


def test_the_kl_to_the_sampler_is_a_mean_over_the_tokens_whose_logprob_is_known(run, base_dir):
    trajectories = batch()
    model = plain_model(base_dir, make_policy(base_dir))
    estimates = []
    for index, one in enumerate(trajectories):
        (only,) = one.histories
        if index % 3:
            only.logprobs[:] = [math.nan] * len(only.logprobs)
            continue
        new_T = plain_logprobs(model, only.token_ids, TEMPERATURE)
        for at in (at for at, sampled in enumerate(only.sampled_mask()) if sampled):
            ratio = math.exp(new_T[at - 1].item() - only.logprobs[at])
            estimates.append(ratio - 1 - math.log(ratio))
    _, _, (log,) = run(SPEC, trajectories)
    assert log["kl_sampler"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)


def test_epochs_and_minibatches_count_steps(run):
    spec = SPEC.model_copy(update={"epochs": 2, "minibatches": 3, "warmup_steps": 4})
    out, metrics, logs = run(spec, batch())
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 5, 6]
    rates = [spec.learning_rate * share for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    assert [log["learning_rate"] for log in logs] == pytest.approx(rates)
    assert json.loads((out / "trainer.json").read_text())["step"] == 6
    tokens = sum(sum(one.histories[0].sampled_mask()) for one in batch())
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


def diverged(run, number: int) -> dict:
    out = run.folder / f"out{number}"
    assert not (out / "adapter").exists()
    assert sorted(path.name for path in out.iterdir()) == []
    return json.loads((run.folder / f"scratch{number}" / "diverged.json").read_text())


def test_a_kl_blow_up_stops_before_a_checkpoint_is_written(run):
    with pytest.raises(TrainingDiverged, match=r"gradient step 1: .*kl_sampler.*max_kl allows 1e-09"):
        run(SPEC.model_copy(update={"max_kl": 1e-9}), batch())
    record = diverged(run, 0)
    assert record["step"] == 1
    assert record["kl_sampler"] > 1e-9
    assert sorted(record["trajectories"]) == sorted(one.id for one in batch())


def test_a_poisoned_parameter_stops_before_a_checkpoint_is_written(run, base_dir, tmp_path):
    begin = write_start(base_dir, tmp_path / "poisoned")
    tensors = adapter(begin)
    next(iter(tensors.values()))[0, 0] = math.nan
    save_file(tensors, begin / "adapter" / "adapter_model.safetensors")
    with pytest.raises(TrainingDiverged, match="loss nan"):
        run(SPEC, batch(), begin=begin)
    assert diverged(run, 0)["loss"] == "nan"


def test_weights_that_are_no_numbers_after_the_last_step_are_not_written(run):
    warm: dict = {}

    def spoil(_) -> None:
        (policy,) = warm.values()
        next(iter(policy.parameters.values())).data[0, 0] = math.inf

    with pytest.raises(TrainingDiverged, match="not_finite 1"):
        run(SPEC, batch(), warm=warm, on_step=spoil)
    assert diverged(run, 0)["not_finite"] == 1


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
    for one in plain:
        one.sampling = {}
    for one in stated:
        one.sampling = {"temperature": 1.0}
    assert adapter_bytes(run(SPEC, plain)[0]) == adapter_bytes(run(SPEC, stated)[0])


def test_advantages_are_set_on_the_trajectories():
    trajectories = [trajectory("a", index, [], reward) for index, reward in enumerate([1.0, 0.0])]
    trajectories += [trajectory("b", index, [], None) for index in range(2)]
    grpo.with_advantages(trajectories, scale=False)
    assert [one.advantage for one in trajectories] == [0.5, -0.5, None, None]


def test_the_checkpoint_holds_its_four_files(run):
    out = run(SPEC, batch())[0]
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == [
        f"{checkpoint.ADAPTER}/adapter_config.json",
        f"{checkpoint.ADAPTER}/adapter_model.safetensors",
        "log.jsonl",
        "optimizer.safetensors",
        "rng.safetensors",
        "trainer.json",
    ]
