"""Annotation page in a real browser: keyboard, reload, and scripts in the text of episodes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from components.trajectories.feedback import read, standing
from tests.flows.annotated import ATTACK, EPISODES, loaded, played
from tests.flows.processes import chromium
from tests.flows.test_annotate import started


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: page.problems.append(f"dialog {dialog.message}"))
    yield page
    context.close()


@pytest.fixture
def annotated(tmp_path):
    """Yield a run tracked by MLflow and the command's page for it."""
    run = played(tmp_path)
    with Tracker.open(tmp_path, TrackingSpec(), "test") as tracker:
        record = tmp_path / "records" / f"{run.id}.json"
        record.write_text(record.read_text().replace(run.id, tracker.run_id))
        record.rename(record.with_name(f"{tracker.run_id}.json"))
    process, url = started(tmp_path, "--author", "Ada")
    yield tmp_path, tracker, url, process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=600)


def press_score(page, value):
    page.keyboard.press(str(value))
    page.wait_for_selector(f"[data-score='{value}'][aria-pressed=true]")


@pytest.mark.timeout(1800)
def test_a_person_works_through_it_by_keyboard(page, annotated):
    root, tracker, url, process = annotated
    page.goto(url)
    page.wait_for_selector(".message")
    assert "token" not in page.url
    assert page.locator("#reveal").count() == 1  # the judge is hidden
    assert page.locator(".judge .value").count() == 0
    press_score(page, 4)
    assert page.locator(".judge .value").text_content() == "0.9"
    page.keyboard.press("Enter")  # the next one without an answer
    page.wait_for_selector(f"text={EPISODES[1].histories[0].messages[4].content.split('<')[0].strip()}")
    press_score(page, 2)
    press_score(page, 5)
    page.keyboard.press("u")
    page.wait_for_selector("[data-score='2'][aria-pressed=true]")
    page.keyboard.press("c")
    page.fill("#correction", "Let me look.\nIt is on its way.")
    page.fill("#correction-calls", '[{"name": "look_up", "arguments": {"id": "A7"}}]')
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".correction")
    page.keyboard.press("b")
    page.wait_for_selector(".chosen .mark[data-good=false][aria-pressed=true]")
    page.keyboard.press("[")  # the message before
    page.keyboard.press("g")
    page.wait_for_selector(".chosen .mark[data-good=true][aria-pressed=true]")
    page.locator(".chosen .mark[data-good=false]").click()  # the later label replaces it
    page.wait_for_selector(".chosen .mark[data-good=false][aria-pressed=true]")
    page.keyboard.press("g")
    page.wait_for_selector(".chosen .mark[data-good=true][aria-pressed=true]")
    page.keyboard.press("n")
    page.keyboard.type("knows nothing 5 a u")  # keys that mean something elsewhere
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#toast.shown")
    page.keyboard.press("p")
    page.wait_for_selector(".side")
    left = page.locator("[data-side=a] h2").text_content()
    page.keyboard.press("a")
    page.wait_for_selector("[data-side=a].better")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("[data-side=a].better")
    assert page.locator("[data-side=a] h2").text_content() == left
    assert page.locator("#mode-pairs span").text_content() == "1/2"
    assert page.locator("#mode-episodes span").text_content() == "2/5"
    assert page.problems == []
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=600)[1]
    assert "2 scores, 1 choices, 1 corrections, 2 steps" in errors
    assert "Traceback" not in errors
    episodes = loaded(root, played_record(root))
    score, other, correction, choice, *steps = sorted(
        standing(read(episodes.file)), key=lambda one: ["score", "correction", "choice", "step"].index(one.kind)
    )
    assert {one.trajectory: (one.score, one.note) for one in (score, other)} == {
        "order-A7/0": (4, ""),
        "order-A7/1": (2, "knows nothing 5 a u"),
    }
    assert (correction.trajectory, correction.message) == ("order-A7/1", 4)
    assert correction.text == "Let me look.\nIt is on its way."
    assert [(one.name, one.arguments) for one in correction.calls] == [("look_up", '{"id":"A7"}')]
    assert f"sample {choice.trajectory.rpartition('/')[2]}" in left
    assert choice.better == "a"
    assert [(one.trajectory, one.message, one.good) for one in steps] == [
        ("order-A7/1", 4, False),
        ("order-A7/1", 2, True),
    ]
    traces = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    said = {
        (
            trace.info.tags["trajectory"],
            assessment.name,
            assessment.value if assessment.name != "correction" else assessment.value["text"],
        )
        for trace in traces
        for assessment in trace.info.assessments
        if assessment.source.source_type == "HUMAN" and assessment.source.source_id == "Ada"
    }
    assert said == {
        ("order-A7/0", "human_score", 4),
        ("order-A7/1", "human_score", 2),
        ("order-A7/1", "correction", correction.text),
        ("order-A7/1", "human_step", True),
        ("order-A7/1", "human_step", False),
        (choice.trajectory, "human_choice", "better"),
        (choice.other, "human_choice", "worse"),
    }


