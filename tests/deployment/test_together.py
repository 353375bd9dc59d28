"""Together target against a server that implements the documented API over a real socket, and its failures."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from components.deployment.canary import FILE, check_endpoint
from components.deployment.targets.base import Release
from components.deployment.targets.together import TogetherTarget
from components.errors import DeployError, ResourceError, WaitTimeout
from components.inference.engines.remote import RemoteEngine
from flows.release.deployment import canary_endpoint

KEY = "secret-of-the-host"


class Host:
    """Server of the documented API. failing: names of the operations that fail."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.asked: list[tuple[str, str, Any]] = []
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.looks = 0
        self.says = "On its way."
        host = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def _answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                host.asked.append((self.command, self.path, body))
                status, answer, headers = host.answer(self.command, self.path, body, self.headers)
                if status == 0:  # the line breaks in the middle of an answer
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                    self.close_connection = True
                    return
                content = json.dumps(answer).encode() if status != 204 else b""
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, method: str, path: str, body: Any, headers: Any) -> tuple[int, Any, dict[str, str]]:
        if headers.get("authorization") != f"Bearer {KEY}":
            return 401, {"error": {"message": "Invalid API key provided", "code": "invalid_api_key"}}, {}
        if "busy" in self.failing and method == "POST":
            self.failing.discard("busy")
            return 429, {"error": {"message": "slow down"}}, {"retry-after": "0.05"}
        if "broken" in self.failing and path == "/v1/models":
            self.failing.discard("broken")
            return 0, None, {}
        match method, path:
            case "POST", "/v1/models":
                data = {"job_id": "job-1", "model_name": body["model_name"], "model_source": "huggingface"}
                return 200, {"data": data, "message": "Processing model weights. Job created."}, {}
            case "GET", "/v1/jobs/job-1":
                self.looks += 1
                if "job" in self.failing:
                    return 200, {"job_id": "job-1", "status": "Failed", "status_updates": ["no config.json"]}, {}
                return 200, {"job_id": "job-1", "status": "Complete" if self.looks > 2 else "Running"}, {}
            case "POST", "/v1/endpoints":
                endpoint = {"id": "endpoint-1", "name": f"me/{body['model']}-abc", "state": "PENDING", **body}
                self.endpoints["endpoint-1"] = endpoint
                return 200, endpoint, {}
            case "GET", "/v1/endpoints":
                return 200, {"object": "list", "data": list(self.endpoints.values())}, {}
            case "GET", "/v1/endpoints/endpoint-1" if "endpoint-1" in self.endpoints:
                state = "STARTING" if "never" in self.failing else "ERROR" if "error" in self.failing else "STARTED"
                return 200, {**self.endpoints["endpoint-1"], "state": state}, {}
            case "DELETE", "/v1/endpoints/endpoint-1":
                return (204, None, {}) if self.endpoints.pop("endpoint-1", None) else (404, {"error": {}}, {})
            case "POST", "/v1/chat/completions":
                message = {"role": "assistant", "content": self.says}
                return 200, {"model": body["model"], "choices": [{"message": message, "finish_reason": "stop"}]}, {}
        return 404, {"error": {"message": f"no {path}"}}, {}


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", "token-of-the-hub")
    fake = Host()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def release(tmp_path):
    return Release("shop agent", "3", "ab" * 32, tmp_path / "merged", 512)


def target(host: Host, **changes: Any) -> Any:
    quick = {"poll": 0.02, "ready_timeout": 5.0, "retry_for": 2.0, "timeout": 5.0}
    data = {"source": "me/shop", "hardware": "1x_nvidia_h100_80gb_sxm", "url": host.url, **quick, **changes}
    return TogetherTarget(**data)


def test_a_release_is_fetched_gets_an_endpoint_and_answers(host, release, tmp_path):
    host.failing |= {"busy", "broken"}  # both pass
    together = target(host)
    together.check("shop")
    deployment = together.deploy(release, tmp_path)
    slug = f"shop-agent-{'ab' * 6}"
    assert (deployment.url, deployment.model) == (host.url, f"me/{slug}-abc")
    assert deployment.details == {"endpoint": "endpoint-1", "model": slug}
    sent = {path: body for method, path, body in host.asked if method == "POST"}
    expected = {"model_name": slug, "model_source": "me/shop", "model_type": "model", "hf_token": "token-of-the-hub"}
    assert sent["/v1/models"] == expected
    assert sent["/v1/endpoints"]["autoscaling"] == {"min_replicas": 1, "max_replicas": 1}
    assert host.looks == 3
    assert together.alive(deployment)
    assert KEY not in repr(deployment)
    assert "token-of-the-hub" not in repr(deployment)
    together.take_back(deployment)
    assert not together.alive(deployment)
    together.take_back(deployment)  # what is gone is gone


def test_canary_compares_with_the_policys_answers(host, release, tmp_path):
    deployment = target(host).deploy(release, tmp_path)
    records = [
        {"messages": [{"role": "user", "content": "Where?"}], "tools": [], "max_tokens": 8, "answer": {"content": text}}
        for text in ("On its way.", "On its way.", "Nowhere.", "On its way.")
    ]
    (tmp_path / FILE).write_text(json.dumps(records))
    engine = RemoteEngine(canary_endpoint(deployment, timeout=2.0))
    assert check_endpoint(engine, deployment, tmp_path, prompts=4, agreement=0.75) == 0.75
    assert check_endpoint(engine, deployment, tmp_path, prompts=2, agreement=1.0) == 1.0
    with pytest.raises(DeployError, match=r"0\.75 of 4 .*agreement is 1; prompt 2: it answers .*On its way.*Nowhere"):
        check_endpoint(engine, deployment, tmp_path, prompts=4, agreement=1.0)
    host.says = ""
    with pytest.raises(DeployError, match="an empty answer, 3 times in a row"):
        check_endpoint(engine, deployment, tmp_path, prompts=4, agreement=0.0)
    engine.close()


@pytest.mark.parametrize(
    ("failing", "kind", "message"),
    [
        ("job", DeployError, r"the upload of shop-agent-abababababab \(job job-1\) is Failed: .*no config.json"),
        ("error", DeployError, "the endpoint endpoint-1 is ERROR"),
        (
            "never",
            WaitTimeout,
            r"after 0.2 s \(deploy.target.ready_timeout\) waiting for the endpoint endpoint-1; its state is START",
        ),
    ],
)
def test_failures_at_the_host_are_reported_and_leave_no_endpoint(host, release, tmp_path, failing, kind, message):
    host.failing.add(failing)
    with pytest.raises(kind, match=message):
        target(host, **({"ready_timeout": 0.2} if failing == "never" else {})).deploy(release, tmp_path)
    assert not host.endpoints


def test_missing_or_rejected_key(host, monkeypatch):
    monkeypatch.setenv("TOGETHER_API_KEY", "wrong-key")
    with pytest.raises(
        ResourceError, match=r"refuses the key.*correct the environment variable TOGETHER_API_KEY"
    ) as caught:
        target(host).check("shop")
    assert "wrong-key" not in str(caught.value)
    monkeypatch.delenv("TOGETHER_API_KEY")
    with pytest.raises(ResourceError, match="variable TOGETHER_API_KEY is not set"):
        target(host).check("shop")


def test_unreachable_host(monkeypatch):
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    spec = TogetherTarget(source="me/shop", hardware="x", url="http://127.0.0.1:9/v1", retry_for=600)
    with pytest.raises(ResourceError, match=re.escape("deploy.target: http://127.0.0.1:9/v1 is unreachable")):
        spec.check("shop")
