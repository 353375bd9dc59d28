"""Prefect server of a run: it answers, stores its data below the root, and stops with the run."""

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import urllib.request

import psutil
import pytest

from components.errors import ResourceError
from flows.orchestration import server
from flows.orchestration.server_process import damage_of
from tests.flows.waiting import until


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def test_it_answers_on_this_machine_only_and_keeps_its_data_below_the_root(prefect_server, prefect_root):
    url = prefect_server.url()
    assert url.startswith("http://127.0.0.1:")
    assert answers(url)
    with sqlite3.connect(prefect_root / "prefect" / "prefect.db") as database:
        assert database.execute("select count(*) from flow_run").fetchone() is not None


def test_a_server_of_the_user_is_used(prefect_server, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url())
    with server.for_run(tmp_path) as api:
        assert api.url() == prefect_server.url()
        assert api.ui_command == f"open {prefect_server.url().removesuffix('/api')}"
    assert answers(prefect_server.url())
    assert not (tmp_path / "prefect").exists()


def test_a_server_of_the_user_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ResourceError, match="no Prefect server answers"), server.for_run(tmp_path):
        pass


def test_one_that_still_boots_ends_when_the_run_is_killed(tmp_path):
    """The server waits for another one that migrates the database."""
    folder = server.home(tmp_path)
    folder.mkdir()
    with open(folder / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        booting = server.start(tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            booting._process.wait(3)
        booting._process.stdin.close()  # as when its parent is no more
        assert booting._process.wait(600) == 1
        booting._process.stdout.close()


def test_it_ends_when_the_run_is_killed(prefect_root):
    code = f"""
        import time
        from pathlib import Path
        from flows.orchestration import server
        running = server.start(Path({str(prefect_root)!r}))
        print(running.url(), running._process.pid, flush=True)
        time.sleep(600)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment
    )
    url, pid = run.stdout.readline().split()
    assert answers(url)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=600)
    until(lambda: not psutil.pid_exists(int(pid)))
    assert not answers(url)


def test_a_server_that_cannot_start_is_an_error_that_names_its_log(tmp_path):
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").mkdir()  # no database can be made there
    running = server.start(tmp_path)
    with pytest.raises(ResourceError, match=r"prefect-server\.log"):
        running.url()
    running.stop()


def damaged(root, damage):
    """Create a root with a valid database and apply `damage` to the file."""
    folder = server.home(root)
    folder.mkdir(parents=True)
    file = folder / "prefect.db"
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("create table flow_run (id integer primary key, name text)")
        database.executemany("insert into flow_run (name) values (?)", [("x" * 500,)] * 200)
    damage(file)
    return file


def overwrite(start, length):
    def damage(file):
        with open(file, "r+b") as opened:
            opened.seek(start)
            opened.write(b"\xff" * length)

    return damage


@pytest.mark.security
def test_a_damaged_database_is_named_with_the_remedy(tmp_path):
    for number, damage in enumerate((overwrite(4096, 8192), lambda file: os.truncate(file, 9000))):
        file = damaged(tmp_path / str(number), damage)
        assert (damage_of(file) or "").startswith(f"Prefect's database {file} is damaged: ")
    file = damaged(tmp_path, overwrite(0, 100))
    running = server.start(tmp_path)
    with pytest.raises(ResourceError) as error:
        running.url()
    running.stop()
    assert f"Prefect's database {file} is damaged: " in str(error.value)
    assert "Move it to another folder" in str(error.value)
    assert "This loses Prefect's data" in str(error.value)
    assert "Traceback" not in (tmp_path / "logs" / "prefect-server.log").read_text()
    file.rename(tmp_path / "moved")
    assert damage_of(file) is None


def test_an_intact_or_missing_database_is_not_called_damaged(tmp_path, prefect_server, prefect_root):
    prefect_server.url()
    assert damage_of(server.home(prefect_root) / "prefect.db") is None
    assert damage_of(tmp_path / "none.db") is None
    (tmp_path / "empty.db").touch()
    assert damage_of(tmp_path / "empty.db") is None
