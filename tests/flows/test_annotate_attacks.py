"""Attacks on the annotation page by other users of the machine, who can list processes and files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlparse

import httpx
import pytest

from tests.flows.annotated import played
from tests.flows.test_annotate import ROOT
from tests.flows.test_annotate_browser import browser, page  # noqa: F401  fixtures

pytestmark = pytest.mark.security


def _command_lines():
    """Return the command lines that `ps` shows to every user."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
    return found


@pytest.fixture
def opened(tmp_path):
    """Yield the command with an open browser: its process, the URL that it prints, and the folder of the runs."""
    runs = tmp_path / "runs"
    runs.mkdir()
    played(runs)
    fake = tmp_path / "fake-browser"
    fake.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(300)\n")
    fake.chmod(0o700)
    line = [sys.executable, "-m", "flows.runs", "annotate", "test", f"root={runs}", "--author", "Ada"]
    environment = {**os.environ, "BROWSER": f"{fake} %s &"}
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    yield process, url, runs, fake
    for pid, line in _command_lines().items():
        if str(fake) in line:  # it holds the pipes of the command open
            os.kill(pid, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)


def _arguments_of(fake):
    for _ in range(600):
        for line in _command_lines().values():
            if str(fake) in line:
                return line[line.index(str(fake)) + 1 :]
        time.sleep(0.1)
    raise AssertionError("no browser was started")


def test_the_token_is_in_no_command_line_and_worthless_after_the_first_use(opened):
    process, url, runs, fake = opened
    token = url.partition("token=")[2]
    assert len(token) == 32
    (shown, *_) = _arguments_of(fake)
    assert not [line for line in _command_lines().values() if any(token in part for part in line)]
    file = Path(unquote(urlparse(shown).path))
    assert file.parent == runs
    assert file.stat().st_mode & 0o777 == 0o600
    assert re.search(r"url=(\S+?)\"", file.read_text())[1] == url
    origin = url.partition("/?")[0]
    with httpx.Client(base_url=origin) as owner, httpx.Client(base_url=origin) as other:
        assert owner.get(url).status_code == 200
        assert owner.get("/api/state").status_code == 200
        assert list(runs.glob("annotate-*")) == []  # the file that led there is gone
        for path in (url, "/", "/api/state"):
            assert other.get(path).status_code == 401
            cookie = {"cookie": f"espalier-{urlparse(url).port}={token}"}
            assert other.get(path, headers=cookie).status_code == 401
        assert owner.get("/api/state").status_code == 200
        for line in process.stderr:  # the owner is told another one, for another browser
            if "URL for another browser: " in line:
                break
        another = line.rpartition(" ")[2].strip()
        assert another != url
        assert other.get(another).status_code == 200
        assert other.get("/api/state").status_code == 200


@pytest.mark.timeout(1800)
def test_a_real_browser_is_led_to_the_page_by_the_file(opened, page):  # noqa: F811
    _, url, _, fake = opened
    (shown, *_) = _arguments_of(fake)
    page.goto(shown)
    page.wait_for_selector(".message")
    assert "token" not in page.url
    cookie = next(cookie for cookie in page.context.cookies() if cookie["name"].startswith("espalier-"))
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.goto(url.partition("?")[0])
    page.wait_for_selector(".message")
    assert page.problems == []
    other = page.context.browser.new_context()
    assert other.new_page().goto(url).status == 401
    other.close()
