"""Recording of a served policy: exact tokens, feedback, redaction, retention, and what is left after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from components.data.served import log as served_log
from components.data.served.log import ServedLog, files, read
from components.data.served.rows import ServedSource
from components.data.served.spec import DAY, RecordsSpec
from components.data.spec import SourceSpec
from components.errors import ResourceError, SpecError
from components.inference.app import AppOptions
from components.inference.protocol import ChatRequest
from components.inference.recording import ServedRecorder
from components.inference.server import ListenOptions, ModelServer
from components.inference.token_texts import TokenDecoder
from components.specs import validate
from tests.inference.scripted import ScriptedEngine

ROOT = Path(__file__).parents[2]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {}}}]


@contextlib.contextmanager
def recorded(engine, folder: Path, spec: RecordsSpec | None = None, *, key: str | None = None, version: str = "1"):
    """Serve an engine as `m` and record it; yields the server's address and a client."""
    decode = TokenDecoder(engine.tokenizer) if hasattr(engine, "tokenizer") else lambda ids: "".join(map(chr, ids))
    recorder = ServedRecorder(folder, version, spec, vocabulary="vocabulary:v", decode=decode)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    options = AppOptions(decode=decode, recorder=recorder)
    with (
        ModelServer(engine, "m", options, ListenOptions(key=key)) as server,
        httpx.Client(base_url=server.url, timeout=600, headers=headers) as client,
    ):
        yield client


