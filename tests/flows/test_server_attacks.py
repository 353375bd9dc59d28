"""Attacks on a run's Prefect server, over real sockets: from other users, other origins, other names of this host."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.flows.processes import chromium
from tests.http_server import HttpServer

pytestmark = pytest.mark.security


def request(server, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
    """Return the response to a request with arbitrary headers."""
    parts = urlsplit(server.url())
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, str) else json.dumps(body) if body is not None else None
    connection.request(method, f"/api{path}", data, {"Content-Type": "application/json", **sent})
    response = connection.getresponse()
    response.content = response.read()
    connection.close()
    return response


READS = [("POST", "/flows/filter", {}), ("GET", "/admin/settings", None), ("POST", "/deployments/filter", {})]
WRITES = [("POST", "/flows/", {"name": "planted"}), ("POST", "/variables/", {"name": "planted", "value": 1})]


def test_a_local_user_without_the_credential_is_refused(prefect_server):
    statuses = {path: request(prefect_server, method, path, body).status for method, path, body in READS + WRITES}
    assert {path: status for path, status in statuses.items() if status not in (401, 403)} == {}


def test_another_host_is_refused(prefect_server):
    """DNS rebinding: the browser is connected to this server under the name evil.test."""
    names = ["evil.test", "127.0.0.1.evil.test", "localhost:1", "", "127.0.0.1@evil.test"]
    statuses = {name: request(prefect_server, "GET", "/health", Host=name).status for name in names}
    assert {name: status for name, status in statuses.items() if status not in (400, 403, 421)} == {}


def websocket_status(server, **headers: str) -> int:
    parts = urlsplit(server.url())
    lines = {
        "Host": f"{parts.hostname}:{parts.port}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": "prefect",
        **headers,
    }
    head = "GET /api/events/in HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n".encode())
        return int(connection.recv(1000).split()[1])


def test_a_websocket_of_another_host_or_origin_is_refused(prefect_server):
    assert websocket_status(prefect_server) == 101
    assert websocket_status(prefect_server, Host="evil.test") in (400, 403, 421)
    assert websocket_status(prefect_server, Origin="http://evil.test") in (400, 403)


def test_another_origin_is_not_allowed(prefect_server):
    """Neither the request nor its CORS preflight succeeds."""
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    for method, more in (("OPTIONS", asked), ("POST", {})):
        response = request(prefect_server, method, "/flows/filter", {}, Origin="http://evil.test", **more)
        assert response.status in (400, 401, 403)
        assert response.headers.get("Access-Control-Allow-Origin") is None


# --- a page in a real browser -----------------------------------------------------------------------------------------

ATTACK = """<!doctype html><title>attack</title><body><script>
async function attempt(url, options) {
  try {
    const response = await fetch(url, options);
    return {status: response.status, type: response.type, text: (await response.text()).slice(0, 200)};
  } catch (error) { return {error: String(error)}; }
}
function socket(url) {
  return new Promise(done => {
    const connection = new WebSocket(url, ["prefect"]);
    connection.onopen = () => done("open");
    connection.onerror = () => done("refused");
  });
}
window.attack = async api => ({
  read: await attempt(api + "/flows/filter", {
    method: "POST", body: "{}", headers: {"Content-Type": "application/json"}}),
  write: await attempt(api + "/flows/", {
    method: "POST", body: '{"name": "planted-json"}', headers: {"Content-Type": "application/json"}}),
  simple: await attempt(api + "/flows/", {method: "POST", body: '{"name": "planted-simple"}'}),
  blind: await attempt(api + "/flows/", {
    method: "POST", mode: "no-cors", credentials: "include", body: new Blob(['{"name": "planted-blind"}'])}),
  socket: await socket(api.replace("http", "ws") + "/events/in"),
});
window.form = api => {
  const form = document.createElement("form");
  form.method = "POST"; form.enctype = "text/plain"; form.action = api + "/flows/";
  const field = document.createElement("input");
  field.name = '{"name": "planted-form", "tags": ["'; field.value = '"]}';
  form.append(field); document.body.append(form); form.submit();
};
</script>"""


@pytest.fixture(scope="module")
def attacker() -> Iterator[str]:
    """Yield the address of a web server with an attacking page."""
    with HttpServer(lambda *_: (200, ATTACK.encode())) as web:
        yield web.url.removeprefix("http://")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    rules = ["--host-resolver-rules=MAP evil.test 127.0.0.1"]
    rules += ["--disable-features=LocalNetworkAccessChecks"]  # which not every browser has
    with chromium(*rules) as browser:
        yield browser


def flow_names(server) -> list[str]:
    """Return the names of all flows from the database."""
    import sqlite3

    with sqlite3.connect(server.root / "prefect" / "prefect.db") as database:
        return [name for (name,) in database.execute("select name from flow")]


def succeeded(result: dict) -> list[str]:
    """Return the page's attempts that read or wrote something, as far as the page can detect."""
    reads = [name for name in ("read", "write", "simple") if result[name].get("status", 500) < 400]
    return reads + (["socket"] if result["socket"] == "open" else [])


def test_a_page_of_another_origin_reads_and_writes_nothing(prefect_server, attacker, browser):
    page = browser.new_page()
    page.goto(f"http://{attacker}/")
    result = page.evaluate("api => attack(api)", prefect_server.url())
    assert succeeded(result) == []
    with page.expect_navigation(wait_until="commit"):
        page.evaluate("api => form(api)", prefect_server.url())
    page.close()
    assert [name for name in flow_names(prefect_server) if name.startswith("planted")] == []


def test_a_page_whose_name_was_rebound_to_this_host_reads_and_writes_nothing(prefect_server, browser):
    """The page came from evil.test:PORT; that name now resolves to this server, so all requests have one origin."""
    port = urlsplit(prefect_server.url()).port
    page = browser.new_page()
    page.route("**/rebound", lambda route: route.fulfill(content_type="text/html", body=ATTACK))
    page.goto(f"http://evil.test:{port}/rebound")
    result = page.evaluate("api => attack(api)", f"http://evil.test:{port}/api")
    page.close()
    assert succeeded(result) == []
    assert [name for name in flow_names(prefect_server) if name.startswith("planted")] == []
