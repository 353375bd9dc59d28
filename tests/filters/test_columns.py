"""Filters on columns decide as row by row, and write the same bytes; only the needed columns are read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.artifacts import Store
from components.errors import ArtifactDamaged, ArtifactError, SpecError
from components.filters.among import Among
from components.filters.best import Best
from components.filters.between import Between
from components.filters.chain import Chain
from components.filters.everything import Everything
from components.filters.percentiles import Percentiles
from components.filters.protocol import ColumnFilter
from components.filters.reasons import as_batch, as_selections
from components.filters.select import apply
from components.filters.signal import Signal
from components.filters.successful import Successful
from components.filters.top import Top
from components.filters.without import Without
from components.trajectories import sources, store
from components.trajectories.schema import Failure, History, Message, Scenario, Score, Selection, Trajectory
from components.trajectories.sources import ScoredFiles
from components.trajectories.store import read_scored, write_scores, write_selection, write_trajectories
from flows.stages.base import Context, Request
from flows.stages.execute import run_stage
from tests.filters import reference
from tests.trajectories.builders import episode

ODD = "s\ud83d-é"
"""Text with a lone surrogate, which is stored escaped."""


def scored(seed: int, groups: int) -> list[tuple[Trajectory, Score]]:
    """Random episodes with failures, ties, missing and odd numbers, and names that are not ASCII."""
    draw = random.Random(seed)
    rows = []
    for number in range(groups):
        name = f"{draw.choice(['s', ODD])}{number}{draw.choice(['', '~second'])}"
        scenario = Scenario(name, {}, "train", draw.choice("ab"), draw.randint(1, 5))
        flat, base = draw.random() < 0.2, draw.choice([0.0, 1.0, 0.1 + 0.2, draw.random()])
        for sample in range(draw.choice([1, 2, 3, 8])):
            failure = Failure("engine", "EngineError", "x") if draw.random() < 0.1 else None
            scored = failure is None and draw.random() < 0.95
            reward = base if flat else draw.choice([0.0, -0.0, 1.0, 0.5, draw.random()])
            outcome = {"success": draw.choice([True, False, 1, 0, "yes", None])} if draw.random() < 0.8 else {}
            if draw.random() < 0.7:
                outcome["moves"] = draw.choice([1, 3.5, True, "x", float("nan"), None])
            if draw.random() < 0.5:
                outcome["both"] = draw.choice([0.1, 0.9, "no"])
            metrics = {"turns": float(draw.randint(1, 8))} if draw.random() < 0.9 else {}
            if draw.random() < 0.2:
                metrics["moves"] = draw.choice([9.0, float("nan")])
            parts = {"spread": draw.choice([0.1, 0.7, float("nan")])} if draw.random() < 0.8 else {}
            parts |= {"both": 0.95} if draw.random() < 0.5 else {}
            parts |= {"turns": -1.0} if draw.random() < 0.3 else {}
            talk = [History([Message("user", "q"), Message("assistant", draw.choice("abc"))])]
            fields = {"outcome": outcome, "metrics": metrics, "failure": failure}
            trajectory = Trajectory(f"{name}/{sample}", scenario, sample, talk, **fields)
            rows.append((trajectory, Score(trajectory.id, reward if scored else None, parts)))
    return rows


def written(folder: Path, rows: list[tuple[Trajectory, Score]]) -> ScoredFiles:
    files = ScoredFiles.of(folder)
    write_trajectories(files.trajectories, [trajectory for trajectory, _ in rows])
    write_scores(files.scores, [score for _, score in rows])
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return written(tmp_path_factory.mktemp("scored"), scored(7, 150))


FILTERS = {
    "everything": (Everything(), reference.everything),
    "successful": (Successful(), reference.successful),
    "without": (
        Without(["s1", f"{ODD}2", "s3~second"]),
        lambda g: reference.without(g, {"s1", f"{ODD}2", "s3~second"}),
    ),
    "type": (Among("type", keep=["b"]), lambda g: reference.among(g, "type", {"b"})),
    "difficulty": (Among("difficulty", drop=[2, 5]), lambda g: reference.among(g, "difficulty", {1, 3, 4})),
    "signal": (Signal(), reference.signal),
    "signal, tolerant": (Signal(0.3), lambda g: reference.signal(g, 0.3)),
    "best": (Best(2), lambda g: reference.best(g, 2)),
    "top": (Top(0.3), lambda g: reference.top(g, 0.3)),
    "top of the group": (
        Top(0.3, of="group"),
        lambda g: reference.best(g, lambda n: reference.share(n, 0.3), "below_top_share"),
    ),
    "percentiles": (Percentiles(20.0, 77.7), lambda g: reference.percentiles(g, 20.0, 77.7, "collection")),
    "of the group": (Percentiles(20.0, 77.7, of="group"), lambda g: reference.percentiles(g, 20.0, 77.7, "group")),
    "reward": (Between("reward", 0.2, 0.9), lambda g: reference.between(g, "reward", 0.2, 0.9)),
    "metric": (Between("turns", 2.0, 5.0), lambda g: reference.between(g, "turns", 2.0, 5.0)),
    "outcome": (Between("moves", 2.0), lambda g: reference.between(g, "moves", 2.0)),
    "component": (Between("spread", maximum=0.5), lambda g: reference.between(g, "spread", maximum=0.5)),
    "component and outcome": (Between("both", 0.3), lambda g: reference.between(g, "both", 0.3)),
}


def decisions(filter_, files) -> list[Selection]:
    return [s for episodes, reasons_N in apply(filter_, files) for s in as_selections(episodes, reasons_N)]


def test_decisions_are_those_of_the_reference(files, monkeypatch, subtests):
    groups: dict[str, list[Trajectory]] = {}
    for row in read_scored(files.trajectories, files.scores, components=True):
        groups.setdefault(row.group, []).append(row)
    for name, (filter_, reference_of) in FILTERS.items():
        expected = [selection for group in reference_of(list(groups.values())) for selection in group]
        for batch in (1, 50, 65_536):
            monkeypatch.setattr(sources, "BATCH_EPISODES", batch)
            with subtests.test(name, batch=batch):
                assert decisions(filter_, files) == expected


def test_a_chain_of_columns_and_whole_trajectories_gives_each_filter_what_is_left(files):
    seen = []

    def short(trajectory):
        seen.append(trajectory)
        return trajectory.histories[0].messages[1].content != "a"

    chain = Chain({"good": Between("reward", 0.3), "short": short, "top": Top(0.5), "best": Best(1)})
    decided = decisions(chain, files)
    rows = list(read_scored(files.trajectories, files.scores, components=True))
    good = [row for row in rows if row.reward is not None and row.reward >= 0.3]
    assert {row.id for row in seen} == {row.id for row in good}
    assert [repr(row) for row in seen[: len(good)]] == [repr(row) for row in good]  # NaN differs from itself
    left = [row for row in good if row.histories[0].messages[1].content != "a"]
    top = [s.trajectory_id for group in reference.top([left], 0.5) for s in group if s.kept]
    groups: dict[str, list[Trajectory]] = {}
    for row in left:
        if row.id in set(top):
            groups.setdefault(row.group, []).append(row)
    expected = {s.trajectory_id for group in reference.best(groups.values(), 1) for s in group if s.kept}
    assert {selection.trajectory_id for selection in decided if selection.kept} == expected


def test_the_stage_writes_the_bytes_of_a_selection_written_row_by_row(tmp_path, monkeypatch):
    """With several row groups, and a reason that is not ASCII."""
    monkeypatch.setattr(store, "GROUP_BYTES", 8_000)
    keys = {"trajectories": "0" * 64, "scores": "1" * 64}
    artifacts = Store(tmp_path / "artifacts")
    rows = scored(3, 300)
    arguments = {"schema_version": 1, "inputs": {}}
    with artifacts.draft(keys["trajectories"], stage="collect", kind="trajectories", **arguments) as draft:
        write_trajectories(draft.path / "trajectories.parquet", [trajectory for trajectory, _ in rows])
    with artifacts.draft(keys["scores"], stage="judge", kind="scores", **arguments) as draft:
        write_scores(draft.path / "scores.parquet", [score for _, score in rows])
    chain = {"_target_": "components.filters.chain.Chain", "filters": {}}
    chain["filters"]["turns"] = {"_target_": "components.filters.between.Between", "number": "turns", "minimum": 2.0}
    chain["filters"]["signal"] = {"_target_": "components.filters.signal.Signal"}
    artifact, _ = run_stage(Request("filter", {"filter": chain}, keys), Context.at(tmp_path))
    path = artifact.path / "selection.parquet"
    again = tmp_path / "selection.parquet"
    write_selection(again, store.read_selection(path))
    assert pq.ParquetFile(path).num_row_groups > 2
    assert path.read_bytes() == again.read_bytes()
    kept = [selection for selection in store.read_selection(path) if selection.kept]
    assert artifact.metrics["kept"] == len(kept)
    assert artifact.metrics["dropped"] == len(rows) - len(kept)


def test_reasons_are_stored_as_by_rows(tmp_path, files):
    class Odd(ColumnFilter):
        def rule_N(self, episodes):
            return np.array([ODD if place % 2 else None for place in range(len(episodes))], object)

    batches = [as_batch(*decided) for decided in apply(Odd(), files)]
    store.write_selection_batches(tmp_path / "columns.parquet", batches)
    chosen = list(store.read_selection(tmp_path / "columns.parquet"))
    assert {selection.reason for selection in chosen} == {"kept", "failed", "unscored", ODD}
    write_selection(tmp_path / "rows.parquet", chosen)
    assert (tmp_path / "rows.parquet").read_bytes() == (tmp_path / "columns.parquet").read_bytes()


def test_only_the_needed_columns_are_read(files, monkeypatch, subtests):
    read = []
    batches = store._Table.batches

    def recorded(self, path, columns=None, rows=64):
        if self.kind == "trajectories":
            read.append(columns)
        return batches(self, path, columns, rows)

    monkeypatch.setattr(store._Table, "batches", recorded)
    always = {"id", "scenario.id", "failure.boundary"}
    for filter_, columns in (
        (Signal(), always),
        (Top(0.5), always),
        (Between("reward", 0.5), always),
        (Successful(), {*always, "outcome"}),
        (Among("type", keep=["a"]), {*always, "scenario.type", "scenario.difficulty"}),
        (Chain({"a": Signal(), "b": Successful()}), {*always, "outcome"}),
        (lambda trajectory: True, None),
    ):
        with subtests.test(filter_=filter_):
            list(apply(filter_, files))
            assert (None if read[-1] is None else set(read[-1])) == columns


def test_scores_of_other_episodes_and_split_groups_are_refused(tmp_path):
    rows = scored(1, 5)
    files = written(tmp_path, rows)
    write_scores(files.scores, [score for _, score in rows[1:]])
    with pytest.raises(ArtifactDamaged, match=r"scores\.parquet was not made from .* stands where"):
        list(apply(Signal(), files))
    halves = [row for row in rows if row[0].sample == 0] + [row for row in rows if row[0].sample]
    files = written(tmp_path, halves)
    with pytest.raises(ArtifactError, match="do not lie next to each other"):
        list(apply(Signal(), files))


def test_a_built_in_filter_selects_from_a_group_in_memory():
    """A user's filter may call it."""
    scenario = Scenario("a", {}, "train")
    group = [Trajectory(f"a/{i}", scenario, i, [], reward=float(i), metrics={"turns": 1.0}) for i in range(3)]
    assert Best(1).select(group)[2] == Selection("a/2", True, "kept")
    assert [selection.kept for selection in Top(0.6).select(group)] == [False, True, True]
    assert [selection.reason for selection in Between("turns", 2.0).select(group)] == ["turns_below_minimum"] * 3


def test_a_column_filter_without_a_rule_is_refused_by_its_name():
    class MisspeltRule(ColumnFilter):
        def rule(self, episodes):
            return None

    with pytest.raises(SpecError, match="filter: MisspeltRule does not define `rule_N`"):
        MisspeltRule().select([episode()])
