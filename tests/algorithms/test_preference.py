"""Preference losses compared with the formulas and with TRL's, and trainings with files.

`test_gradient_matrix_episodes` compares losses and gradients of trainings with the formulas."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.preference import losses
from components.algorithms.preference.kto_trainer import KTOTrainer
from components.algorithms.preference.pair_trainers import DPOTrainer
from components.algorithms.preference.spec import DPOSpec, IPOSpec, KTOSpec, ORPOSpec, PreferenceSpec
from components.algorithms.preference.trainer import Example
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import (
    adapter_bytes,
    batch,
    make_context,
    make_policy,
    train_in,
)

COMMON = {"learning_rate": 1e-3, "pack_tokens": 64, "batch_size": 64, "max_grad_norm": 1e9}
SPECS: dict[str, PreferenceSpec] = {
    "dpo": DPOSpec(**COMMON),
    "dpo, smoothed": DPOSpec(**COMMON, label_smoothing=0.1, pairs="all", beta=0.5),
    "ipo": IPOSpec(**COMMON, pairs="all"),
    "orpo": ORPOSpec(**COMMON),
    "kto": KTOSpec(**COMMON, good_weight=2.0),
}
SUM = st.floats(-60, -0.5, width=32)
ROWS = st.lists(st.tuples(SUM, SUM, SUM, SUM, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def columns(rows) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def sigma(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are importing from 'trl.experimental'")
@settings(deadline=None)
@given(ROWS, st.floats(0.01, 2.0))
def test_orpo_is_trls_odds_ratio(rows, beta):
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    chosen, rejected, _, _, more, less = (column.float() for column in columns(rows))
    ours = losses.orpo(chosen, rejected, more, less, beta)
    stub = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
    expected = -ORPOTrainer.odds_ratio_loss(stub, chosen / more, rejected / less)[0]
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_odds_are_exact_where_a_probability_is_next_to_one():
    near, far = torch.tensor([-1e-6]), torch.tensor([-2.0])
    actual = losses.orpo(near, far, torch.ones(1), torch.ones(1), 1.0).item()
    odds = math.log(math.exp(-1e-6) / -math.expm1(-1e-6)) - math.log(math.exp(-2.0) / -math.expm1(-2.0))
    assert actual == pytest.approx(-math.log(sigma(odds)), rel=1e-3)
    assert math.isfinite(losses.orpo(torch.zeros(1), far, torch.ones(1), torch.ones(1), 1.0).item())


def test_the_reference_point_of_kto_is_at_least_zero():
    """The episodes of `test_gradient_matrix_episodes` have a positive one."""
    logprob, reference, good = torch.tensor([-3.0, -4.0]), torch.tensor([-3.5, -3.0]), torch.tensor([True, False])
    below, zero = (losses.kto(logprob, reference, good, torch.tensor(kl), 0.1) for kl in (-2.0, 0.0))
    assert torch.equal(below, zero)
    assert zero.tolist() == pytest.approx([1 - sigma(0.1 * 0.5), 1 - sigma(0.1 * 1.0)])


# --- on trajectories ------------------------------------------------------------------------------------------------


def episodes() -> list[Trajectory]:
    """Return two-turn episodes with an observation between the turns; rewards around the threshold of KTO."""
    return batch(seed=2, groups=3, size=3)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [6, 1, 2], [8, 1], [5]])
def test_the_reference_point_of_kto_is_measured_across_scenarios(base_dir, tmp_path, sizes):
    """If all episodes are of one scenario, it is measured with another episode of that scenario."""
    trajectories = [
        trajectory for group, size in enumerate(sizes) for trajectory in batch(seed=group, groups=1, size=size)
    ]
    for trajectory, group in zip(trajectories, (g for g, size in enumerate(sizes) for _ in range(size)), strict=True):
        trajectory.scenario = type(trajectory.scenario)(f"s{group}", {}, "train")
        trajectory.id = f"s{group}/{trajectory.sample}"
    policy = make_policy(base_dir)
    spec = SPECS["kto"]
    trainer = KTOTrainer(spec, make_context(policy, None, trajectories, base_dir=base_dir, scratch=tmp_path))
    members = trainer.episodes()
    random.Random(1).shuffle(members)
    answers = {
        tuple(episode.sequences[0].token_ids[min(episode.sequences[0].targets) :]): episode for episode in members
    }
    for part in (members[:4], members[4:5], members[:1]):
        examples = [Example((trajectory,)) for trajectory in part]
        for example in trainer.with_mismatched(examples, members):
            own, mismatched = example.episodes
            (row,), start = mismatched.sequences, min(own.sequences[0].targets)
            assert row.token_ids[:start] == own.sequences[0].token_ids[:start]
            other = answers[tuple(row.token_ids[start:])]
            assert (other.group != own.group) == (len(sizes) > 1)


def test_pairs_of_a_type_are_each_good_episode_with_a_failure_drawn_from_all_scenarios(base_dir, tmp_path, monkeypatch):
    trajectories = batch(seed=3, groups=8, size=5)
    for number, trajectory in enumerate(trajectories):
        kind = ("few", "many", "many", "unbeaten")[number // 5 % 4]
        trajectory.scenario = replace(trajectory.scenario, type=kind)
        trajectory.reward = 1.0 if kind == "unbeaten" else (0.0, 0.4, 0.6, 1.0, 1.0)[number % 5]
    spec = DPOSpec(**COMMON, pairs="type", threshold=0.6, min_margin=0.3)

    def trainer(seed):
        context = make_context(
            make_policy(base_dir), None, trajectories, base_dir=base_dir, scratch=tmp_path, seed=seed
        )
        return DPOTrainer(spec, context)

    def drawn(seed):
        examples = trainer(seed).training_examples(trainer(seed).episodes())
        return [tuple(trajectories[episode.place] for episode in example.episodes) for example in examples]

    pairs = drawn(1)
    good = [row for row in trajectories if row.reward >= 0.6 and row.scenario.type != "unbeaten"]
    assert [winner.id for winner, _ in pairs] == [row.id for row in good]
    assert all(winner.scenario.type == failure.scenario.type for winner, failure in pairs)
    assert {(winner.reward, failure.reward) for winner, failure in pairs} == {(1.0, 0.0), (1.0, 0.4), (0.6, 0.0)}
    assert any(winner.group != failure.group for winner, failure in pairs)
    assert drawn(1) == pairs
    assert drawn(2) != pairs

    computing = trainer(1)
    reference = {episode.place: episode.reference for episode in computing.with_reference(computing.episodes())}
    monkeypatch.setattr(computing, "with_reference", lambda given: measured.extend(given) or original(given))
    original, measured = trainer(1).with_reference, []
    used = [episode for example in computing.referenced_examples() for episode in example.episodes]
    assert {trajectories[episode.place].id for episode in measured} == {row.id for pair in pairs for row in pair}
    assert len(measured) < len(trajectories)
    assert [e.reference for e in used] == pytest.approx([reference[e.place] for e in used], abs=1e-4)


def run(base_dir, folder, spec, trajectories, **more):
    out, *measured = train_in(folder, spec, base_dir, trajectories, save_every=0.0, **more)
    return adapter_bytes(out), *measured


@pytest.mark.parametrize("name", SPECS)
def test_training_raises_the_margin(base_dir, tmp_path, name):
    spec = SPECS[name].model_copy(update={"epochs": 8, "learning_rate": 5e-3})
    _, metrics, logs = run(base_dir, tmp_path, spec, episodes())
    assert logs[-1]["margin"] > logs[0]["margin"] + 0.01
    assert logs[-1]["loss"] < logs[0]["loss"]
    if name != "kto":
        assert logs[-1]["accuracy"] == 1.0
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert metrics["examples"] == {"dpo": 3, "dpo, smoothed": 9, "ipo": 9, "orpo": 3, "kto": 9}[name]


def test_a_batch_of_one_kind_has_no_margin(base_dir, tmp_path):
    good, mixed = episodes(), episodes()
    for trajectory in good:
        trajectory.reward = 1.0
    assert "margin" not in run(base_dir, tmp_path / "good", SPECS["kto"], good)[1]
    spec = SPECS["kto"].model_copy(update={"batch_size": 2})
    _, metrics, logs = run(base_dir, tmp_path / "mixed", spec, mixed)
    margins = [log["margin"] for log in logs if "margin" in log]
    assert 0 < len(margins) < len(logs)
    assert metrics["margin"] == pytest.approx(sum(margins) / len(margins))


def test_what_the_policy_did_not_sample_changes_no_gradient_but_through_what_follows(base_dir, tmp_path):
    """The last observation follows the last answer: its tokens are in no loss."""
    inputs, changed = episodes(), episodes()
    for trajectory in (*inputs, *changed):
        trajectory.histories[0].token_ids += [7, 8, 9] if trajectory in inputs else [20, 21, 22]
        trajectory.histories[0].logprobs += [math.nan] * 3
    assert (
        run(base_dir, tmp_path / "a", SPECS["dpo"], inputs)[0]
        == run(base_dir, tmp_path / "b", SPECS["dpo"], changed)[0]
    )


def test_a_killed_training_goes_on_to_the_same_bytes(base_dir, tmp_path):
    spec = SPECS["kto"].model_copy(update={"epochs": 3, "batch_size": 4})

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(base_dir, tmp_path / "stopped", spec, episodes(), on_step=stop)
    assert (
        run(base_dir, tmp_path / "stopped", spec, episodes())[0]
        == run(base_dir, tmp_path / "whole", spec, episodes())[0]
    )


def test_nothing_to_compare_leaves_everything_as_it_is(base_dir, tmp_path):
    same = episodes()
    for trajectory in same:
        trajectory.reward = 0.5
    _, metrics, logs = run(base_dir, tmp_path / "same", SPECS["dpo"], same)
    assert metrics["skipped"] == 1.0
    assert logs == []
    close = SPECS["dpo"].model_copy(update={"min_margin": 10.0})
    assert run(base_dir, tmp_path / "close", close, episodes())[2] == []
    unscored = episodes()
    for trajectory in unscored[:8]:
        trajectory.reward = None
    assert run(base_dir, tmp_path / "unscored", SPECS["dpo"], unscored)[2] == []


def test_the_size_of_packs_changes_nothing(base_dir, tmp_path):
    first, second = (
        run(base_dir, tmp_path / str(size), SPECS["dpo"].model_copy(update={"pack_tokens": size}), batch(size=6))[2][0]
        for size in (16, 4096)
    )
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert second["computed_tokens"] < first["computed_tokens"]