def ask(client, *texts: str, headers=None, **more):
    """The response to a conversation of user and assistant turns, as JSON, and the id of its conversation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    body = {"model": "m", "messages": messages, "max_tokens": 6, **more}
    response = client.post("/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json(), response.headers["x-conversation-id"]


def rows(folder: Path) -> list[dict]:
    source = ServedSource.of(SourceSpec(path=str(folder)))
    assert source is not None
    return list(source.rows())


def test_a_conversation_over_all_apis_has_the_sampled_tokens(engine, tmp_path):
    """The tokens are those that the API returns for the same answers."""
    with recorded(engine, tmp_path / "served") as client:
        first, talk = ask(client, "Hello", return_token_ids=True, tools=TOOLS)
        said = first["choices"][0]["message"]["content"]
        again, same = ask(client, "Hello", said, "And now?", return_token_ids=True, tools=TOOLS, n=2)
        assert same == talk
        assert client.post("/feedback", json={"conversation": talk, "score": 1}).status_code == 200
        with openai.OpenAI(base_url=str(client.base_url), api_key="k", timeout=600) as sdk:
            stream = sdk.chat.completions.with_streaming_response.create(
                model="m", messages=[{"role": "user", "content": "Streamed"}], max_tokens=4, stream=True
            )
            with stream as response:
                streamed = response.headers["x-conversation-id"]
                response.read()
        response = client.post("/responses", json={"model": "m", "input": "Hi", "max_output_tokens": 4})
        message = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        anthropic = client.post("/messages", json=message)
        for target in (
            {"conversation": streamed},
            {"answer": response.json()["id"]},
            {"answer": anthropic.json()["id"]},
        ):
            assert client.post("/feedback", json={**target, "score": 0}).status_code == 200
    assert len(rows(tmp_path / "served")) == 4
    (whole,) = (row for row in rows(tmp_path / "served") if row["conversation"] == talk)
    assert whole["tools"] == TOOLS
    (candidate,) = whole["candidates"]
    streams = [
        [*again["prompt_token_ids"], *choice["token_ids"]] for choice in again["choices"]
    ]  # the two answers to the second message: the first one continues the conversation
    assert [history.token_ids for history in candidate.histories] == streams
    prompt, sampled = first["prompt_token_ids"], first["choices"][0]["token_ids"]
    expected = [False] * len(prompt) + [True] * len(sampled)
    expected += [False] * (len(again["prompt_token_ids"]) - len(expected)) + [True] * len(
        again["choices"][0]["token_ids"]
    )
    assert candidate.histories[0].sampled_mask() == expected
    assert candidate.tokenizer == "vocabulary:v"
    lines = [line for line in read(tmp_path / "served") if "id" in line]
    assert lines[1]["shared"] == len(prompt) + len(sampled)
    assert len(lines[1]["messages"]) == 1
    assert all(line["seconds"] > 0 and line["version"] == "1" for line in lines)


def test_users_with_equal_words_and_repeated_answers_have_conversations_of_their_own(tmp_path):
    with recorded(ScriptedEngine(["Yes."]), tmp_path) as client:
        ids = [ask(client, "Hello")[1] for _ in range(2)]
        assert len(set(ids)) == 2
        continued = [ask(client, "Hello", "Yes.", "More")[1] for _ in range(3)]
        assert continued[0] in ids
        assert len({*ids, *continued}) == 4
        named = {"x-conversation-id": "order-17"}
        assert [ask(client, "Hello", headers=named)[1] for _ in range(2)] == ["order-17"] * 2
        bad = client.post("/chat/completions", headers={"x-conversation-id": "a b"}, json={
            "model": "m", "messages": [{"role": "user", "content": "a"}],
        })  # fmt: skip
        assert (bad.status_code, "up to 64 letters" in bad.text) == (400, True)


def test_a_call_that_failed_does_not_take_the_place_of_its_repetition(tmp_path):
    recorder = ServedRecorder(tmp_path, "1")
    engine = ScriptedEngine(["Yes."])

    async def run() -> list[str]:
        async def complete(requests):
            return [await engine.chat(request) for request in requests]

        async def fail(requests):
            raise RuntimeError

        opening = [{"role": "user", "content": "a"}]
        first = recorder.begin(ChatRequest(opening), "1", None)
        await first.recorded(complete)([ChatRequest(opening)])
        request = ChatRequest([*opening, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "b"}])
        failed = recorder.begin(request, "2", None)
        with pytest.raises(RuntimeError):
            await failed.recorded(fail)([request])
        return [call.conversation for call in (first, failed, recorder.begin(request, "3", None))]

    assert len(set(asyncio.run(run()))) == 1


REFUSED = {
    "unknown answer": ({"answer": "chatcmpl-none", "score": 1}, 404, "no answer chatcmpl-none: it was not recorded"),
    "unknown conversation": ({"conversation": "conv-none", "score": 1}, 404, "no conversation conv-none"),
    "nothing": ({"answer": "ID"}, 400, "expected score, better_than, correction or text"),
    "no target": ({"score": 1}, 400, "expected the id of an answer"),
    "two targets": ({"answer": "ID", "conversation": "TALK", "score": 1}, 400, "expected the id of an answer"),
    "above 1": ({"answer": "ID", "score": 5}, 400, "score"),
    "text as score": ({"answer": "ID", "score": "good"}, 400, "score"),
    "a bool as score": ({"answer": "ID", "score": True}, 400, "score"),
    "unknown field": ({"answer": "ID", "scores": 1}, 400, "Did you mean 'score'"),
    "too long": ({"answer": "ID", "text": "a" * 10_001}, 400, "text"),
    "path as id": ({"answer": "../../etc passwd", "score": 1}, 400, "answer"),
    "better than itself": ({"answer": "ID", "better_than": "ID"}, 400, "is not another answer to the prompt"),
    "better than another prompt's": ({"answer": "ID", "better_than": "OTHER"}, 400, "is not another answer to the"),
    "better than an unknown one": ({"answer": "ID", "better_than": "gone"}, 404, "no answer gone"),
    "choice of a conversation": ({"conversation": "TALK", "better_than": "ID"}, 400, "is about an answer"),
    "correction of a conversation": ({"conversation": "TALK", "correction": {"text": "a"}}, 400, "is about an answer"),
    "empty correction": ({"answer": "ID", "correction": {}}, 400, "expected text or calls"),
    "invalid call": ({"answer": "ID", "correction": {"calls": [{"name": "a", "arguments": "x"}]}}, 400, "arguments"),
}


def test_bad_feedback_is_refused_and_not_written(tmp_path):
    with recorded(ScriptedEngine(["Yes."]), tmp_path) as client:
        (first, talk), (other, _) = ask(client, "Hello"), ask(client, "Bye")
        names = {"ID": first["id"], "TALK": talk, "OTHER": other["id"]}
        for case, (body, status, text) in REFUSED.items():
            filled = {key: names.get(value, value) if isinstance(value, str) else value for key, value in body.items()}
            response = client.post("/feedback", json=filled)
            message = response.json()["error"]["message"]
            assert (response.status_code, text in message) == (status, True), f"{case}: {message}"
        json_type = {"content-type": "application/json"}
        for raw in (f'{{"answer": "{first["id"]}", "score": NaN}}', f'{{"answer": "{"a" * (5 << 20)}"}}', "[]"):
            assert client.post("/feedback", content=raw, headers=json_type).status_code in (400, 413)
    assert [line for line in read(tmp_path) if "feedback" in line] == []


def test_feedback_needs_the_key_of_the_server(tmp_path):
    with recorded(ScriptedEngine(["Yes."]), tmp_path, key="k" * 16) as client:
        answer, _ = ask(client, "Hello")
        body = {"answer": answer["id"], "score": 1}
        assert client.post("/feedback", json=body, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.post("/feedback", json=body, headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/feedback", json=body).status_code == 200


def test_nothing_is_recorded_when_off_and_health_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ModelServer(ScriptedEngine(["Yes."]), "m") as server, httpx.Client(base_url=server.url) as client:
        response = client.post("/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "a"}]})
        assert "x-conversation-id" not in response.headers
        assert client.get(server.url.removesuffix("/v1") + "/health").json()["recording"] is False
        refused = client.post("/feedback", json={"answer": response.json()["id"], "score": 1})
        assert (refused.status_code, "--record DIR" in refused.text) == (404, True)
    assert list(tmp_path.rglob("*")) == []
    with recorded(ScriptedEngine(["Yes."]), tmp_path / "served") as client:
        assert client.get(str(client.base_url).removesuffix("/v1/") + "/health").json()["recording"] is True


def test_the_folder_is_private(tmp_path):
    folder = tmp_path / "runs" / "served"
    ServedLog(folder).append(lambda file: [{"id": "a", "conversation": "b", "prompt": "c"}])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in files(folder)} == {0}
    folder.chmod(0o750)
    with pytest.raises(ResourceError, match=r"mode 0750.*expected 0700. Run: chmod 700"):
        ServedLog(folder)


def test_redacted_text_is_in_no_message_and_in_no_token(engine, tmp_path):
    """Also of the turns after it, whose prompts contain it, and where only the text of tokens matches."""
    secret, folder = "sk-proj-" + "a1B2" * 10, tmp_path / "served"
    spec = RecordsSpec(redact=[r"\b\d{4}-\d{4}\b", r"<\|im_start\|>user\nOnly"])
    with recorded(engine, folder, spec) as client:
        ask(client, "Hello")
        card, talk = ask(client, "My card is 1234-5678")
        ask(client, "My card is 1234-5678", card["choices"][0]["message"]["content"], "Thanks")
        ask(client, f"My key is {secret}")
        ask(client, "Only tokens")
        body = {"conversation": talk, "score": 0, "text": "I said 1234-5678"}
        assert client.post("/feedback", json=body).status_code == 200
    lines = [line for line in read(folder) if "id" in line]
    assert [bool(line["token_ids"]) for line in lines] == [True, False, False, False, False]
    assert all(line["prompt_token_ids"] == line["logprobs"] == [] for line in lines[1:])
    written = files(folder)[0].read_text()
    assert "1234-5678" not in written
    assert secret not in written
    assert written.count("My card is [redacted]") == 1  # the second turn continues the first
    (row,) = rows(folder)
    assert [history.token_ids for history in row["candidates"][0].histories] == [[]]
    assert not row["candidates"][0].tokenizer
    with pytest.raises(SpecError, match="matches empty text"):
        validate(RecordsSpec, {"redact": ["a*"]})


def test_redaction_looks_into_json_and_into_tokens_that_are_in_no_message(tmp_path):
    """Escapes of JSON hide a text from a pattern; a prompt may have reasoning that the client left out."""
    secret = "sk-proj-" + "a1B2" * 10
    arguments = json.dumps(
        {
            "id": "card\n1234-5678",
            "name": "Jos\u00e9",
            "body": f"KEY:\n{secret}",
            "env": "a\npwd=x8x8x8x8",
            "api_key": "x8x8x8x8",
        }
    )
    deep = "[" * 5000 + "]" * 5000
    call = {"id": "1234-5678", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    tool = {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"properties": {"id": {"title": "1234-5678"}}}},
    }
    messages = [
        {"role": "user", "content": deep},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1234-5678", "content": json.dumps([arguments])},
    ]
    recorder = ServedRecorder(
        tmp_path,
        "1",
        RecordsSpec(redact=[r"\b\d{4}-\d{4}\b", "Jos\u00e9"]),
        decode=lambda ids: f"pwd=x8x8x8x8 {secret}",
    )
    for number, request in enumerate(
        (ChatRequest(messages, tools=[tool]), ChatRequest([{"role": "user", "content": "a"}]))
    ):

        async def complete(requests):
            return [await ScriptedEngine(["Yes."]).chat(request) for request in requests]

        asyncio.run(recorder.begin(request, str(number), None).recorded(complete)([request]))
    first, plain = read(tmp_path)
    (logged,), result = first["messages"][1]["tool_calls"], first["messages"][2]
    assert logged["id"] == result["tool_call_id"] == "1234-5678"  # ids stay: calls and results are joined by them
    assert first["messages"][0]["content"] == "[redacted]"
    assert first["tools"][0]["function"]["parameters"]["properties"]["id"]["title"] == "[redacted]"
    for text in (logged["function"]["arguments"], json.loads(result["content"])[0]):
        values = json.loads(text)
        assert values == {
            "id": "card\n[redacted]",
            "name": "[redacted]",
            "body": "KEY:\n***",
            "env": "a\npwd=***",
            "api_key": "***",
        }
    assert plain["messages"][0]["content"] == "a"
    assert plain["token_ids"] == plain["prompt_token_ids"] == []


def test_old_and_excess_files_are_deleted_and_a_conversation_goes_on_in_a_new_one(engine, tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(served_log.time, "time", lambda: now)
    folder = tmp_path / "served"
    with recorded(engine, folder, RecordsSpec(days=10)) as client:
        first, talk = ask(client, "Hello", return_token_ids=True)
        said = first["choices"][0]["message"]["content"]
        now += DAY + 1  # a file holds a day
        second, same = ask(client, "Hello", said, "More", return_token_ids=True)
        assert same == talk
        assert len(files(folder)) == 2
        assert client.post("/feedback", json={"conversation": talk, "score": 1}).status_code == 200
        ((candidate,),) = [row["candidates"] for row in rows(folder)]
        answer = second["choices"][0]["token_ids"]
        assert [history.token_ids for history in candidate.histories] == [[*second["prompt_token_ids"], *answer]]
        assert sum(candidate.histories[0].sampled_mask()) == len(first["choices"][0]["token_ids"]) + len(answer)
        now += 9 * DAY
        refused = client.post("/feedback", json={"answer": first["id"], "score": 1})
        assert (refused.status_code, "older than the 10 days" in refused.text) == (404, True)
        assert len(files(folder)) == 1
        ((candidate,),) = [row["candidates"] for row in rows(folder)]  # what was before is context
        assert sum(candidate.histories[0].sampled_mask()) == len(answer)
    log = ServedLog(folder, RecordsSpec(megabytes=1))
    for number in range(20):
        now += 1
        line = {"id": f"{number}", "conversation": "a", "prompt": "b", "x": "x" * 99_999}
        log.append(lambda file, line=line: [line])
    assert sum(path.stat().st_size for path in files(folder)) <= 1.2 * 2**20
    assert log.find(answer="19") is not None
    assert log.find(answer="0") is None


def test_feedback_and_answers_at_once_lose_nothing(tmp_path):
    """Two servers on one folder: feedback reaches the answers of either."""
    with recorded(ScriptedEngine(["Yes."]), tmp_path) as one, recorded(ScriptedEngine(["No."]), tmp_path) as two:

        def talk(number: int) -> int:
            answer, _ = ask((one, two)[number % 2], f"Hello {number}")
            target = (two, one)[number % 2]
            return target.post("/feedback", json={"answer": answer["id"], "score": number % 2}).status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(talk, range(40))) == {200}
    lines = list(read(tmp_path))
    assert len(lines) == 80 == sum(path.read_bytes().count(b"\n") for path in files(tmp_path))
    assert len(rows(tmp_path)) == 40


def test_a_full_disk_does_not_stop_the_answers(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with recorded(ScriptedEngine(["Yes."]), tmp_path) as client:
        monkeypatch.setattr(os, "fsync", full)
        ask(client, "Hello")
        health = client.get(str(client.base_url).removesuffix("/v1/") + "/health").json()
        assert "No space left" in health["recording_error"]


def test_a_killed_server_loses_at_most_the_answer_under_way(base_dir, tmp_path):
    folder = tmp_path / "served"
    options = ["--port", "0", "--name", "m", "--record", str(folder), "--version", "7"]
    command = [sys.executable, "-m", "components.inference.server", str(base_dir), *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("serving "))
            with httpx.Client(base_url=line.split()[3], timeout=600) as client:
                answers = [ask(client, f"Hello {number}")[0]["id"] for number in range(3)]
                begun = threading.Event()

                def interrupted() -> None:
                    body = {
                        "model": "m",
                        "messages": [{"role": "user", "content": "a"}],
                        "max_tokens": 400,
                        "stream": True,
                    }
                    url = f"{client.base_url}chat/completions"
                    with (
                        contextlib.suppress(httpx.HTTPError),
                        httpx.stream("POST", url, json=body, timeout=600) as response,
                    ):
                        for _ in response.iter_lines():
                            begun.set()

                thread = threading.Thread(target=interrupted)
                thread.start()
                assert begun.wait(600)
                process.send_signal(signal.SIGKILL)
                thread.join()
        finally:
            process.kill()
    assert [line["id"] for line in read(folder)] == answers
    with open(files(folder)[0], "ab") as file:
        file.write(b'{"id": "half a li')  # an interrupted write
    log = ServedLog(folder)
    answer = log.find(answer=answers[0])
    assert answer is not None
    assert log.append_feedback({"feedback": "f", "answer": answers[0], "conversation": answer.conversation}, answer)
    text = files(folder)[0].read_text()
    assert [json.loads(line).get("id") for line in text.splitlines()] == [*answers, None]
    assert not re.search("half", text)
