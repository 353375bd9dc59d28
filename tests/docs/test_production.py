"""docs/guides/production.md: its commands with the tiny model, and its clients."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from components.environments.tools import call
from components.environments.worlds.shop import Shop
from components.inference.recording import Feedback
from components.inference.request_bodies import read_body
from docs.simulated_customers import Conversation, correction
from docs.simulated_customers import main as customers
from flows.compare import main as compare
from flows.release.deployment_ledger import Ledger
from flows.runs.deployments import main as deployments
from tests.docs.pages import ROOT, blocks, commands

PAGE = ROOT / "docs" / "guides" / "production.md"
TINY = ["size=tiny", "deploy.register_model=true"]


def arguments(command: str, root: Path) -> list[str]:
    """Return the arguments of a command of the page, with its folders below `root`, on any port."""
    words = [word.replace("runs/served", str(root / "served")) for word in shlex.split(command)[3:]]
    return [word for word in words if not word.startswith("deploy.target.port")]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed (Node.js 20 or later)")
def test_the_buttons_of_the_page_send_valid_feedback():
    (page,) = blocks(PAGE, "html")
    script = page.text.partition("<script>")[2].partition("</script>")[0]
    scores = re.findall(r'<button data-score="(\d)">', page.text)
    stubs = f"""
        const posts = [], buttons = {json.dumps([{"dataset": {"score": score}} for score in scores])};
        const document = {{querySelectorAll: () => buttons, getElementById: () => ({{dataset: {{id: "chatcmpl-1"}}}})}};
        const fetch = (url, options) => posts.push([url, options.body]);
    """
    program = f"{stubs}{script}; for (const button of buttons) button.onclick(); console.log(JSON.stringify(posts))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=600)
    bodies = [read_body(Feedback, json.loads(body)) for url, body in json.loads(done.stdout) if url == "/feedback"]
    assert [(body.answer, body.score) for body in bodies] == [("chatcmpl-1", 1.0), ("chatcmpl-1", 0.0)]


def test_a_colleague_corrects_the_first_answer_that_left_the_procedure():
    scenario = next(scenario for scenario in Shop().scenarios("train") if scenario.input["right"] == "refund")
    order, item = scenario.input["order"], scenario.input["orders"][scenario.input["order"]]["item"]
    hasty = [call("find_order", {"order": order}), call("exchange", {"order": order}), {"content": "It is sent."}]
    (body,) = correction(scenario, Conversation("talk", list(zip("abc", hasty, strict=True))))
    assert body["answer"] == "b"
    assert body["correction"]["calls"] == [{"name": "check_policy", "arguments": json.dumps({"item": item})}]


@pytest.mark.timeout(1800)
def test_the_loop_closes_in_three_commands(tmp_path, command, capsys):
    train, again, comparison, *_ = commands(PAGE)

    def run(line: str, *more: str) -> dict:
        code, out, errors = command(*arguments(line, tmp_path), *TINY, f"root={tmp_path}", *more)
        assert code == 0, errors
        return json.loads(out.splitlines()[-1])

    result = run(train)
    assert result["deployment"]["state"] == "deployed"
    active = Ledger(tmp_path, "shop").active()
    assert active is not None
    url = active.deployment.url
    try:
        client, forward = blocks(PAGE, "python")
        for _ in range(8):
            exec(compile(client.text.replace("http://127.0.0.1:8000/v1", url), str(client), "exec"), {})
        customers([url, "--customers", "6", "--corrected", "1"])
        counted = capsys.readouterr().out.splitlines()[-1]
        assert counted == "6 customers, 0 content, 6 corrections"  # random weights
        backend: dict = {}
        exec(compile(forward.text.replace("http://127.0.0.1:8000/v1", url), str(forward), "exec"), backend)
        asked = {"model": "shop", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/chat/completions", json=asked, timeout=600).json()["id"]
        with TestClient(backend["app"]) as page:
            assert page.post("/feedback", json={"answer": answer, "score": 1}).status_code == 200
            assert page.post("/feedback", json={"answer": "unknown", "score": 1}).status_code == 404
    finally:
        deployments([f"root={tmp_path}", "--stop", "shop"])
    # Random weights write special tokens, which fail a check of the import.
    result = run(again, "data.max_dropped=1")
    trained = ["import[scores]", "import[choices]", "train[scores]", "train[choices]"]
    assert [result["stages"][label] for label in trained] == ["ran"] * 4
    assert result["stages"]["evaluate[start]"] == "cached"  # of the served policy
    assert compare([*arguments(comparison, tmp_path), "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    counts = {version["version"]: (version["conversations"], version["scored"]) for version in versions}
    assert counts == {"1": (23, 15)}  # the second answer to a question is a conversation of its own
