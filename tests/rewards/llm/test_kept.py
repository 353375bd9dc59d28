"""Errors of the answer cache, and concurrent access by several processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.rewards.llm import cache
from components.rewards.llm.cache import FILE, AnswerCache

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cached answers of judges, .*file/answers.*make it writable"):
        AnswerCache(tmp_path / "file" / "answers")


def test_a_file_that_is_none_of_ours_is_left_as_it_is_and_named(tmp_path, subtests):
    for content in [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000]:
        with subtests.test(content=content[:60]):
            (tmp_path / FILE).write_bytes(content)
            with pytest.raises(ResourceError, match=r"answers\.sqlite: .*; move it away"):
                AnswerCache(tmp_path)
            assert (tmp_path / FILE).read_bytes() == content


def test_a_file_that_breaks_while_it_is_open_is_named(tmp_path):
    answers = AnswerCache(tmp_path)
    answers.keep({str(i): {"text": "x" * 2000} for i in range(200)})
    answers.close()
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    answers = AnswerCache(tmp_path)
    with pytest.raises(ResourceError, match="move it away"):
        [answers.find(str(i)) for i in range(200)]
    answers.close()


def test_one_that_another_process_holds_is_waited_for_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE", 0.2)
    answers = AnswerCache(tmp_path)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ResourceError, match=r"locked; another process has held it for 0 s"):
        answers.keep({"a": {}})
    other.execute("COMMIT")
    other.close()
    answers.keep({"a": {}})  # it can still be used
    assert answers.find("a") == {}
    answers.close()


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    code = """
import sys
from pathlib import Path
from components.rewards.llm.cache import AnswerCache
answers = AnswerCache(Path(sys.argv[1]))
for i in range(300):
    answers.keep({f"{sys.argv[2]} {i}": {"i": i}, f"both {i}": {"i": i}})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, name], env=environment) for name in ("one", "other")
    ]
    assert [writer.wait(600) for writer in writers] == [0, 0]
    answers = AnswerCache(tmp_path)
    assert all(answers.find(f"{name} {i}") == {"i": i} for name in ("one", "other", "both") for i in range(300))
    answers.close()
