"""Training on episodes in files: the result is that of a training on the same episodes in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from components.algorithms.continual.replay import mixed
from components.algorithms.continual.spec import ReplaySpec
from components.algorithms.distillation.spec import DistillSpec
from components.algorithms.loop import mapped_episodes, token_rows
from components.algorithms.loop.token_rows import TokenRow, tokenized
from components.algorithms.policy_gradient import cost_constraints
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.preference.spec import DPOSpec, KTOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.spec import CostSpec
from components.trajectories import store
from components.trajectories.schema import Failure, Score, Selection, Trajectory
from components.trajectories.selected import SelectedFiles, SelectedTrajectories
from components.trajectories.store import load_scored, write_scores, write_selection, write_trajectories
from flows.stages.train import _restricted
from tests.algorithms.builders import adapter_bytes, batch, demonstrations, train_in

COMMON = {"learning_rate": 1e-3, "pack_tokens": 64, "batch_size": 4, "epochs": 2}
STEPS = {"learning_rate": 1e-3, "pack_tokens": 64, "minibatches": 2, "epochs": 2}
ALGORITHMS = {
    "sft": SFTSpec(**COMMON),
    "sft, weighted": SFTSpec(**COMMON, weight_temperature=0.5),
    "dpo": DPOSpec(**COMMON, pairs="all"),
    "kto": KTOSpec(**COMMON),
    "distill": DistillSpec(**COMMON, teacher={"name": "tiny", "source": "random", "device": "cpu"}),
    "grpo": GRPOSpec(**STEPS, kl_coefficient=0.1, kl_in="reward"),
    "grpo, by state": GRPOSpec(**STEPS, credit="turns", turn_baseline="state", mask_truncated=True),
    "ppo": PPOSpec(**STEPS, value_pretraining_steps=2),
    "grpo, costs": GRPOSpec(**STEPS, costs={"slips": CostSpec(limit=0.5, initial=1.0)}),
    "grpo, a role": GRPOSpec(**STEPS, credit="turns"),
    "grpo, replay": GRPOSpec(**STEPS),
    "sft, replay": SFTSpec(**COMMON),
}
REPLAY = {"version": "v", "compared": False, "seed": 1}


def chosen(name: str, episodes: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return the episodes from which a training learns, as the train stage chooses them."""
    if name.endswith("a role"):
        return _restricted(episodes, ["worker"])
    return mixed(ReplaySpec(share=0.5), episodes, [episodes], **REPLAY)[0] if name.endswith("replay") else episodes


def episodes() -> list[Trajectory]:
    """Return scored, unscored, failed and written episodes, some with two histories, none longer than the limit."""
    sampled = batch(seed=1, groups=4)
    for episode in sampled:
        episode.step_rewards = [episode.reward or 0.0] * 2
    sampled[2].histories *= 2
    sampled[2].step_rewards *= 2
    for number, episode in enumerate(sampled):
        episode.metrics = {"slips": float(number % 3)}
        if number:
            episode.histories[-1] = replace(episode.histories[-1], agent="worker")
    sampled[4].reward = None
    sampled[7].failure = Failure("engine", "EngineError", "x")
    return [*sampled, *(replace(written, reward=1.0, metrics={"slips": 0.0}) for written in demonstrations(3))]


@pytest.fixture
def files(tmp_path, monkeypatch) -> SelectedFiles:
    """The episodes in batches of two rows, of which the selection leaves out every fifth."""
    monkeypatch.setattr(store, "ROWS_PER_BATCH", 2)
    monkeypatch.setattr(token_rows, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(mapped_episodes, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(mapped_episodes, "BATCHES_IN_MEMORY", 2)
    rows = episodes()
    written = SelectedFiles(*(tmp_path / f"{name}.parquet" for name in ("trajectories", "scores", "selection")))
    write_trajectories(written.trajectories, rows)
    write_scores(written.scores, [Score(row.id, row.reward) for row in rows])
    write_selection(written.selection, [Selection(row.id, place % 5 != 3, "") for place, row in enumerate(rows)])
    return written


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_training_on_files_gives_the_bytes_of_one_in_memory(base_dir, tmp_path, files, name):
    in_memory = load_scored(files.trajectories, files.scores, files.selection)
    (first, *measured), (second, *streamed) = (
        train_in(tmp_path / kind, ALGORITHMS[name], base_dir, trajectories, teacher_dir=base_dir)
        for kind, trajectories in (
            ("memory", [*chosen(name, in_memory)]),
            ("files", chosen(name, SelectedTrajectories([files]))),
        )
    )
    assert adapter_bytes(first) == adapter_bytes(second)
    assert measured[0]["loss"] == streamed[0]["loss"]
    assert len(measured[1]) == len(streamed[1]) > 2


def test_processes_share_the_reading(files, monkeypatch):
    decoded = []
    read = store.decode.scored_trajectories
    monkeypatch.setattr(store.decode, "scored_trajectories", lambda batch: decoded.append(len(batch)) or read(batch))
    selected = SelectedTrajectories([files, files])
    for name in ("", "a role", "replay"):
        twice = chosen(name, selected)
        assert not decoded  # what decides is read from columns
        everything = list(map(repr, twice))
        read_once = len(decoded)
        shared = dict(item for rank in range(3) for item in twice.share(rank, 3))
        assert [repr(shared[place]) for place in range(len(twice))] == everything
        assert len(decoded) == 2 * read_once
        assert [repr(twice[place]) for place in (0, 15, -1)] == [everything[place] for place in (0, 15, -1)]
        assert len({episode.id for episode in twice}) == len(everything)
        decoded.clear()


def test_constrained_episodes_stay_in_their_files(files, tmp_path):
    in_files = mapped_episodes.mapped(tmp_path, SelectedTrajectories([files]), lambda episode: episode)
    for episode in cost_constraints.subtract_costs(ALGORITHMS["grpo, costs"], in_files, {"slips": 1.0}):
        with pytest.raises(AttributeError):
            object.__getattribute__(episode, "histories")
        assert episode.histories


def test_rows_are_read_back_as_they_were_written(tmp_path):
    draw = random.Random(0)
    rows = []
    for place in range(700):
        tokens = [draw.randrange(300_000) for _ in range(draw.randint(1, 20))]
        targets = sorted(draw.sample(range(len(tokens)), draw.randint(1, len(tokens))))
        rows.append(
            TokenRow(
                place // 2, tokens, targets, draw.random(), f"é{place % 3}", f"g{place}", f"t{place % 5}", draw.random()
            )
        )
    read = tokenized(tmp_path, batch(groups=117), lambda place, _: rows[2 * place : 2 * place + 2])
    assert list(read) == rows[: len(read)]
    assert len(read) == 700


def test_replay_from_files_draws_what_it_draws_from_memory(files):
    in_memory = load_scored(files.trajectories, files.scores, files.selection)
    spec = ReplaySpec(share=0.5, rounds=2)
    drawn, streamed = (
        mixed(spec, round_, [round_, round_], **REPLAY) for round_ in (in_memory, SelectedTrajectories([files]))
    )
    assert repr([*drawn[0]]) == repr([*streamed[0]])
    assert drawn[1] == streamed[1]
    assert drawn[1]["replayed_groups"] > 1