@pytest.mark.timeout(1800)
def test_an_episode_that_comes_late_is_not_shown_as_a_side(page, annotated):
    page.goto(annotated[2])
    page.wait_for_selector(".message")
    late = []
    page.route("**/api/episode*", lambda route: late.append(route))
    page.keyboard.press("4")
    page.wait_for_function("() => document.querySelector('#mode-episodes span').textContent === '0/5'")
    wait_until(page, lambda: late)  # the answer is kept, and the episode asked for again
    states = []
    page.route("**/api/state", lambda route: states.append(route))
    page.keyboard.press("p")
    wait_until(page, lambda: states)
    page.unroute("**/api/episode*")
    for route in late:
        route.continue_()
    page.wait_for_timeout(300)  # in which it arrives
    assert page.locator(".side").count() == 0
    for route in states:
        route.continue_()
    page.wait_for_selector(".side")
    assert page.locator(".side").count() == 2


def wait_until(page, found):
    while not found():
        page.wait_for_timeout(20)


def played_record(root):
    from flows.history.records import Records

    return Records(root).get("test")


@pytest.mark.timeout(1800)
def test_script_in_what_an_episode_says_is_text(page, annotated):
    _, _, url, _ = annotated
    page.goto(url)
    page.wait_for_selector(".message")
    for number in range(len(EPISODES)):
        page.locator("#items button").nth(number).click()
        page.wait_for_selector(f"h1:has-text('{EPISODES[number].scenario.id}')")
        page.locator("summary").last.click()
        assert ATTACK in page.locator("#main").text_content()
        assert page.locator("#main script, #main img, #main svg, #main b b").count() == 0
    page.keyboard.press("c")
    page.wait_for_selector(".editor")
    page.fill("#correction", ATTACK)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".correction")
    assert ATTACK in page.locator(".correction").text_content()
    page.keyboard.press("p")
    page.wait_for_selector(".side")
    page.wait_for_timeout(300)  # an image that failed to load would have told by now
    assert page.evaluate("[window.hacked, document.querySelectorAll('img, #main script').length]") == [None, 0]
    assert page.problems == []


@pytest.mark.timeout(1800)
def test_the_policy_stops_a_script_that_got_in(page, annotated):
    """Even if text were inserted as markup, no script would run."""
    _, _, url, _ = annotated
    page.goto(url)
    page.wait_for_selector(".message")
    page.evaluate("document.getElementById('main').innerHTML = '<img src=x onerror=\"window.hacked = 1\">'")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 2'}))")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


@pytest.mark.timeout(1800)
def test_another_site_in_the_same_browser_gets_nothing(page, annotated, tmp_path):
    """Its requests lack the cookie and are rejected."""
    root, _, url, _ = annotated
    page.goto(url)
    page.wait_for_selector(".message")
    target = url.partition("/?")[0]
    page.route("http://evil.example/", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
    page.goto("http://evil.example/")
    for kind in ("application/json", "text/plain"):
        page.evaluate(
            """([url, kind]) => fetch(url, {method: "POST", mode: kind === "text/plain" ? "no-cors" : "cors",
                credentials: "include", headers: {"content-type": kind},
                body: JSON.stringify({kind: "score", trajectory: "order-A7/0", score: 1})}).catch(() => null)""",
            [f"{target}/api/answer", kind],
        )
    read_back = page.evaluate("url => fetch(url, {credentials: 'include'}).then(r => r.text()).catch(() => 'refused')",
                              f"{target}/api/state")  # fmt: skip
    assert read_back == "refused"
    assert not (root / "feedback").exists()
