"""Tests of the trajectory store: lossless round trips, and rejection of foreign and incomplete files."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import ArtifactDamaged, SchemaMismatch
from components.trajectories import store
from components.trajectories.schema import History, Message, Score, Selection, Trajectory
from components.trajectories.store import (
    count_trajectories,
    load_scored,
    read_scored,
    read_scores,
    read_selection,
    read_trajectories,
    write_scores,
    write_selection,
    write_trajectories,
)
from components.trajectories.tables import SCORE_SCHEMA, SELECTION_SCHEMA, TRAJECTORY_SCHEMA
from tests.trajectories import strategies
from tests.trajectories.builders import FAILURE, episode, tool_talk


def exact(value: Any) -> Any:
    """Return a form that compares bits: NaN equals NaN, 0.0 differs from -0.0, None from NaN."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {f.name: exact(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [(key, exact(item)) for key, item in value.items()]  # order is part of it
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(item) for item in value]
    if isinstance(value, float):
        return "float", repr(value)
    return value


def stored(write, read, rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        assert write(path, iter(rows)) == len(rows)
        return list(read(path))


@given(st.lists(strategies.trajectories, max_size=4))
@settings(deadline=None, max_examples=150)
def test_trajectories_come_back_exactly(rows):
    assert exact(stored(write_trajectories, read_trajectories, rows)) == exact(rows)


@given(st.lists(strategies.scores, max_size=4))
@settings(deadline=None, max_examples=60)
def test_scores_come_back_exactly(rows):
    assert exact(stored(write_scores, read_scores, rows)) == exact(rows)


@given(st.lists(strategies.selections, max_size=4))
@settings(deadline=None, max_examples=60)
def test_selections_come_back_exactly(rows):
    assert exact(stored(write_selection, read_selection, rows)) == exact(rows)


@pytest.mark.parametrize(
    ("schema", "row"), [(TRAJECTORY_SCHEMA, Trajectory), (SCORE_SCHEMA, Score), (SELECTION_SCHEMA, Selection)]
)
def test_every_field_of_the_schema_has_a_column(schema, row):
    assert schema.names == [field.name for field in dataclasses.fields(row)]


def test_an_episode_with_tools_tokens_and_sub_agents(tmp_path):
    main = tool_talk()
    main.token_ids = [1, 2, 3, 4]
    main.logprobs = [math.nan, math.nan, -0.5, -1.25]
    main.messages[2].span = (2, 4)
    main.messages[2].finish_reason = "tool_calls"
    helper = History([Message("user", "Und nun? 漢字 🙂"), Message("assistant", "")], agent="helper")
    row = episode("s1", histories=[main, helper], success=True)
    write_trajectories(tmp_path / "t.parquet", [row])
    (back,) = read_trajectories(tmp_path / "t.parquet")
    assert exact(back) == exact(row)
    assert back.histories[0].sampled_mask() == [False, False, True, True]


def test_log_probs_are_float32_values(tmp_path):
    row = episode(histories=[History([], [1], [-0.1])])
    write_trajectories(tmp_path / "t.parquet", [row])
    (back,) = read_trajectories(tmp_path / "t.parquet")
    assert back.histories[0].logprobs == [pytest.approx(-0.1, rel=2**-24)]
    write_trajectories(tmp_path / "again.parquet", [back])
    (again,) = read_trajectories(tmp_path / "again.parquet")
    assert again == back


def test_more_rows_than_a_row_group_stream_through_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROWS_PER_CHUNK", 4)
    monkeypatch.setattr(store, "GROUP_BYTES", 2500)
    monkeypatch.setattr(store, "ROWS_PER_BATCH", 3)
    path = tmp_path / "t.parquet"
    pulled = 0

    def rows():
        nonlocal pulled
        for sample in range(21):
            pulled += 1
            yield episode("s", sample)

    assert write_trajectories(path, rows()) == pulled == 21
    assert pq.ParquetFile(path).num_row_groups == 3
    assert [row.sample for row in read_trajectories(path)] == list(range(21))


def test_equal_rows_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_trajectories(tmp_path / name, (episode("s", sample, success=True) for sample in range(5)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_rows_make_a_readable_file(tmp_path):
    assert write_scores(tmp_path / "s.parquet", []) == 0
    assert list(read_scores(tmp_path / "s.parquet")) == []


def test_rows_that_raise_leave_no_file(tmp_path):
    def rows():
        yield episode("s", 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trajectories(tmp_path / "t.parquet", rows())
    assert list(tmp_path.iterdir()) == []


def test_rows_that_raise_leave_the_earlier_file_alone(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [episode("old")])
    with pytest.raises(TypeError, match=r"trajectory s/0 cannot be stored.*set"):
        write_trajectories(path, [episode("s", outcome={"seen": {1, 2}})])
    assert [row.id for row in read_trajectories(path)] == ["old/0"]


def test_another_schema_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    monkeypatch.setattr(store, "SCHEMA_VERSION", 99)
    write_trajectories(path, [episode()])
    monkeypatch.undo()
    with pytest.raises(SchemaMismatch) as caught:
        next(read_trajectories(path))
    for part in (str(path), "version 99", f"version {store.SCHEMA_VERSION}"):
        assert part in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "scores.parquet"
    write_scores(path, [])
    with pytest.raises(SchemaMismatch, match=r"holds scores .*expected trajectories"):
        next(read_trajectories(path))


def test_a_foreign_parquet_file_is_refused(tmp_path):
    import pyarrow as pa

    path = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"id": ["a"]}), path)
    with pytest.raises(SchemaMismatch, match="of another program"):
        next(read_trajectories(path))


def test_a_torn_file_is_damaged(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [episode("s", sample) for sample in range(9)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactDamaged, match=r"t\.parquet"):
        next(read_trajectories(path))


def test_a_file_that_is_damaged_in_the_middle_says_so(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [episode("s", sample) for sample in range(2000)])
    content = bytearray(path.read_bytes())
    content[4:1000] = b"\xff" * 996  # after the magic number
    path.write_bytes(content)
    with pytest.raises(ArtifactDamaged, match=r"t\.parquet cannot be read to its end"):
        list(read_trajectories(path))


def test_rows_are_counted_without_reading_them(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [episode("s", sample) for sample in range(7)])
    assert count_trajectories(path) == 7
    write_scores(path, [])
    with pytest.raises(SchemaMismatch):
        count_trajectories(path)


class TestScored:
    @pytest.fixture
    def files(self, tmp_path):
        paths = [tmp_path / f"{name}.parquet" for name in ("trajectories", "scores", "selection")]
        write_trajectories(paths[0], [episode("a", 0), episode("a", 1), episode("b", 0, failure=FAILURE)])
        write_scores(paths[1], [Score("a/0", 1.0), Score("a/1", 0.25), Score("b/0", None, failure=FAILURE)])
        write_selection(
            paths[2],
            [Selection("a/0", True, "kept"), Selection("a/1", False, "mine"), Selection("b/0", False, "unscored")],
        )
        return paths

    def test_rewards_are_joined_on_the_kept_ones(self, files):
        assert [(row.id, row.reward) for row in load_scored(*files)] == [("a/0", 1.0)]

    def test_without_a_selection_all_come(self, files):
        loaded = load_scored(files[0], files[1], None)
        assert [(row.id, row.reward) for row in loaded] == [("a/0", 1.0), ("a/1", 0.25), ("b/0", None)]

    def test_step_rewards_are_the_judges_where_it_gave_any(self, files):
        own = [[0.5, 0.0], [0.25], []]
        rows = [episode("a", 0), episode("a", 1), episode("b", 0, failure=FAILURE)]
        for row, steps in zip(rows, own, strict=True):
            row.step_rewards = steps
        write_trajectories(files[0], rows)
        judged = [Score("a/0", 1.0, step_rewards=[1.0, 2.0]), Score("a/1", 0.25), Score("b/0", None, failure=FAILURE)]
        write_scores(files[1], judged)
        assert [row.step_rewards for row in load_scored(files[0], files[1], None)] == [[1.0, 2.0], [0.25], []]

    def test_components_are_joined_on_where_asked_for_but_what_the_episode_did_comes_first(self, files):
        """Components have the sign of the reward: what costs is negative there."""
        rows = [episode("a", 0, outcome={"slips": 3}), episode("a", 1), episode("b", 0, failure=FAILURE)]
        write_trajectories(files[0], rows)
        judged = [Score("a/0", 0.7, {"slips": -0.3, "turns": -0.2, "spread": 0.5}), Score("a/1", 0.25)]
        write_scores(files[1], [*judged, Score("b/0", None, failure=FAILURE)])
        with_them = [row.metrics for row in load_scored(files[0], files[1], None, components=True)]
        assert with_them == [{"spread": 0.5, "turns": 2.0}, {"turns": 2.0}, {"turns": 2.0}]
        assert [row.metrics for row in load_scored(files[0], files[1], None)] == [{"turns": 2.0}] * 3

    def test_a_stream_holds_a_few(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store, "ROWS_PER_BATCH", 2)
        files = [tmp_path / "trajectories.parquet", tmp_path / "scores.parquet"]
        write_trajectories(files[0], [episode("s", sample) for sample in range(5)])
        write_scores(files[1], [Score(f"s/{sample}", sample / 2) for sample in range(5)])
        made = []
        monkeypatch.setattr(store.decode, "Trajectory", lambda *values: made.append(values[0]) or Trajectory(*values))
        rows = read_scored(*files)
        assert (next(rows).reward, next(rows).reward) == (0.0, 0.5)
        assert made == ["s/0", "s/1"]
        assert [row.reward for row in rows] == [1.0, 1.5, 2.0]

    def test_scores_of_other_trajectories_are_refused(self, files):
        for ids, said in (
            (["a/0", "b/0"], "b/0 stands where a/1 should"),
            (["a/1", "a/0", "b/0"], "a/1 stands where a/0 should"),
            (["a/0", "a/0", "a/1", "b/0"], "a/0 stands where a/1 should"),
            (["a/0", "a/1"], "it ends before b/0"),
            (["a/0", "a/1", "b/0", "c/0"], "c/0 comes after the last"),
        ):
            write_scores(files[1], [Score(name, 1.0) for name in ids])
            with pytest.raises(ArtifactDamaged, match=rf"scores\.parquet was not made from .*s\.parquet: {said}"):
                load_scored(*files)

    @pytest.mark.parametrize("ids", [["a/0"], ["b/0", "a/1", "a/0"], ["a/0", "a/1", "b/0", "b/1"]])
    def test_a_selection_of_other_trajectories_is_refused(self, files, ids):
        write_selection(files[2], [Selection(name, True, "kept") for name in ids])
        with pytest.raises(ArtifactDamaged, match=r"selection\.parquet was not made from"):
            load_scored(*files)
