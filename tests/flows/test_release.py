"""Deployment and rollback of a champion: real ledger, and a real canary against real servers of test targets."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from components.deployment.canary import FILE
from components.deployment.spec import CanarySpec, DeploySpec
from components.deployment.targets.base import Deployment, Release
from components.errors import DeployError, ResourceError
from components.inference.server import ListenOptions, ModelServer
from flows.release.champion import Decision
from flows.release.deployment import check, release
from flows.release.deployment_ledger import ActiveRelease, Ledger
from tests.flows.test_chat import Scripted

WON = Decision("shop", "2", "won", "", against="1")


class Registry:
    """Registry that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def alias(self, name: str, alias: str, version: str | None) -> None:
        self.calls.append((name, alias, version or "nobody"))

    def tag(self, name: str, version: str, tags: dict[str, str]) -> None:
        self.calls.append((name, version, *tags.values()))


class Served:
    """Target that deploys releases as servers in this process, each with its own answers."""

    name = "local"
    keeps_previous = False

    def __init__(self, port: int = 0):
        self.fixed_port = port
        self.says: dict[str, str] = {}
        """Answers by version."""
        self.up: dict[str, ModelServer] = {}
        """Running servers by URL."""

    def deploy(self, new: Release, root: Any) -> Deployment:
        if new.version not in self.says:
            raise DeployError("the server exited during startup")
        server = ModelServer(
            Scripted(*[self.says[new.version]] * 9), new.name, listen=ListenOptions(port=self.fixed_port)
        )
        server.__enter__()
        self.up[server.url] = server
        details = {"port": str(server.port)}
        return Deployment("local", new.version, new.digest, server.url, new.name, details=details)

    def alive(self, deployment: Deployment) -> bool:
        return deployment.url in self.up

    def take_back(self, deployment: Deployment) -> None:
        assert deployment.url is not None
        self.up.pop(deployment.url).close()


@pytest.fixture
def target():
    found = Served()
    yield found
    for server in found.up.values():
        server.close()


@pytest.fixture
def put(tmp_path, target):
    """Return a function that deploys an export and returns the outcome, the notices and the registry's calls."""
    asked = {"messages": [{"role": "user", "content": "Where?"}], "tools": [], "max_tokens": 4}
    (tmp_path / FILE).write_text(json.dumps([{**asked, "answer": {"content": "Here."}}]))

    def run(decision: Decision, digest: str, **canary: Any) -> tuple[Any, list[Any], list[Any]]:
        deploy = DeploySpec.model_construct(target=target, canary=CanarySpec(timeout=2.0, **canary))
        spec = SimpleNamespace(deploy=deploy, root=str(tmp_path), model=SimpleNamespace(max_length=64))
        notices: list[Any] = []
        console = SimpleNamespace(line=lambda text: None)
        execution = SimpleNamespace(spec=spec, console=console, notice=notices.append)
        registry = Registry()
        export = SimpleNamespace(digest=digest, path=tmp_path)
        found = release(execution, export, decision, 3, registry)  # type: ignore[arg-type]
        return found, notices, registry.calls

    return run


def present(tmp_path):
    found = Ledger(tmp_path, "shop").active()
    return found.release.version if found else None


def test_a_champion_is_in_use_when_it_has_passed_and_the_one_before_goes(put, target, tmp_path):
    target.says = {"1": "Here.", "2": "Here."}
    outcome, notices, registry_calls = put(replace(WON, version="1", verdict="first", against=None), "a" * 64)
    assert (outcome.state, outcome.agreement, registry_calls) == ("deployed", 1.0, [])
    assert [notice.kind for notice in notices] == ["deployment"]
    first = outcome.url
    assert put(replace(WON, version="1", verdict="already"), "a" * 64)[0].state == "already"
    outcome, _, _ = put(WON, "b" * 64)
    assert list(target.up) == [outcome.url] != [first]
    assert present(tmp_path) == "2"


