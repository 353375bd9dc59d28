"""What a stage has finished is there for its next try, and nothing that is torn."""

import threading
import time

import pytest

from components.trajectories.schema import Score
from components.trajectories.store import read_scores, write_scores
from flows.stages import finished
from flows.stages.finished import FinishedRows
from tests.flows.waiting import until


@pytest.fixture(autouse=True)
def never_by_time(monkeypatch):
    """A slow machine flushes no sooner than a fast one."""
    monkeypatch.setattr(finished, "FLUSH_SECONDS", 600.0)


def scores(*names):
    return [Score(name, 1.0) for name in names]


def open_shards(folder):
    return FinishedRows(folder, "scores", write_scores, read_scores)


def kept(folder):
    return [score.trajectory_id for score in open_shards(folder).read()]


def test_what_was_flushed_is_read_in_order(tmp_path):
    for tries in (("a", "b"), ("c",), ()):
        one = open_shards(tmp_path)
        list(one.read())
        for name in tries:
            one.add(scores(name))
        one.flush()
    assert kept(tmp_path) == ["a", "b", "c"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["scores-00000.parquet", "scores-00001.parquet"]


def test_names_do_not_mix(tmp_path):
    other, one = FinishedRows(tmp_path, "other", write_scores, read_scores), open_shards(tmp_path)
    for shards_, name in ((other, "z"), (one, "a")):
        shards_.add(scores(name))
        shards_.flush()
    assert kept(tmp_path) == ["a"]


def test_rows_are_flushed_without_further_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(finished, "FLUSH_SECONDS", 0.2)
    one = open_shards(tmp_path)
    one.add(scores("a"))
    until(lambda: kept(tmp_path))
    time.sleep(0.3)  # what takes longer than that is kept at once
    one.add(scores("b"))
    assert kept(tmp_path) == ["a", "b"]


def test_few_wait_in_memory_and_what_belongs_together_stays_together(tmp_path, monkeypatch):
    monkeypatch.setattr(finished, "FLUSH_ROWS", 3)
    one = open_shards(tmp_path)
    for group in (("a", "b"), ("c", "d", "e"), ("f",)):
        one.add(scores(*group))
    assert kept(tmp_path) == ["a", "b", "c", "d", "e"]
    one.flush()
    assert kept(tmp_path)[-1] == "f"


def test_a_flush_leaves_no_thread_behind(tmp_path):
    before = threading.active_count()
    one = open_shards(tmp_path)
    one.add(scores("a"))
    one.flush()
    until(lambda: threading.active_count() <= before)


def test_a_torn_file_is_never_used(tmp_path, caplog):
    """An empty file, another format, and half a file."""
    for number, content in enumerate((b"", b"PAR1 torn", None)):
        (folder := tmp_path / str(number)).mkdir()
        one = open_shards(folder)
        for name in ("a", "b"):
            one.add(scores(name))
            one.flush()
        torn = folder / "scores-00000.parquet"
        torn.write_bytes(torn.read_bytes()[:-30] if content is None else content)
        (folder / "scores-00002.parquet.99.part").write_bytes(b"PAR1")  # of a writer that was killed
        again = open_shards(folder)
        assert [score.trajectory_id for score in again.read()] == ["b"]
        assert "scores-00000.parquet" in caplog.text
        caplog.clear()
        again.add(scores("a"))
        again.flush()
        assert kept(folder) == ["b", "a"]
