"""Annotation: access to the page's server, saved answers, and error messages of the command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from components.artifacts import Store
from components.data.form_resolution import first_examples
from components.data.spec import DataSpec
from components.errors import SpecError
from components.tracking.human_assessments import HumanAssessments
from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from components.trajectories.feedback import append, read, standing, write_line
from flows.annotation.app import HEADERS, MOST_BYTES, LoginToken, create_app
from flows.annotation.session import AnnotationSession
from flows.experiment.data import resolve
from flows.runs.annotate import author_of, main
from tests.flows.annotated import ATTACK, EPISODES, loaded, played
from tests.flows.pretend import pretend
from tests.trajectories.said import chose, corrected, labelled_step, rated

ROOT = Path(__file__).parents[2]
PORT = 8391
ACCESS = LoginToken(lambda token: None)
TOKEN = ACCESS.cookie
ORIGIN = f"http://127.0.0.1:{PORT}"
PAGE = {"cookie": f"espalier-{PORT}={TOKEN}", "origin": ORIGIN}
A, B, C, D, FAILED = EPISODES


@pytest.fixture
def run(tmp_path):
    return played(tmp_path)


@pytest.fixture
def session(tmp_path, run):
    return AnnotationSession(loaded(tmp_path, run), "Ada")


def asked(app, method: str, path: str, headers=PAGE, **more) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(ask())


@pytest.fixture
def ask(session):
    app = create_app(session, ACCESS, PORT)
    return lambda *given, **more: asked(app, *given, **more)


def lines(session):
    return read(session.episodes.file) if session.episodes.file.exists() else []


SCORE = {"kind": "score", "trajectory": A.id, "score": 4}

# --- who may speak to it --------------------------------------------------------------------------------------------


def test_the_url_with_the_token_gives_a_cookie_that_no_script_and_no_other_site_has(ask):
    answer = ask("GET", f"/?token={ACCESS.token}", headers={})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"espalier-{PORT}={TOKEN};")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask("GET", "/").status_code == 200
    assert "set-cookie" not in ask("GET", "/").headers


def test_without_the_token_nothing_is_shown(ask):
    none, port = {}, f"espalier-{PORT}"
    cookies = ["", f"{port}=wrong", f"espalier-1={TOKEN}", f"{port}=", "\"=;,'", f"token={TOKEN}"]
    for path in ("/", "/static/app.js", "/api/state", f"/api/episode?id={A.id}", "/docs", "/openapi.json"):
        for cookie in cookies:
            answer = ask("GET", path, headers={"cookie": cookie} if cookie else none)
            assert (answer.status_code, "order-A7" in answer.text) == (401, False), (path, cookie)
    # It is taken from the URL of the page alone, and that of the cookie is none.
    for path in ("/?token=wrong", f"/?token={TOKEN}", f"/api/state?token={ACCESS.token}"):
        assert ask("GET", path, headers=none).status_code == 401, path


@pytest.mark.security
def test_the_token_works_once(ask):
    token = ACCESS.token
    assert ask("HEAD", f"/?token={token}", headers={}).status_code == 401  # and does not use it up
    assert ask("GET", f"/?token={token}&token={token}", headers={}).status_code == 401
    assert ask("GET", f"/?token={token}").status_code == 200  # with the cookie it is not needed
    assert ask("GET", f"/?token={token}", headers={}).status_code == 200
    again = ask("GET", f"/?token={token}", headers={})
    assert again.status_code == 401
    assert "set-cookie" not in again.headers
    assert ACCESS.token not in (token, TOKEN)
    assert ask("GET", f"/?token={ACCESS.token}", headers={}).status_code == 200


def test_another_name_for_this_machine_is_refused(ask, session):
    """DNS rebinding: a page whose name resolves to 127.0.0.1 sends its own name as Host."""
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"[::1]:{PORT}", ""):
        headers = {**PAGE, "host": host}
        assert ask("GET", "/api/state", headers=headers).status_code == 421, host
        assert ask("POST", "/api/answer", headers=headers, json=SCORE).status_code == 421, host
    assert lines(session) == []
    own = f"localhost:{PORT}"
    assert ask("GET", "/api/state", headers={**PAGE, "host": own}).status_code == 200
    headers = {**PAGE, "host": own, "origin": f"http://{own}"}
    assert ask("POST", "/api/answer", headers=headers, json=SCORE).status_code == 200


def test_other_sites_write_nothing(ask, session):
    others = ["http://evil.example", "null", "http://127.0.0.1", f"https://127.0.0.1:{PORT}", f"{ORIGIN}.evil.example"]
    cookie = {"cookie": PAGE["cookie"]}
    for headers in (cookie, *({**cookie, "origin": origin} for origin in others)):
        for path in ("/api/answer", "/api/undo"):
            assert ask("POST", path, headers=headers, json=SCORE).status_code == 403, (path, headers)
    # A form of another site, which the browser sends without asking, has one of these types.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
        headers = {**PAGE, **({"content-type": kind} if kind else {})}
        assert ask("POST", "/api/answer", headers=headers, content=json.dumps(SCORE)).status_code == 415, kind
    assert lines(session) == []


def test_a_large_body_is_refused_whether_it_says_so_or_not(ask, session):
    async def chunks():
        for _ in range(20):
            yield b" " * (MOST_BYTES // 16)

    headers = {**PAGE, "content-type": "application/json"}
    large = {**SCORE, "note": "x" * MOST_BYTES}
    assert ask("POST", "/api/answer", headers=headers, json=large).status_code == 413
    assert ask("POST", "/api/answer", headers=headers, content=chunks()).status_code == 413
    assert ask("POST", "/api/answer", headers=headers, json={**SCORE, "note": "x" * 20_000}).status_code == 400
    assert lines(session) == []


def test_every_answer_forbids_scripts_and_frames(ask):
    for path in ("/", "/static/app.js", "/static/style.css", "/api/state", "/nothing", "/static/..%2fapp.py"):
        headers = ask("GET", path).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS, path
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_the_page_has_no_inline_script_and_loads_nothing_from_elsewhere():
    folder = ROOT / "flows" / "annotation" / "page"
    page = (folder / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"\son\w+=|\sstyle=", page) == []
    for file in folder.iterdir():
        assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"(^|\s)//.*", "", file.read_text())) == []
    script = "".join(file.read_text() for file in folder.glob("*.js"))
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script) == []


# --- what it shows and keeps ----------------------------------------------------------------------------------------


def test_an_episode_is_shown_whole_and_the_judge_only_after_the_answer(ask):
    shown = ask("GET", f"/api/episode?id={B.id}").json()
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in shown["histories"][0]["messages"]] == roles
    assert shown["histories"][0]["messages"][2]["calls"][0]["name"] == "look_up"
    assert ATTACK in shown["histories"][0]["messages"][1]["content"]  # as text: the page sets it as such
    assert '"success": false' in shown["outcome"]
    assert len(shown["tools"]) == 1
    assert (shown["has_judge"], shown["judge"]) == (True, None)
    assert "0.125" not in json.dumps(shown)
    assert ask("GET", f"/api/episode?id={B.id}&reveal=true").json()["judge"]["reward"] == "0.125"
    ask("POST", "/api/answer", json={**SCORE, "trajectory": B.id})
    assert ask("GET", f"/api/episode?id={B.id}").json()["judge"]["reward"] == "0.125"
    assert ask("GET", f"/api/episode?id={C.id}").status_code == 200  # with a lone surrogate
    assert "EnvironmentFailed" in ask("GET", f"/api/episode?id={FAILED.id}").json()["failure"]


def test_answers_are_on_the_disk_when_they_are_confirmed(ask, session):
    given = [
        {**SCORE, "note": "polite"},
        {"kind": "choice", "trajectory": A.id, "other": B.id, "better": "a"},
        {"kind": "correction", "trajectory": B.id, "history": 0, "message": 4, "text": "I look it up."},
        {"kind": "step", "trajectory": B.id, "history": 0, "message": 2, "good": False},
    ]
    for number, data in enumerate(given, 1):
        assert ask("POST", "/api/answer", json=data).status_code == 200
        assert len(lines(session)) == number
    score, choice, correction, step = lines(session)
    artifact = session.episodes.artifact.digest
    assert (score.author, score.score, score.note, score.artifact) == ("Ada", 4, "polite", artifact)
    assert (choice.better, choice.other_content) == ("a", session.episodes.contents[B.id])
    assert correction.text == "I look it up."
    assert (step.message, step.good) == (2, False)
    assert ask("GET", f"/api/episode?id={B.id}").json()["steps"] == [{"history": 0, "message": 2, "good": False}]
    # The page cannot choose these.
    ask("POST", "/api/answer", json={**SCORE, "author": "Eve", "time": "2020-01-01T00:00:00Z", "artifact": "b" * 64})
    assert {(line.author, line.artifact) for line in lines(session)} == {("Ada", artifact)}
    assert all(time.time() - line.moment < 600 for line in lines(session))


REFUSED = [
    ({**SCORE, "score": 6}, "at most 5"),
    ({**SCORE, "score": "many"}, "a whole number"),
    ({**SCORE, "trajectory": "nobody"}, "no such episode"),
    ({**SCORE, "trajectory": None}, "no such episode"),
    ({**SCORE, "kind": "withdrawal", "answer": "a" * 64}, "expected one of score, choice, correction"),
    ({"kind": "choice", "trajectory": A.id, "other": D.id, "better": "a"}, "different scenarios"),
    ({"kind": "choice", "trajectory": A.id, "other": A.id, "better": "a"}, "two episodes"),
    ({"kind": "choice", "trajectory": A.id, "other": B.id, "better": "both"}, "expected one of a, b, tie"),
    ({"kind": "correction", "trajectory": A.id, "message": 1, "text": "x"}, "not the assistant's"),
    ({"kind": "correction", "trajectory": A.id, "message": 99, "text": "x"}, "not the assistant's"),
    ({"kind": "correction", "trajectory": A.id, "message": 4, "text": "  "}, "expected a text or calls"),
    ({"kind": "step", "trajectory": A.id, "message": 3, "good": True}, "not the assistant's"),
    ({"kind": "step", "trajectory": A.id, "message": 4, "good": 1}, "expected true or false"),
    ({"kind": "step", "trajectory": A.id, "message": 4}, "good: is missing"),
    ([1], "expected a JSON object"),
]


def test_what_cannot_be_is_refused_and_not_kept(ask, session):
    for data, words in REFUSED:
        answer = ask("POST", "/api/answer", json=data)
        assert (answer.status_code, words in answer.json()["error"]) == (400, True), words
    with pytest.raises(SpecError):  # also without the server
        session.answer({"kind": "score", "trajectory": A.id})
    assert lines(session) == []


def test_undo_takes_the_last_answer_back_and_brings_back_what_it_replaced(ask, session):
    ask("POST", "/api/answer", json=SCORE)
    ask("POST", "/api/answer", json={**SCORE, "score": 1})
    assert ask("POST", "/api/undo", json={}).json()["undone"] == {"kind": "score", "trajectory": A.id}
    assert [answer.score for answer in session.standing()] == [4]
    ask("POST", "/api/undo", json={})
    assert ask("POST", "/api/undo", json={}).json()["undone"] is None
    assert session.standing() == []
    assert len(lines(session)) == 4  # nothing is removed from the file


def test_what_is_not_answered_comes_first(tmp_path, run, session):
    for name in (A.id, C.id):
        session.answer({**SCORE, "trajectory": name})
    again = AnnotationSession(loaded(tmp_path, run), "Ada").state()
    assert [episode["id"] for episode in again["episodes"]] == [B.id, D.id, FAILED.id, A.id, C.id]
    assert [episode["status"] for episode in again["episodes"]][:3] == ["unsolved", "success", "failed"]
    others = AnnotationSession(loaded(tmp_path, run), "Bo").state()
    assert {episode["score"] for episode in others["episodes"]} == {None}


def test_finished_episodes_of_a_scenario_are_compared(session):
    assert [set(pair) for pair in session.episodes.pairs] == [{A.id, B.id}, {B.id, C.id}]
    a, b = session.episodes.pairs[0]
    session.answer({"kind": "choice", "trajectory": b, "other": a, "better": "a"})
    assert session.state()["pairs"][0] == {"a": a, "b": b, "better": "b"}


def test_two_people_and_two_tabs_at_once_lose_nothing(tmp_path, run):
    sessions = [AnnotationSession(loaded(tmp_path, run), name) for name in ("Ada", "Ada", "Bo")]
    errors = []

    def work(session):
        try:
            for number in range(10):
                session.answer({**SCORE, "trajectory": EPISODES[number % 5].id, "score": 1 + number % 5})
                session.state()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert errors == []
    assert len(lines(sessions[0])) == 30
    assert {(answer.author, answer.trajectory): answer.score for answer in sessions[1].standing()} == {
        (author, one.id): 1 + place for author in ("Ada", "Bo") for place, one in enumerate(EPISODES)
    }
    assert sessions[0].state()["episodes"] == sessions[1].state()["episodes"]


def test_a_sample_is_drawn_by_its_seed_in_whole_groups(tmp_path, run):
    from flows.annotation.episodes import sample_groups

    many = [one for number in range(20) for one in (EPISODES[0], EPISODES[1])]
    many = [
        type(one)(f"{i}/{one.sample}", type(one.scenario)(f"s{i // 2}", {}, "train"), one.sample, [])
        for i, one in enumerate(many)
    ]
    first = [one.id for one in sample_groups(many, 6, 3)]
    assert first == [one.id for one in sample_groups(many, 6, 3)] != [one.id for one in sample_groups(many, 6, 4)]
    assert len({one.scenario.id for one in sample_groups(many, 6, 3)}) == 3
    assert sample_groups(many, None, 3) == many


# --- MLflow ---------------------------------------------------------------------------------------------------------


def assessments(people, episode):
    info = people._client.get_trace_info(people._traces[episode.id])
    found = [assessment for assessment in info.assessments if assessment.source.source_type == "HUMAN"]
    return sorted((one.name, one.source.source_id, str(one.value)) for one in found)


def test_mlflow_has_what_people_said_as_assessments_of_the_traces(tmp_path):
    with Tracker.open(tmp_path, TrackingSpec(), "shop") as tracker:
        tracker.log_trajectories([A], "evaluate[final]")
        people = HumanAssessments(tracker.client, tracker.run_id, "evaluate[final]")
        assert set(people._traces) == {A.id}
        before = people._traces[A.id]
        answers = [rated(A, 4, note="polite"), rated(A, 2, author="Bo"), chose(B, A, "b"), corrected(A, 4, "Shipped.")]
        answers.append(labelled_step(A, 2, True))
        assert people.tell(A, answers) == before
        assert assessments(people, A) == [
            ("correction", "Ada", "{'text': 'Shipped.', 'calls': []}"),
            ("human_choice", "Ada", "better"),
            ("human_score", "Ada", "4"),
            ("human_score", "Bo", "2"),
            ("human_step", "Ada", "True"),
        ]
        people.tell(B, [answer for answer in answers if answer.kind == "choice"])  # had no trace
        assert assessments(people, B) == [("human_choice", "Ada", "worse")]
        people.tell(A, standing([*answers, rated(A, 5, second=9)]))
        people.tell(A, standing([*answers, rated(A, 5, second=9)]))  # said twice is said once
        assert ("human_score", "Ada", "5") in assessments(people, A)
        assert len(assessments(people, A)) == 5
        people.tell(A, [])
        assert assessments(people, A) == []
        assert set(HumanAssessments(tracker.client, tracker.run_id, "evaluate[final]")._traces) == {A.id, B.id}


def test_what_mlflow_was_not_told_costs_no_answer(tmp_path, run):
    def away(episode, answers):
        raise ConnectionError("nobody there")

    session = AnnotationSession(loaded(tmp_path, run), "Ada", away)
    session.answer(SCORE)
    session.close()
    assert "nobody there" in session.mirror.problem
    told = []
    later = AnnotationSession(
        loaded(tmp_path, run), "Bo", lambda episode, answers: told.append((episode.id, len(answers)))
    )
    later.close()
    assert told == [(A.id, 1)]


# --- the command ----------------------------------------------------------------------------------------------------


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_mistakes_are_named_with_exit_code_2(tmp_path, run, capsys):
    root = (f"root={tmp_path}", "--no-browser")
    assert "there is no run 'tset'" in (stderr := refused(capsys, "tset", *root))
    assert "did you mean test?" in stderr
    assert "root=" in refused(capsys, "test", f"root={tmp_path / 'nothing'}")
    stderr = refused(capsys, "test", *root, "--stage", "colect[1]")
    assert "did you mean collect[1]?" in stderr
    assert "evaluate[start]" in stderr
    assert "expected a name" in refused(capsys, "test", *root, "--author", " ")
    assert "--port 99999: expected 0 to 65535" in refused(capsys, "test", *root, "--port", "99999")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: cannot listen (" in refused(capsys, "test", *root, "--port", port)
    with pytest.raises(SystemExit) as caught:
        main(["test", *root, "--sample", "none"])
    assert caught.value.code == 2
    other = pretend(tmp_path / "other", stop_at="evaluate[start]")
    words = f"run {other.short} (test) has no episodes yet"
    assert words in refused(capsys, other.id, f"root={tmp_path / 'other'}")


def test_a_damaged_file_is_named_with_its_line_and_episodes_that_are_gone_with_their_stage(
    tmp_path, run, session, capsys
):
    session.answer(SCORE)
    with open(session.episodes.file, "a") as file:
        file.write('{"kind": "score", "score": 9}\n')
    assert "line 2: " in refused(capsys, "test", f"root={tmp_path}", "--no-browser", "--author", "Ada")
    Store(tmp_path / "artifacts").path(run.stage("collect[1]").key).rename(tmp_path / "elsewhere")
    assert "episodes of collect[1]" in refused(capsys, "test", f"root={tmp_path}")


def test_what_was_said_goes_out_and_comes_in_again(tmp_path, run, session, capsys):
    session.answer(SCORE)
    session.answer({**SCORE, "score": 2})
    session.answer({"kind": "choice", "trajectory": A.id, "other": B.id, "better": "tie"})
    out = tmp_path / "out.jsonl"
    root = (f"root={tmp_path}",)
    assert main(["test", *root, "--export", str(out)]) == 0
    assert [answer.kind for answer in read(out)] == ["score", "choice"]  # what stands
    session.episodes.file.unlink()
    assert main(["test", *root, "--import", str(out)]) == 0
    assert "2 answers added, 0 already present" in capsys.readouterr().err
    assert main(["test", *root, "--import", str(out)]) == 0
    assert "0 answers added, 2 already present" in capsys.readouterr().err
    assert read(session.episodes.file) == read(out)
    assert "cannot be written" in refused(capsys, "test", *root, "--export", str(tmp_path / "no" / "out.jsonl"))


def test_labels_of_steps_are_data_of_the_form_that_a_process_model_learns(tmp_path, run, session, capsys):
    root, out, artifact = f"root={tmp_path}", tmp_path / "labels.jsonl", session.episodes.artifact.digest
    assert "no labels of first steps" in refused(capsys, "test", root, "--labels", str(out))
    append(session.episodes.file, [labelled_step(A, 2, False, author="Bo", artifact=artifact)])
    for episode, message, good in ((A, 2, True), (A, 4, False), (B, 2, True), (C, 4, True)):
        session.answer({"kind": "step", "trajectory": episode.id, "message": message, "good": good})
    assert main(["test", root, "--labels", str(out)]) == 0
    told = capsys.readouterr().err
    assert "3 labels of 2 conversations" in told
    assert "1 were left out" in told  # the first step of C has none
    data = resolve(DataSpec(path=str(out)))
    assert data.spec.form == "step_labels"
    found = [example.candidates[0] for example in first_examples(data.spec)]
    assert [one.step_labels for one in found] == [{"labelled": [0.5, 0.0]}, {"labelled": [1.0]}]
    read_back = [[(one.role, one.content, bool(one.tool_calls)) for one in item.messages] for item in found]
    shown = [[(one.role, one.content, bool(one.tool_calls)) for one in it.histories[0].messages] for it in (A, B)]
    assert read_back == [shown[0], shown[1][:3]]
    assert "cannot be written" in refused(capsys, "test", root, "--labels", str(tmp_path / "no" / "labels.jsonl"))
    append(session.episodes.file, [labelled_step(A, 3, True, artifact=artifact)])
    assert "line 6: message 3 of history 0" in refused(capsys, "test", root, "--labels", str(out))


def test_of_a_file_with_a_mistake_nothing_is_imported(tmp_path, run, session, capsys):
    artifact = session.episodes.artifact.digest
    good = rated(A, 3, artifact=artifact)
    text = write_line(good)
    wrong = {
        "line 2: score: 8": text.replace('"score": 3', '"score": 8'),
        "line 2: it is about episodes of artifact bbbbbbbbbbbb; expected those of":
            write_line(rated(B, 3, artifact="b" * 64)),
        "line 2: there is no episode 'order-A7/9' in collect[1] (did you mean order-A7/": text.replace("A7/0", "A7/9"),
        "line 2: episode 'order-A7/1' of collect[1] has a different content": text.replace("A7/0", "A7/1"),
        "line 2: message 1 of history 0": write_line(corrected(A, 1, artifact=artifact)),
        "line 2: 'order-A7/0' and 'order-B1/0' are of different scenarios": write_line(chose(A, D, artifact=artifact)),
    }  # fmt: skip
    file = tmp_path / "in.jsonl"
    for words, line in wrong.items():
        file.write_text(text + line + write_line(rated(B, 3, artifact=artifact)))
        assert words in refused(capsys, "test", f"root={tmp_path}", "--import", str(file))
        assert lines(session) == []
    assert "there is no file" in refused(capsys, "test", f"root={tmp_path}", "--import", str(tmp_path / "none"))


def test_agreement_between_people_and_with_the_judge(tmp_path, run, session, capsys):
    artifact = session.episodes.artifact.digest
    said = [rated(A, 5, artifact=artifact), rated(B, 1, artifact=artifact), rated(D, 4, artifact=artifact)]
    said += [rated(one, score, author="Bo", artifact=artifact) for one, score in ((A, 4), (B, 2), (C, 3))]
    said += [chose(A, B, "a", artifact=artifact), chose(B, A, "b", author="Bo", artifact=artifact)]
    assert "has no answers of annotators yet" in refused(capsys, "test", f"root={tmp_path}", "--agreement")
    append(session.episodes.file, said)
    assert main(["test", f"root={tmp_path}", "--agreement"]) == 0
    data = json.loads(capsys.readouterr().out)["collect[1]"]
    (pair,) = data["scores"]["pairs"]
    assert (pair["authors"], pair["episodes"], pair["spearman"]) == (["Ada", "Bo"], 2, 1.0)
    # (5, 4), (1, 2): observed 1 + 1; expected (1 + 9 + 9 + 1) / 2
    assert pair["weighted_kappa"] == pytest.approx(1 - 2 / 10)
    assert data["choices"] == [{"authors": ["Ada", "Bo"], "pairs": 1, "equal": 1.0, "kappa": None}]
    assert data["judge"]["episodes"] == 4
    assert data["judge"]["spearman"] == pytest.approx(4 / 20**0.5)  # ranks 4 1 2 3 and 3.5 1.5 1.5 3.5


def test_the_author_is_said_or_known_from_git_or_the_machine(monkeypatch, tmp_path):
    assert author_of(" Ada ") == ("Ada", "--author")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gitconfig").write_text("[user]\nname = Grace\n")
    assert author_of(None) == ("Grace", "git's user.name")
    (tmp_path / "gitconfig").write_text("")
    monkeypatch.setenv("LOGNAME", "hal")
    assert author_of(None) == ("hal", "the user of this machine")


def started(root: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    line = [sys.executable, "-m", "flows.runs", "annotate", "test", f"root={root}", "--no-browser", *options]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_killed_at_any_moment_it_has_lost_nothing_that_was_confirmed(tmp_path, run, session):
    process, url = started(tmp_path, "--author", "Ada")
    try:
        origin, _, token = url.partition("/?token=")
        with httpx.Client(base_url=origin, headers={"origin": origin}) as client:
            assert client.get(f"/?token={token}").status_code == 200
            confirmed = [
                client.post("/api/answer", json={**SCORE, "score": 1 + n % 5}).json()["kept"] for n in range(7)
            ]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=600)
    assert [line.id for line in lines(session)] == confirmed


@pytest.mark.security
def test_it_listens_to_this_machine_and_its_own_page_only_and_ends_in_order(tmp_path, run):
    process, url = started(tmp_path, "--author", "Ada")
    try:
        origin = url.partition("/?")[0]
        with httpx.Client(base_url=origin) as client:
            assert client.get(url, headers={"host": "evil.example"}).status_code == 421  # and the token stays good
            assert client.get(url).status_code == 200
            assert client.get("/api/state", headers={"host": "evil.example"}).status_code == 421
            for other in ("http://evil.example", "null"):
                assert client.post("/api/undo", headers={"origin": other}, json={}).status_code == 403
            assert client.post("/api/undo", headers={"origin": origin}, json={}).status_code == 200
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/\?token=[\w-]{32}$", url)[1])
        listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
        addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
        assert f"0100007F:{port:04X}" in addresses
        assert f"00000000:{port:04X}" not in addresses
    finally:
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode in (0, -signal.SIGINT, 130), errors
    assert "Traceback" not in errors
    assert "author: Ada (from --author)" in errors
