"""Choices of the simulated annotator: the better episode of a pair, with the given accuracy."""

from __future__ import annotations

import pytest

from components.trajectories.feedback import read_all
from docs.simulated_annotator import choices, main
from tests.flows.annotated import loaded, played


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return root, played(root)


def test_the_better_episode_is_chosen(run):
    episodes = loaded(*run)
    rewards = {name: episode.reward for name, episode in episodes.by_id.items()}
    answers = list(choices(episodes, 1.0))
    assert len(answers) == 1, "of the pairs of order-A7 one has equal rewards; order-B1 has a failed episode"
    (answer,) = answers
    chosen, other = (answer.trajectory, answer.other) if answer.better == "a" else (answer.other, answer.trajectory)
    assert rewards[chosen] > rewards[other]
    assert episodes.problem(answer) is None
    (wrong,) = choices(episodes, 0.0)
    assert {wrong.better, answer.better} == {"a", "b"}


def test_the_file_is_the_same_each_time_and_feedback_reads_it(run, tmp_path, capsys):
    root, record = run
    files = [tmp_path / "new" / "1.jsonl", tmp_path / "2.jsonl"]
    for file in files:
        assert main([record.id, "--stage", "collect[1]", "--out", str(file), f"root={root}"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(read_all(files[0])) == 1
    assert "1 choices are in" in capsys.readouterr().out
    assert main([record.id, "--stage", "collect[9]", "--out", str(files[0]), f"root={root}"]) == 2
    assert "has no such episodes" in capsys.readouterr().err
