"""Chat with a policy: piped input, a real server at a URL, and the environment of a recorded run."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.inference.server import ModelServer
from flows import chat
from tests.flows.pretend import pretend


class Scripted:
    """Engine with scripted answers that records its requests."""

    policy = BASE_POLICY

    def __init__(self, *answers: Any):
        self.answers = list(answers)
        self.asked: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.asked.append(request)
        said = self.answers.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else ""}
        if isinstance(said, tuple):
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
        return ChatCompletion(message, "stop", [1, 2], [3], [-0.5], request.policy)

    def load_policy(self, version: str, folder: str | None) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run the command with lines on standard input; return exit code, standard output and standard error."""

    def run(*arguments: str, said: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        code = chat.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    pretend(root)
    return root


def test_a_server_without_an_environment(talk):
    engine = Scripted("Hello, you.", "Again.", "A new one.")
    with ModelServer(engine, "shop-agent") as server:
        code, out, err = talk(server.url, said="Hi\n\nStill me\n/reset\nHi\n/scenario\n/nonsense\n/quit\nnever read\n")
    assert code == 0
    assert "using model shop-agent at http://127.0.0.1:" in err
    assert out.splitlines()[:4] == [
        "assistant> Hello, you.", "assistant> Again.", "(a new conversation)", "assistant> A new one."
    ]  # fmt: skip
    assert "/scenario needs an environment; start with --environment RUN" in out
    assert "unknown command /nonsense; expected one of:" in out
    roles = [[message["role"] for message in request.messages] for request in engine.asked]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]


def test_the_person_is_the_user_and_tools_are_carried_out_in_the_environment(talk, root):
    engine = Scripted(("find_order", {"order": "nowhere"}), "I cannot find it.")
    with ModelServer(engine, "m") as server:
        code, out, _ = talk(server.url, "--environment", "test", f"root={root}", said="Where is it?\n")
    assert code == 0  # the end of the input is a way to leave
    first, *lines = out.splitlines()
    assert first.startswith("(scenario ")
    assert "find_order" in first
    assert "; its user would say: " in first
    assert lines[0] == 'assistant calls> find_order({"order": "nowhere"})'
    assert lines[1].startswith("tool> ")
    assert lines[-1] == "assistant> I cannot find it."
    said = engine.asked[-1].messages
    assert [one["role"] for one in said][-3:] == ["user", "assistant", "tool"]
    assert {"role": "user", "content": "Where is it?"} in said
    assert [tool["function"]["name"] for tool in engine.asked[0].tools]


def test_it_solves_a_scenario_while_one_watches(talk, root):
    engine = Scripted("I do nothing.", "I do nothing.")
    with ModelServer(engine, "m") as server:
        arguments = (server.url, "--environment", "test", f"root={root}")
        code, out, _ = talk(*arguments, said="/scenario\n/scenario nobody\n")
    assert code == 0
    assert "user> " in out
    assert "assistant> I do nothing." in out
    assert "(the episode is over: " in out
    assert "success false" in out
    assert "error: no scenario 'nobody' in this split; expected an id such as " in out


def test_what_the_engine_fails_at_is_said_and_the_talk_goes_on(talk):
    class Failing(Scripted):
        async def chat(self, request):
            if not self.asked:
                self.asked.append(request)
                raise OSError("out of order")
            return await super().chat(request)

    with ModelServer(Failing("Here again."), "m") as server:
        code, out, _ = talk(server.url, said="Hi\nHi\n")
    assert code == 0
    assert "assistant> Here again." in out


def test_mistakes_are_said_without_a_stack_trace(talk, root, monkeypatch):
    monkeypatch.setattr(chat, "PATIENCE", 0.2)
    for arguments, message in {
        ("nobody",): "there is no run 'nobody'",
        ("http://127.0.0.1:9/v1", "--model", "m"): "is unreachable: no connection",
        ("http://user:hunter2@127.0.0.1:9/v1",): "url: holds a secret (a credential in a URL)",
    }.items():
        code, _, err = talk(*arguments, f"root={root}", said="Hi\n")
        assert (code, message in err, "hunter2" in err, "Traceback" in err) == (2, True, False, False), err
    with pytest.raises(SystemExit) as stopped:
        talk("latest", "--model", "m", said="")
    assert stopped.value.code == 2
