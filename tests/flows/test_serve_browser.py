"""A deployment in Prefect's own user interface, in a real browser: filled in, started, watched, its artifact opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.records import Records

ROOT = Path(__file__).parent.parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE = 300.0
"""Seconds that one thing may take: importing torch, MLflow and Prefect on a busy machine is most of it."""

pytestmark = pytest.mark.slow


@pytest.fixture
def page() -> Iterator:
    if BROWSER is None:
        pytest.skip("there is no browser; install one: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        page.set_default_timeout(PATIENCE * 1000)
        yield page
        browser.close()


@pytest.fixture
def served(tmp_path) -> Iterator[str]:
    """The page of the deployment of `smoke`, served with a server of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "serve.log"
    line = [sys.executable, "-m", "flows.serve", "+experiment=smoke", f"root={tmp_path}", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with log.open("w") as out:
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + PATIENCE
        while "waiting for runs" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        (deployment,) = re.findall(r"/deployments/deployment/\S+", log.read_text())
        yield f"http://127.0.0.1:{port}/v2{deployment}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert "Traceback" not in log.read_text()
    assert process.returncode == 0


@pytest.mark.timeout(1500)
def test_a_run_is_started_watched_and_its_result_opened(page, served, tmp_path):
    page.goto(served)
    page.get_by_role("button", name="Run", exact=True).first.click()
    page.get_by_role("menuitem", name=re.compile("custom", re.IGNORECASE)).click()
    page.get_by_role("button", name="Add item").click()
    page.locator("textarea").last.fill("evaluate.scenarios=4")
    page.get_by_role("button", name="Submit").click()
    page.locator("a[href*='/runs/flow-run/']").first.click()
    page.wait_for_url(re.compile("/runs/flow-run/"))
    page.get_by_text("Completed").first.wait_for()
    page.get_by_role("tab", name="Task Runs").click()
    page.get_by_text("train[1]").first.wait_for()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("results-smoke").first.click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    page.get_by_text("after GRPO").first.wait_for()

    (run,) = Records(tmp_path).all()
    assert run.overrides == ["+experiment=smoke", f"root={tmp_path}", "evaluate.scenarios=4"]
    line = [sys.executable, "-m", "flows.run", *run.overrides]
    environment = {**os.environ, "PREFECT_API_URL": f"{served.partition('/v2/')[0]}/api"}
    again = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout.splitlines()[-1])
    assert set(result["stages"].values()) == {"cached"}
    assert set(result["stages"]) == {stage.label for stage in run.stages}
