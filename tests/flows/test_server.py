"""The Prefect server of a run: it answers, keeps its data below the root, and ends with the run."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.request

import psutil
import pytest

from components.errors import ResourceError
from flows import server


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
    """Here it waits for another one to migrate the database."""
    folder = server.home(tmp_path)
    folder.mkdir()
    with open(folder / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        booting = server.start(tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            booting._process.wait(3)
        booting._process.stdin.close()  # as when its parent is no more
        assert booting._process.wait(5) == 1
        booting._process.stdout.close()


def test_it_ends_when_the_run_is_killed(prefect_root):
    code = f"""
        import time
        from pathlib import Path
        from flows import server
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
    run.communicate(timeout=10)
    limit = time.monotonic() + 30
    while psutil.pid_exists(int(pid)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(pid))
    assert not answers(url)


def test_a_server_that_cannot_start_is_an_error_that_names_its_log(tmp_path):
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").mkdir()  # no database can be made there
    running = server.start(tmp_path)
    with pytest.raises(ResourceError, match=r"prefect-server\.log"):
        running.url()
    running.stop()
