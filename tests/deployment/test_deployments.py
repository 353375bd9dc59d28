"""Listing, stopping and starting of deployments below a root: a real server on a tiny model."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from components.deployment.targets.base import Deployment, Release
from components.deployment.targets.local import LocalTarget
from components.errors import ResourceError
from flows.release.deployment_ledger import ActiveRelease, Ledger
from flows.runs.deployments import main
from tests.inference.fake import environment


@pytest.fixture
def command(tmp_path, capsys):
    def ask(*arguments: str) -> tuple[int, str, str]:
        code = main([f"root={tmp_path}", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ask


def put(root: Path, name: str, folder: Path, **target) -> ActiveRelease:
    release = Release(name, "3", "ab" * 32, folder, 512)
    in_use = ActiveRelease(release, LocalTarget(**target).deploy(release, root / "deployments"))
    Ledger(root, name).write(in_use, "deployed", "")
    return in_use


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=600).close()
    except urllib.error.URLError:
        return False
    return True


@pytest.mark.timeout(1800)
def test_a_server_is_listed_and_stopped(tmp_path, base_dir, command):
    in_use = put(tmp_path, "shop", base_dir)
    try:
        url = in_use.deployment.url
        code, text, _ = command()
        assert code == 0
        assert url in text.replace("\n", "")
        [entry] = json.loads(command("--json")[1])
        assert entry == {"name": "shop", "version": "3", "target": "local", "url": url, "model": "shop", "state": "up"}
        assert command("--start", "shop")[1] == f"shop version 3 is up at {url} as shop\n"
        assert command("--stop", "shop")[1] == "shop version 3 was stopped; --start shop starts it again\n"
        assert not answers(url)
        assert json.loads(command("--json")[1])[0]["state"] == "ended"
        assert command("--stop", "shop")[1] == "shop version 3 is already stopped\n"
    finally:
        command("--stop", "shop")


def test_deployments_that_cannot_be_stopped_or_started_are_reported(tmp_path, command):
    assert command() == (0, f"no active deployments below {tmp_path}\n", "")
    assert command("--stop", "shop") == (
        2, "", f"no model 'shop' was deployed below {tmp_path}; deployed models: none\n"
    )  # fmt: skip
    release = Release("shop", "3", "ab" * 32, tmp_path / "gone", 512)
    away = Deployment("together", "3", release.digest, "https://host.example/v1", "team/shop")
    Ledger(tmp_path, "shop").write(ActiveRelease(release, away), "deployed", "")
    assert "elsewhere" in command()[1]
    code, _, error = command("--stop", "shop")
    assert (code, "only servers on this machine" in error) == (2, True)
    here = Deployment("local", "3", release.digest, "http://127.0.0.1:9/v1", "shop", details={
        "pid": "999999999", "began": "0.0", "spec": "{}", "log": "",
    })  # fmt: skip
    Ledger(tmp_path, "shop").write(ActiveRelease(release, here), "deployed", "")
    code, _, error = command("--start", "shop")
    assert (code, "the export of shop version 3 is missing" in error) == (2, True)
    Ledger(tmp_path, "shop").write(None, "rolled back", "")
    assert command("--stop", "shop")[0] == 2


def test_server_whose_target_is_no_longer_valid_is_listed_and_stopped(tmp_path, command):
    server = subprocess.Popen(["sleep", "3600"])
    release = Release("shop", "3", "ab" * 32, tmp_path, 512)
    began, stored = psutil.Process(server.pid).create_time(), {"port": -1, "engine": "other"}
    details = {"pid": str(server.pid), "began": repr(began), "spec": json.dumps(stored)}
    here = Deployment("local", "3", release.digest, "http://127.0.0.1:9/v1", "shop", details=details)
    ledger = Ledger(tmp_path, "shop")
    ledger.write(ActiveRelease(release, here), "deployed", "")
    try:
        assert json.loads(command("--json")[1])[0]["state"] == "up"
        assert command("--stop", "shop")[:2] == (0, "shop version 3 was stopped; --start shop starts it again\n")
        assert json.loads(command("--json")[1])[0]["state"] == "ended"
        code, _, error = command("--start", "shop")
        assert code == 2
        assert f"{ledger.path}: the stored target of the deployment is no longer valid (" in error
        assert "port: " in error
        assert "engine: " in error
    finally:
        server.kill()
        server.wait()


@pytest.mark.timeout(1800)
def test_a_stopped_server_is_started_again_with_the_same_command(tmp_path, base_dir, command):
    """Runs a fake of vLLM in an environment of its own."""
    python = environment(tmp_path / "vllm")
    in_use = put(tmp_path, "shop", base_dir, engine="vllm", python=python, arguments={"max-num-seqs": 4})
    try:
        pid = int(in_use.deployment.details["pid"])
        cmdline = psutil.Process(pid).cmdline()
        for option, value in {"model": str(base_dir), "dtype": "float32", "tool-call-parser": "pythonic"}.items():
            assert cmdline[cmdline.index(f"--{option}") + 1] == value
        assert {"--enable-auto-tool-choice", "--max-num-seqs"} <= set(cmdline)
        assert command("--stop", "shop")[0] == 0
        assert not answers(in_use.deployment.url)
        assert command("--start", "shop")[1] == f"shop version 3 is up at {in_use.deployment.url} as shop\n"
        again = Ledger(tmp_path, "shop").active().deployment
        assert psutil.Process(int(again.details["pid"])).cmdline() == cmdline
        assert again.url == in_use.deployment.url
        assert answers(again.url)
        history = json.loads(Ledger(tmp_path, "shop").path.read_text())["history"]
        assert [entry["state"] for entry in history] == ["deployed", "stopped", "started"]
    finally:
        command("--stop", "shop")


def test_missing_vllm_is_reported_before_the_run(tmp_path):
    target = LocalTarget(engine="vllm", python=str(tmp_path / "nowhere"))
    with pytest.raises(ResourceError, match=r"deploy.target.python: .*nowhere.* does not exist.*make vllm"):
        target.check("shop")
