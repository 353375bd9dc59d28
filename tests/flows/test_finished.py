"""Finished episodes of a stage: on disk in shards, in order, and not in memory."""

from __future__ import annotations

import gc

import pytest

from components.environments.games.tictactoe import TicTacToe
from components.inference.protocol import Sampling
from components.rollout.collector import EpisodeListener, play_episodes
from components.rollout.players.player import Player
from components.rollout.random_agent import RandomAgent, RandomEngine
from components.rollout.request import episode_requests
from components.rollout.spec import EpisodeLimits
from components.trajectories.schema import Failure, Trajectory
from components.trajectories.store import write_trajectories
from flows.stages import finished
from flows.stages.episode_figures import figures
from flows.stages.finished import FinishedEpisodes
from tests.rollout.worlds import run_episodes
from tests.trajectories.builders import episode


@pytest.fixture
def requests():
    scenarios = TicTacToe().scenarios("heldout")[:12]
    return episode_requests(scenarios, 4, sampling=Sampling(), max_turns=8, seed=0)


def play(requests, function=play_episodes, **options):
    limits = EpisodeLimits(concurrency=8)
    return function(RandomEngine(), TicTacToe, requests, limits, player=Player(RandomAgent(1000)), **options)


class Storing(EpisodeListener):
    """Listener that stores the episodes, and counts those in memory whenever one ends."""

    def __init__(self, episodes):
        self.episodes = episodes
        self.most = 0

    def end(self, trajectory, seconds):
        self.episodes.add(trajectory, seconds)
        if len(self.episodes.seconds) % 8 == 0:
            self.most = max(self.most, in_memory())


def in_memory():
    return sum(type(item) is Trajectory for item in gc.get_objects())


def test_a_collection_holds_no_finished_episode(tmp_path, requests, monkeypatch):
    """The file is that of a collection in memory, whatever the order in which episodes finish."""
    monkeypatch.setattr(finished, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(finished, "MOST_ROWS", 8)
    gc.collect()
    before = in_memory()
    listener = Storing(FinishedEpisodes(tmp_path))
    names = play(requests, listener=listener)
    listener.episodes.flush()
    stored = listener.episodes.read(names)
    assert len(stored) == 48
    write_trajectories(tmp_path / "stored.parquet", stored)
    numbers = figures(stored)
    gc.collect()
    assert listener.most - before <= 24  # those that run at a time
    assert in_memory() - before <= 10
    held = play(requests, run_episodes)
    write_trajectories(tmp_path / "held.parquet", held)
    assert (tmp_path / "stored.parquet").read_bytes() == (tmp_path / "held.parquet").read_bytes()
    assert numbers == figures(held)
    assert numbers["episodes"] == 48.0


def test_a_retry_reuses_the_finished_and_plays_the_others(tmp_path, requests):
    first = FinishedEpisodes(tmp_path)
    whole = play(requests, run_episodes)
    for trajectory in whole[:30]:
        first.add(trajectory, 1.0)
    first.flush()
    again = FinishedEpisodes(tmp_path)
    assert set(again.finished) == {trajectory.id for trajectory in whole[:30]}
    listener = Storing(again)
    names = play(requests, finished=again.finished, listener=listener)
    again.flush()
    assert list(again.read(names)) == whole
    assert set(again.seconds) == set(names)


def test_failed_episodes_are_data_of_this_attempt_only(tmp_path):
    rows = [episode("a", 0), episode("a", 1, failure=Failure("engine", "EngineError", "x"))]
    episodes = FinishedEpisodes(tmp_path)
    for row in rows:
        episodes.add(row, 1.0)
    episodes.flush()
    assert list(episodes.read(["a/1", "a/0"])) == rows[::-1]
    assert set(FinishedEpisodes(tmp_path).finished) == {"a/0"}
    assert list(tmp_path.glob("failed-*.parquet")) == []


def test_stored_episodes_are_a_sequence_with_declared_changes(tmp_path):
    rows = [episode("a", sample) for sample in range(5)]
    episodes = FinishedEpisodes(tmp_path)
    for row in rows:
        episodes.add(row, 1.0)
    episodes.flush()
    stored = episodes.read([row.id for row in rows])
    assert stored[1:3][1] == stored[-3] == rows[2]
    changed = stored.changed(lambda t: episode("b", t.sample))
    assert [row.id for row in changed] == [f"b/{sample}" for sample in range(5)]
    assert [row.id for row in stored] == [row.id for row in rows]
