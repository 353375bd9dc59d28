"""Guards strike before a bad checkpoint is written, and name the trajectories that contributed most."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import DAPOSpec, GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.errors import TrainingDiverged
from components.trajectories.store import read_trajectories
from tests.algorithms.builders import MODEL, batch, demonstrations, make_context, train_in
from tests.algorithms.test_checkpoint import DROPOUT, differing

GRPO = GRPOSpec(learning_rate=1e-3, minibatches=3)
SFT = SFTSpec(learning_rate=1e-3, batch_size=2, schedule="constant")


def run(base_dir: Path, spec, folder: Path, make=None, model=MODEL) -> tuple[Path, dict[str, float]]:
    trajectories = make() if make else batch() if isinstance(spec, GRPOSpec) else demonstrations()
    return train_in(folder, spec, base_dir, trajectories, model)[:2]


def strikes(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "guards.jsonl").read_text().splitlines()]


@pytest.fixture
def poison(monkeypatch):
    """Return poison(tokens), which makes the gradient of any sequence with these tokens NaN."""
    logprobs = Policy.logprobs

    def apply(tokens: list[int]) -> None:
        def poisoned(self, pack, cut, **options):
            logprob_S, entropy_S = logprobs(self, pack, cut, **options)
            ids = pack.token_ids_N.tolist()
            contains = any(ids[start : start + len(tokens)] == tokens for start in range(len(ids)))
            return (logprob_S * math.nan if contains else logprob_S), entropy_S

        monkeypatch.setattr(Policy, "logprobs", poisoned)

    return apply


def tokens_of(base_dir: Path, which: str) -> list[int]:
    """Return tokens that only one trajectory contains."""
    if which == "grpo":
        (episode,) = [trajectory for trajectory in batch() if trajectory.id == batch()[4].id]
        return episode.histories[0].token_ids[-6:-1]
    from components.models.weights import load_tokenizer

    return load_tokenizer(base_dir)("day 4.", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("name", "spec", "culprit"), [("grpo", GRPO, batch()[4].id), ("sft", SFT, "d4/0")])
def test_what_is_not_finite_stops_and_names_who_did_it(base_dir, tmp_path, poison, name, spec, culprit):
    poison(tokens_of(base_dir, name))
    with pytest.raises(TrainingDiverged, match=rf"No checkpoint was written.*non_finite: {culprit} contributed most"):
        run(base_dir, spec, tmp_path)
    assert not (tmp_path / "out" / "adapter").exists()
    record = json.loads((tmp_path / "scratch" / "diverged.json").read_text())
    assert record["guard"] == "non_finite"
    assert record["worst"][0]["trajectory"] == culprit
    assert record["worst"][0]["loss"] == "nan"
    assert all(entry["loss"] != "nan" for entry in record["worst"][1:])
    remaining = list(read_trajectories(tmp_path / "scratch" / "diverged.parquet"))
    assert [trajectory.id for trajectory in remaining] == record["trajectories"]


@pytest.mark.parametrize(("name", "spec", "culprit"), [("grpo", GRPO, batch()[4].id), ("sft", SFT, "d4/0")])
def test_a_skipped_step_leaves_weights_and_optimizer_alone(base_dir, tmp_path, poison, name, spec, culprit, caplog):
    poison(tokens_of(base_dir, name))
    out, metrics = run(base_dir, spec.model_copy(update={"non_finite": "skip"}), tmp_path)
    assert metrics["skipped_steps"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    [strike] = strikes(out)
    assert (strike["guard"], strike["action"], strike["worst"][0]["trajectory"]) == ("non_finite", "skip", culprit)
    assert "is skipped" in caplog.text
    steps = json.loads((out / "trainer.json").read_text())
    assert steps["step"] == 3
    assert set(steps["optimizer_steps"].values()) == {2.0}


@pytest.mark.parametrize(("changes", "guard"), [({"max_kl": 1e-9}, "high_kl"), ({"min_entropy": 100.0}, "low_entropy")])
def test_each_guard_warns_skips_or_stops(base_dir, tmp_path, changes, guard, caplog):
    """With dropout: measuring the trajectories of a step separately must draw no random numbers."""
    spec = GRPO.model_copy(update=changes)
    plain, _ = run(base_dir, GRPO, tmp_path / "plain", model=DROPOUT)
    assert not (plain / "guards.jsonl").exists()
    warned, metrics = run(base_dir, spec.model_copy(update={guard: "warn"}), tmp_path / "warn", model=DROPOUT)
    assert differing(plain, warned) == []
    assert metrics["skipped_steps"] == 0
    assert [strike["step"] for strike in strikes(warned)] == [1, 2, 3]
    assert f"gradient step 1: {guard}" in caplog.text
    skipped, metrics = run(base_dir, spec.model_copy(update={guard: "skip"}), tmp_path / "skip")
    assert metrics["skipped_steps"] == 3
    assert json.loads((skipped / "trainer.json").read_text())["optimizer_steps"] == {}
    with pytest.raises(TrainingDiverged, match=f"gradient step 1: .*{guard}"):
        run(base_dir, spec.model_copy(update={guard: "stop"}), tmp_path / "stop")


def test_an_episode_that_is_not_learned_from_is_no_culprit(base_dir, tmp_path):
    def made():
        trajectories = batch()
        trajectories[4].histories[0].messages[1].finish_reason = "length"
        return trajectories

    out, _ = run(base_dir, DAPOSpec(max_kl=1e-9, high_kl="warn"), tmp_path, made)
    [strike] = strikes(out)
    assert strike["worst"]
    assert "s1/1" not in [entry["trajectory"] for entry in strike["worst"]]


def test_the_worst_are_measured_by_themselves(base_dir, tmp_path):
    out, _ = run(base_dir, GRPO.model_copy(update={"max_kl": 1e-9, "high_kl": "warn", "minibatches": 1}), tmp_path)
    [strike] = strikes(out)
    values = [entry["kl_sampler"] for entry in strike["worst"]]
    assert values == sorted(values, reverse=True)
    assert values[0] > strike["kl_sampler"]  # the mean over all trajectories is below the worst
    policy = Policy(base_dir, MODEL, 3)
    (worst,) = [trajectory for trajectory in batch() if trajectory.id == strike["worst"][0]["trajectory"]]
    from components.algorithms.policy_gradient.trainer import prepare

    _, learning = prepare(GRPO, make_context(policy, None, batch(), scratch=tmp_path))
    [(cut, planned)] = learning.packs([worst])
    pack = planned.lay_out()
    with torch.no_grad():
        new_S, _ = policy.logprobs(pack, cut)
    difference = new_S - pack.logprob_S
    assert values[0] == pytest.approx((difference.exp() - 1 - difference).mean().item(), rel=1e-4)


def test_a_line_torn_by_a_kill_is_left_out(tmp_path):
    from components.algorithms.loop.guards import TrainingGuards

    (tmp_path / "guards.jsonl").write_text('{"step": 2, "guard": "high_kl"}\n{"step": 1, "guard": "high_kl"}\n{"step"')
    assert [strike["step"] for strike in TrainingGuards(tmp_path).strikes()] == [1, 2]
