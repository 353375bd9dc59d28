"""A deployment in Prefect's own user interface, in a real browser: filled in, started, watched, its artifact opened.
Then a page of another origin and programs without the credential try to start a run, and Prefect's own command does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.history.records import Records
from tests.flows.processes import ROOT, chromium, python

PATIENCE = 600.0
"""Seconds that one thing may take: importing torch, MLflow and Prefect on a busy machine is most of it."""

ALLOWED = "serve.overrides=[evaluate.scenarios]"
REFUSED = 'overrides=["environment=mcp"]'

pytestmark = [pytest.mark.slow, pytest.mark.security]


@pytest.fixture
def page() -> Iterator:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        page.set_default_timeout(PATIENCE * 1000)
        yield page


@pytest.fixture
def served(tmp_path) -> Iterator[str]:
    """The page of the deployment of `smoke`, served with a server of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "serve.log"
    line = [sys.executable, "-m", "flows.serve", "+experiment=smoke", f"root={tmp_path}", "--port", str(port), ALLOWED]
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
        (login,) = [line for line in log.read_text().splitlines() if line.startswith("Prefect's user interface")]
        assert login.endswith(
            f"http://127.0.0.1:{port}  (log in with the text in {tmp_path / 'prefect' / 'credential'})"
        )
        yield f"http://127.0.0.1:{port}/v2{deployment}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=600)
    assert "Traceback" not in log.read_text()
    assert process.returncode == 0


@pytest.mark.timeout(1800)
def test_a_run_is_started_watched_and_its_result_opened(page, served, tmp_path):
    credential = (tmp_path / "prefect" / "credential").read_text().strip()
    page.goto(served.partition("/v2/")[0])
    page.locator("input[type=password]").fill(credential)
    page.keyboard.press("Enter")
    page.get_by_text("Dashboard").first.wait_for()
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
    assert run.overrides == ["+experiment=smoke", f"root={tmp_path}", ALLOWED, "evaluate.scenarios=4"]
    api = f"{served.partition('/v2/')[0]}/api"
    environment = {**os.environ, "PREFECT_API_URL": api, "PREFECT_API_AUTH_STRING": credential}
    again = python("-m", "flows.run", *run.overrides, env=environment)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout.splitlines()[-1])
    assert set(result["stages"].values()) == {"cached"}
    assert set(result["stages"]) == {stage.label for stage in run.stages}

    started = prefect(
        environment, "deployment", "run", "online-rl/smoke", "--param", 'overrides=["evaluate.scenarios=4"]'
    )
    assert started.returncode == 0, started.stdout + started.stderr
    refused = prefect(environment, "deployment", "run", "online-rl/smoke", "--param", REFUSED)
    assert refused.returncode != 0
    del environment["PREFECT_API_AUTH_STRING"]
    stranger = prefect(environment, "deployment", "run", "online-rl/smoke")
    assert stranger.returncode != 0
    assert "401" in stranger.stdout + stranger.stderr
    attack(page, tmp_path, api, credential, served.rpartition("/")[2])
    found = [path for path in tmp_path.rglob("*") if path.is_file() and credential.encode() in path.read_bytes()]
    assert found == [tmp_path / "prefect" / "credential"]


def prefect(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [str(Path(sys.executable).with_name("prefect")), *arguments]
    return subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


def attack(page, root: Path, api: str, credential: str, deployment: str) -> None:
    """A page of another origin tries to start a program; then somebody who has the credential changes all that the API
    lets him change of the deployment, and starts a run."""
    from prefect import get_client
    from prefect.settings import temporary_settings

    planted = root / "planted"
    page.context.clear_cookies()
    page.goto("data:text/html,<title>attack</title>")
    body = {"parameters": {"overrides": ["environment=mcp", f"environment.command=[touch,{planted}]"]}}
    script = """async ([url, body]) => {
      try { return (await fetch(url, {method: "POST", body, headers: {"Content-Type": "application/json"}})).status }
      catch (error) { return String(error) }
    }"""
    answer = page.evaluate(script, [f"{api}/deployments/{deployment}/create_flow_run", json.dumps(body)])
    assert "Failed to fetch" in str(answer)

    settings = {"api.url": api, "api.auth_string": credential}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        before = len(client.read_flow_runs())
        step = {"prefect.deployments.steps.run_shell_script": {"script": f"touch {planted}"}}
        changes = {
            "enforce_parameter_schema": False,
            "entrypoint": "tests.flows.planted.flow",
            "pull_steps": [step],
            "job_variables": {"env": {"ESPALIER_DEPLOYMENTS": "{}"}, "command": f"touch {planted}"},
        }
        for name, value in changes.items():  # some of them Prefect refuses itself
            try:
                client.request("PATCH", "/deployments/{id}", path_params={"id": deployment}, json={name: value})
            except Exception as error:  # noqa: BLE001
                print(name, error)
        assert client.read_deployment(deployment).pull_steps == [step]
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=body["parameters"])
        until = time.monotonic() + PATIENCE
        while not (state := client.read_flow_run(flow_run.id).state).is_final():
            assert time.monotonic() < until
            time.sleep(1)
        assert state.name == "Failed"
        assert "a run may not set this; serve.overrides lists evaluate.scenarios" in state.message
        assert len(client.read_flow_runs()) == before + 1
    assert not planted.exists()