@pytest.mark.parametrize(
    ("says", "message"),
    [({"1": "Here."}, "exited during startup"), ({"1": "Here.", "2": "Nowhere."}, "answers 0.00 of 1 held-out")],
)
def test_what_fails_leaves_in_use_what_was(put, target, tmp_path, says, message):
    target.says = says
    first = put(replace(WON, version="1", verdict="first", against=None), "a" * 64)[0].url
    outcome, notices, registry_calls = put(WON, "b" * 64)
    assert outcome.state == "rolled back"
    assert isinstance(outcome.error, DeployError)
    assert message in notices[0].message
    assert f"Version 1 stays in use at {first}" in notices[0].message
    assert registry_calls == [("shop", "champion", "1"), ("shop", "2", "rolled back")]
    assert (list(target.up), present(tmp_path)) == ([first], "1")
    states = [entry["state"] for entry in json.loads(Ledger(tmp_path, "shop").path.read_text())["history"]]
    assert states == ["deployed", "rolled back"]


def test_on_a_port_of_its_own_the_server_before_it_is_started_again(put, target, tmp_path):
    target.says = {"1": "Here.", "2": "Nowhere."}
    first = put(replace(WON, version="1", verdict="first", against=None), "a" * 64)[0].url
    target.fixed_port = int(first.rsplit(":", 1)[1].partition("/")[0])
    outcome, notices, _ = put(WON, "b" * 64)
    assert outcome.state == "rolled back"
    assert "Version 1 is in use again at" in notices[0].message
    assert (list(target.up), present(tmp_path)) == ([first], "1")


def test_another_port_moves_what_is_in_use(put, target, tmp_path):
    target.says = {"1": "Here."}
    first = put(replace(WON, version="1", verdict="first", against=None), "a" * 64)[0].url
    with socket.create_server(("127.0.0.1", 0)) as free:
        target.fixed_port = free.getsockname()[1]
    outcome, _, _ = put(replace(WON, version="1", verdict="already"), "a" * 64)
    assert outcome.state == "deployed"
    assert list(target.up) == [outcome.url] != [first]
    assert f":{target.fixed_port}/" in outcome.url


def test_a_port_that_is_taken_is_said_before_the_run_but_for_our_own_server(tmp_path):
    spec = SimpleNamespace(name="shop", root=str(tmp_path), deploy=DeploySpec(target={"name": "local"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec.deploy = DeploySpec(target={"name": "local", "port": port})
        with pytest.raises(ResourceError, match=rf"deploy.target.port: {port} is in use"):
            check(spec)
        mine = psutil.Process()
        details = {"port": str(port), "pid": str(mine.pid), "began": repr(mine.create_time())}
        used = Deployment("local", "1", "a" * 64, f"http://127.0.0.1:{port}/v1", "shop", details=details)
        Ledger(tmp_path, "shop").write(
            ActiveRelease(Release("shop", "1", "a" * 64, tmp_path, 64), used), "deployed", ""
        )
        check(spec)


def test_the_first_of_all_that_fails_leaves_no_champion(put, target, tmp_path):
    outcome, notices, registry_calls = put(replace(WON, version="1", verdict="first", against=None), "a" * 64)
    assert outcome.state == "rolled back"
    assert notices[0].message.endswith("Nothing was in use before")
    assert registry_calls[0] == ("shop", "champion", "nobody")
    assert present(tmp_path) is None


def test_who_is_not_champion_is_not_deployed(put, target):
    outcome, notices, _ = put(replace(WON, verdict="lost"), "b" * 64)
    assert (outcome.state, target.up) == ("skipped", {})
    assert "is not deployed: it is not champion" in notices[0].message


def test_less_agreement_may_be_asked_for(put, target):
    target.says = {"2": "Nowhere."}
    outcome, _, _ = put(WON, "b" * 64, agreement=0.0)
    assert (outcome.state, outcome.agreement) == ("deployed", 0.0)
