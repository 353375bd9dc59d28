"""Episodes in files: columns of all, rows of some, equal to those of all in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from components.errors import ArtifactDamaged
from components.evaluation.metrics import paired_difference, summarise
from components.evaluation.policies import PlayedEpisodes, PoliciesComparison, differences, measure_policy
from components.pages import comparison
from components.pages.report import Evaluation, Report, render
from components.tracking.traces import sample
from components.trajectories import store
from components.trajectories.schema import Failure, History, Message, Score, Trajectory
from components.trajectories.store import load_scored, read_scores, write_scores, write_trajectories
from components.trajectories.stored import InMemoryEpisodes, StoredTrajectories
from tests.trajectories.builders import episode

FAILURES = (Failure("engine", "EngineError", "x"), Failure("environment", "EnvironmentFailed", "long " * 300))


def drawn(seed: int) -> list[tuple[Trajectory, Score]]:
    """Episodes of the same scenarios, with outcomes and conversations of their own."""
    draw = random.Random(seed)
    rows = []
    for number in range(90):
        talk = [Message("user", "q")]
        for turn in range(draw.randint(1, 4)):
            ending = draw.choice(["stop", "length", None])
            talk.append(Message("assistant", f"{draw.random()}", span=(5 * turn, 5 * turn + 3), finish_reason=ending))
            talk.append(Message("tool", "x", tool_call_id="c"))
        one = episode(
            f"s{number // 2}é",
            number % 2,
            success=draw.random() < 0.5,
            failure=draw.choice(FAILURES) if draw.random() < 0.2 else None,
            histories=[History(talk, list(range(20)), [-1.0] * 20)] * draw.choice([0, 1, 2]),
            turns=float(draw.randint(1, 5)),
            type=draw.choice(["refund", "exchange"]),
            difficulty=1 + number % 3,
        )
        one.metrics |= {"parse_errors": float(draw.randint(0, 3)), "sampled_tokens": float(draw.randint(0, 9))}
        reward = None if one.failure or draw.random() < 0.1 else draw.choice([0.0, 0.5, draw.random()])
        parts = {"a": 1.0, "b": draw.random()}
        rows.append((one, Score(one.id, reward, parts, draw.choice([[], [0.5]]), f"because {draw.random()}")))
    return rows


def written(folder: Path, rows: list[tuple[Trajectory, Score]]) -> Path:
    folder.mkdir()
    write_trajectories(folder / "trajectories.parquet", [trajectory for trajectory, _ in rows])
    write_scores(folder / "scores.parquet", [score for _, score in rows])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two evaluations with several row groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "GROUP_BYTES", 4_000)
        patch.setattr(store, "ROWS_PER_CHUNK", 16)
        patch.setattr(store, "ROWS_PER_BATCH", 4)
        base = tmp_path_factory.mktemp("stored")
        yield [written(base / f"evaluation-{seed}", drawn(seed)) for seed in (1, 2)]


def in_memory(folder: Path) -> tuple[list[Trajectory], dict[str, Score]]:
    scores = folder / "scores.parquet"
    rows = load_scored(folder / "trajectories.parquet", scores, None)
    return rows, {score.trajectory_id: score for score in read_scores(scores)}


def in_files(folder: Path) -> tuple[StoredTrajectories, object]:
    stored = StoredTrajectories(folder)
    return stored, stored.scores


def test_rows_are_those_of_the_whole_file(folders):
    rows, scores = in_memory(folders[0])
    stored = StoredTrajectories(folders[0])
    places = [89, 3, 40, 3, 0]
    assert stored.rows(places) == [rows[place] for place in places]
    assert stored.rows([]) == []
    assert (len(stored), stored[-1], stored[5:8]) == (90, rows[-1], rows[5:8])
    assert list(stored) == rows
    with pytest.raises(IndexError):
        stored[90]
    assert dict(stored.scores) == scores
    assert stored.scores.get("none") is None


def test_columns_of_conversations_are_those_of_the_messages(folders):
    rows, _ = in_memory(folders[1])
    stored, held = StoredTrajectories(folders[1]), InMemoryEpisodes(rows)
    assert stored.message_counts_N().tolist() == held.message_counts_N().tolist()
    assert stored.finish_reasons() == held.finish_reasons()
    assert {None, "stop", "length"} == set(held.finish_reasons())
    assert stored.scenarios() == held.scenarios()
    assert stored.failures() == held.failures()


def pages(folders: list[Path], load) -> list[str]:
    loaded = [load(folder) for folder in folders]
    evaluations = [
        Evaluation(name, summarise(in_memory(folder)[0]), *parts)
        for name, folder, parts in zip(("start", "final"), folders, loaded, strict=True)
    ]
    difference = paired_difference(*(item.trajectories for item in evaluations))
    report = render(Report("x", evaluations=evaluations, differences={"final against start": difference}))
    runs = [
        comparison.ComparedRun(letter, letter * 8, "x", 0, "finished", "", None, "", [], {"final": item}, {}, {})
        for letter, item in zip("AB", evaluations, strict=True)
    ]
    against = comparison.compare_episodes(("A", "B"), "B against A", *evaluations)
    policies = [
        measure_policy(
            name,
            "",
            "k",
            PlayedEpisodes(*parts, {"s1é/0": 2.0, "s2é/0": 3.0}),
            cost=None,
            samples=2,
        )
        for name, parts in zip("pq", loaded, strict=True)
    ]
    compared = PoliciesComparison("x", "heldout", 2, 0.0, policies, *differences(policies))
    return [
        report,
        comparison.render(comparison.RunComparison(runs, {}, {}, [against])),
        comparison.render_policies(compared),
    ]


def test_pages_from_files_are_those_from_memory(folders):
    report, against, policies = pages(folders, in_files)
    assert [report, against, policies] == pages(folders, in_memory)
    assert all(title in report for title in ("Solved", "Not solved", "Failed to run"))
    assert "From fail to success" in against
    assert all(name in policies for name in ("message cut off", "engine: EngineError"))


def test_a_page_reads_the_rows_that_it_shows_only(folders, monkeypatch):
    read = []
    rows = StoredTrajectories.rows

    def recorded(self, places):
        read.extend(places)
        return rows(self, places)

    def whole(*_):
        raise AssertionError("all rows are read")

    monkeypatch.setattr(StoredTrajectories, "rows", recorded)
    monkeypatch.setattr(StoredTrajectories, "__iter__", whole)
    pages(folders, in_files)
    sample(StoredTrajectories(folders[0]), 5)
    assert 0 < len(read) < 150


def test_the_sample_for_traces_is_that_of_episodes_in_memory(folders):
    rows, _ = in_memory(folders[0])
    for count in (1, 4, 9, 200):
        assert sample(StoredTrajectories(folders[0]), count) == sample(rows, count)


def test_scores_of_other_episodes_are_refused(tmp_path):
    folder = written(tmp_path / "evaluation", drawn(3))
    write_scores(folder / "scores.parquet", [score for _, score in reversed(drawn(3))])
    with pytest.raises(ArtifactDamaged, match="was not made from"):
        store.scored_rows(folder / "trajectories.parquet", folder / "scores.parquet", [7])
    write_scores(folder / "scores.parquet", [score for _, score in drawn(3)[:7]])
    with pytest.raises(ArtifactDamaged, match=r"scores\.parquet has 7 rows, and row 7 was expected"):
        store.scored_rows(folder / "trajectories.parquet", folder / "scores.parquet", [7])
