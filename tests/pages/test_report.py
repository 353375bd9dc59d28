"""Report page: it shows all of its content, and escapes all of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from components.evaluation.metrics import paired_difference, summarise
from components.pages import charts
from components.pages.page import TEMPLATES
from components.pages.report import Evaluation, Origin, Report, RewardTraining, SelectionRow, StageRow, render
from components.trajectories.schema import Failure, History, Message, Scenario, Score, ToolCall, Trajectory

INJECTION = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>\"' onmouseover='alert(2)"
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Parser that checks the nesting of tags and collects elements, attributes and text."""

    def __init__(self, html: str):
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def episode(index: int, solved: bool, *, say: str = "Done.", kind: str = "refund", failure=None) -> Trajectory:
    messages = [
        Message("system", "You help customers."),
        Message("user", f"Order A{index} is broken."),
        Message("assistant", "", [ToolCall("c1", "look_up", f'{{"order": "A{index}", "n": 2}}')], span=(10, 17)),
        Message("tool", f"A{index} was delivered", tool_call_id="c1"),
        Message("assistant", say, span=(20, 24), finish_reason="length"),
    ]
    return Trajectory(
        id=f"{index}/0", scenario=Scenario(f"shop-{index}", {}, "heldout", kind, 1 + index % 2), sample=0,
        histories=[History(messages, list(range(24)), [-1.0] * 24)], outcome={"success": solved},
        metrics={"turns": 2.0}, policy="8f3ac19b77d2aa", reward=None if failure else float(solved), failure=failure,
    )  # fmt: skip


def evaluation(label: str, solved: int, **more) -> Evaluation:
    episodes = [episode(index, index < solved, **more) for index in range(10)]
    return Evaluation(label, summarise(episodes), episodes)


@pytest.fixture(scope="module")
def full() -> Report:
    start, end = evaluation("start", 1), evaluation("after GRPO", 9)
    return Report(
        experiment="quickstart", run_id="0f8c2a", created="2026-11-21 12:04", seed=3, seconds=493.0,
        evaluations=[start, end],
        notes=["the rounds end after round 2: <no gain>"],
        differences={"after GRPO against start": paired_difference(start.trajectories, end.trajectories)},
        rounds=[{"reward": 0.1 * k, "kl": 0.01 * k, "collect_s": 5.0, "train_s": 7.0, "loss": 0.5} for k in range(4)],
        round_stages=("collect", "judge", "filter", "train"),
        stages=[StageRow("evaluate start", "cached", 0.1, "a" * 64, "b" * 64),
                StageRow("round 1/train", "ran", 75.0, "c" * 64, "d" * 64)],
        config={"model": {"name": "tiny"}, "reward": {"api_key": "hunter2"}}, overrides=["judge.password=hunter2"],
        export="runs/export", versions={"torch": "2.13.0"}, git_commit="f" * 40, command="python -m flows.run",
    )  # fmt: skip


def test_the_headline_shows_the_change_and_its_interval(full):
    text = Page(render(full)).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "Held-out success after GRPO 90 % from 10 % (start)" in text
    assert re.search(
        r"After GRPO against start: \+80 points \(95 % interval \+\d+ to \+\d+\) on 10 scenarios: better", text
    )
    wilson = full.evaluations[1].summary["success"]
    assert f"{100 * wilson['low']:.0f} % to {100 * wilson['high']:.0f} %" in text


def test_all_content_is_on_the_page(full):
    page = Page(render(full))
    for expected in (
        "quickstart", "2026-11-21 12:04", "round 1/train", "cached", "a" * 12, "d" * 12, "name: tiny", "runs/export",
        "2.13.0", "python -m flows.run", "refund", "KL to the reference", "Time by stage", "0f8c2a",
        "Order A0 is broken.", "A0 was delivered", '(order="A0", n=2)', "7 tokens", "11 sampled tokens",
        "Cut off: the token limit of a message was reached.", "You help customers.",
        "The rounds end after round 2: <no gain>.",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert "8 min 13 s" in page.text.replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_selections_show_kept_and_dropped_counts_by_rule():
    rows = [SelectionRow("filter[1]", 48, 40, 5, {"no_spread": 6, "<own>": 2}), SelectionRow("filter[2]", 48, 48, 8)]
    html = render(Report("x", selections=rows))
    page = Page(html)
    assert "filter[1] 48 40 5 6 no_spread, 2 <own>" in page.text
    assert "filter[2] 48 48 8 –" in page.text
    assert "<own>" not in html
    assert "Selection" not in Page(render(Report("x"))).text


def test_secrets_are_masked(full):
    html = render(full)
    assert "hunter2" not in html
    assert "api_key" in html
    assert "judge.password=***" in html


def test_no_page_loads_anything_and_only_charts_are_markup():
    files = {path.name: path.read_text() for path in TEMPLATES.iterdir()}
    assert len(files) > 8
    assert "default-src 'none'; style-src 'unsafe-inline'" in files["page.html.j2"]
    for name, text in files.items():
        assert not re.search(r"<(script|link|img|iframe|object|form|base)\b", text), name
        assert not re.search(r"\b(src|srcset|data|action|on\w+)=|url\(|@import|https?://", text), name
        assert set(re.findall(r'href="(.)', text)) <= {"#"}, name
        assert set(re.findall(r"(\w+) \| safe", text)) <= {"svg"}, name
        assert not re.search(r"autoescape|\|safe|Markup", re.sub(r"{#.*?#}", "", text, flags=re.S)), name


def test_text_from_models_and_configuration_is_never_markup():
    failure = Failure("engine", INJECTION, INJECTION)
    hostile = episode(0, True, say=INJECTION, kind=INJECTION)
    hostile.scenario = Scenario(INJECTION, {}, "heldout", INJECTION, 1)
    hostile.histories[0].messages[2].tool_calls = [ToolCall("c1", INJECTION, INJECTION)]
    hostile.histories[0].messages[3].content = INJECTION
    hostile.histories[0].messages[0].content = INJECTION
    hostile.histories.append(History([Message("assistant", INJECTION)], agent=INJECTION))
    hostile.outcome[INJECTION] = INJECTION
    hostile.policy = INJECTION
    episodes = [hostile, episode(1, False, failure=failure)]
    before = [episode(0, False), episode(1, False)]
    before[0].scenario = hostile.scenario
    report = Report(
        experiment=INJECTION, run_id=INJECTION, created=INJECTION,
        evaluations=[Evaluation("start", summarise(before), before),
                     Evaluation(INJECTION, summarise(episodes), episodes)],
        differences={INJECTION: paired_difference(before, episodes)}, rounds=[{"reward": 1.0, INJECTION: 1.0}],
        stages=[StageRow(*[INJECTION] * 2, 1.0, INJECTION, INJECTION)], config={INJECTION: INJECTION},
        overrides=[INJECTION], export=INJECTION, versions={INJECTION: INJECTION}, git_commit=INJECTION,
        command=INJECTION,
    )  # fmt: skip
    page = Page(render(report))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert('x')</script>") > 15


def test_the_lineage_lists_the_steps_of_the_final_checkpoint():
    lineage = [
        Origin("train[1]", "a" * 64, [("filter[1]", "b" * 64)], "train[sft] (start)", {"reward": INJECTION}),
        Origin("train[sft]", "c" * 64, [(INJECTION, "d" * 64)]),
    ]
    page = Page(render(Report("x", lineage=lineage)))
    text = page.text[page.text.index("Training steps that led to the final checkpoint") :]
    first, second = text.index("train[1] " + "a" * 12), text.index("train[sft] " + "c" * 12)
    assert (
        first < text.index("filter[1] " + "b" * 12) < text.index("train[sft] (start)") < text.index("reward") < second
    )
    assert "the initial model" in text[second:]
    assert "script" not in page.tags
    assert "#lineage" in [value for _, name, value in page.attributes if name == "href"]
    assert "Lineage" not in Page(render(Report("x"))).text


def test_reward_model_accuracy_is_shown_for_each_training():
    trained = [
        RewardTraining(1, 0, 40.0, 10.0, 0.7),
        RewardTraining(2, 0, 40.0, 10.0, None),
        RewardTraining(1, 3, 80.0, 12.0, 0.83, before=0.58, earlier=0.62),
        RewardTraining(2, 3, 80.0, 12.0, 0.75, before=0.5, earlier=0.61),
    ]
    page = Page(render(Report("x", reward_models=trained)))
    text = page.text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    for row in (
        "before the rounds 1 40 10 70 % – –", "before the rounds 2 40 10 – – –", "after round 3 1 80 12 83 % 58 % 62 %"
    ):  # fmt: skip
        assert row in text
    assert "model 1, round 3: 83 %" in text  # of the chart
    assert "#reward-models" in [value for _, name, value in page.attributes if name == "href"]
    once = Page(render(Report("x", reward_models=trained[:2])))
    assert ("Held-out accuracy" in text, "Held-out accuracy" in once.text) == (True, False)
    assert "Reward models" not in Page(render(Report("x"))).text


def test_control_characters_and_lone_surrogates_do_not_break_the_page():
    odd = [episode(0, True, say="a\x00b\x1b[31m\ud800c\u202e ✓ 你好")]
    html = render(Report("x", evaluations=[Evaluation("start", summarise(odd), odd)]))
    assert html.encode("utf-8").decode("utf-8") == html
    assert "\x00" not in html
    assert "\x1b" not in html
    assert "✓ 你好" in html


def test_an_empty_report_and_one_without_any_finished_episode():
    assert "nothing yet" in Page(render(Report("nothing yet"))).text
    failed = [episode(index, False, failure=Failure("agent", "AgentError", "gave up")) for index in range(2)]
    text = Page(render(Report("x", evaluations=[Evaluation("start", summarise(failed), failed)]))).text
    assert "No episode was finished." in text
    assert "gave up" in text


def test_examples_show_solved_unsolved_and_failed_episodes():
    kinds = ["refund", "refund", "exchange", "address"]
    episodes = [episode(index, index != 1, kind=kind) for index, kind in enumerate(kinds)]
    failed = episode(9, False, failure=Failure("engine", "ContextOverflow", "too long"))
    earlier = Evaluation("start", summarise([failed]), [failed])
    page = Page(render(Report("x", evaluations=[earlier, Evaluation("end", summarise(episodes), episodes)])))
    text = page.text
    solved, not_solved, broken = text.index(" Solved "), text.index(" Not solved "), text.index(" Failed to run ")
    assert solved < not_solved < broken
    shown = re.findall(r"shop-\d", text[solved:not_solved])
    assert shown == ["shop-0", "shop-2"]  # another type before the same one twice
    assert re.findall(r"shop-\d", text[not_solved:broken]) == ["shop-1"]
    assert "ContextOverflow (engine): too long" in re.sub(r"\s+", " ", text[broken:])


def test_before_and_after_shows_one_scenario_played_by_both(full):
    text = Page(render(full)).text
    start = text.index("before and after")
    part = text[start : text.index(" Solved ", start)]
    ids = re.findall(r"shop-\d", part)
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert part.index("not solved") < part.index(" solved ", part.index("not solved") + 10)


def test_long_texts_are_truncated_with_a_note():
    long = [episode(0, True, say="x" * 9000)]
    html = render(Report("x", evaluations=[Evaluation("start", summarise(long), long)]))
    assert "5,000 more characters" in html
    assert "x" * 4001 not in html


def test_ticks_are_round_numbers_that_cover_the_data():
    ticks = {
        (0, 1): [0, 0.25, 0.5, 0.75, 1],
        (0, 100): [0, 25, 50, 75, 100],
        (-0.3, 0.4): [-0.4, -0.2, 0, 0.2, 0.4],
        (3, 3): [1, 2, 3, 4, 5],
    }
    for ends, expected in ticks.items():
        assert charts.nice_ticks(*ends) == pytest.approx(expected)


def test_a_share_that_is_always_0_has_no_axis_below_0_and_a_cut_axis_no_area():
    shares = charts.line_chart([1, 2], [0.0, 0.0], name="clipped", text=str, low=0.0, high=None)
    assert ">-" not in shares
    assert 'class="area"' in shares
    assert 'class="area"' not in charts.line_chart([1, 2], [5.1, 5.4], name="entropy", text=str, low=None, high=None)


def test_a_line_breaks_where_a_value_is_missing():
    ys = [0.0, 1.0, None, float("nan"), 2.0, 3.0, float("inf")]
    svg = charts.line_chart(range(1, 8), ys, name="a <b>", text=str, low=None, high=None)
    root = ElementTree.fromstring(svg)
    assert len(root.findall("circle")) == 4
    assert len([path for path in root.findall("path") if path.get("class") == "line"]) == 2
    heights = [float(dot.get("cy")) for dot in root.findall("circle")]
    assert heights == sorted(heights, reverse=True)
    assert root.find("circle/title").text == "Round 1: 0.0"
    assert charts.line_chart([1], [None], name="", text=str, low=None, high=None) == ""


def test_several_lines_share_their_axes_and_begin_where_they_do():
    series = {"A": {1: 0.0, 2: 10.0}, "<b>": {2: 10.0, 3: None, 4: 5.0}, "C": {}}
    root = ElementTree.fromstring(charts.lines_chart(series, name="a <b>", text=str, low=None, high=None))
    dots = {dot.find("title").text: dot for dot in root.findall("circle")}
    assert list(dots) == ["A, round 1: 0.0", "A, round 2: 10.0", "<b>, round 2: 10.0", "<b>, round 4: 5.0"]
    assert [path.get("class") for path in root.findall("path")] == ["line r0"]
    first_dot, second_dot = dots["A, round 2: 10.0"], dots["<b>, round 2: 10.0"]
    assert (first_dot.get("cx"), first_dot.get("cy")) == (second_dot.get("cx"), second_dot.get("cy"))
    assert (first_dot.get("class"), second_dot.get("class")) == ("dot r0", "dot r1")
    assert charts.lines_chart({"A": {}, "B": {1: None}}, name="", text=str, low=None, high=None) == ""


def test_each_line_has_rounds_of_its_own():
    series = {"A": {0: 0.0, 1: 1.0, 2: 2.0}, "B": {0: 0.0, 2: 1.0}}
    root = ElementTree.fromstring(charts.lines_chart(series, name="", text=str, low=None, high=None))
    assert [path.get("class") for path in root.findall("path")] == ["line r0", "line r1"]


def test_intervals_are_bands_around_the_lines_and_the_axis_covers_them():
    series = {"A": {0: 5.0, 1: 6.0, 2: None, 3: 5.0}, "B": {1: 5.0}}
    intervals = {"A": {0: (0.0, 10.0), 1: (1.0, 9.0), 2: (0.0, 1.0), 3: (4.0, 6.0)}}
    root = ElementTree.fromstring(
        charts.lines_chart(
            series, name="", text=str, low=None, high=None, intervals=intervals, rings={"A": (1, "<best>")}
        )
    )
    assert [path.get("class") for path in root.findall("path")] == ["band r0", "band alone r0", "line r0"]
    corners = [tuple(map(float, corner.strip("MLZ ").split())) for corner in root.find("path").get("d").split(" L")]
    heights = [y for _, y in corners]
    assert len({x for x, _ in corners}) == 2
    assert heights.index(min(heights)) == 0  # the upper bound of round 0 comes first, its lower bound last
    assert heights.index(max(heights)) == 3
    assert 0 < min(heights) < max(heights) < charts.HEIGHT
    circles = {circle.find("title").text: circle for circle in root.findall("circle")}
    assert list(circles) == [
        "A, round 0: 5.0 (0.0 to 10.0)",
        "A, round 1: 6.0 (1.0 to 9.0)",
        "A, round 3: 5.0 (4.0 to 6.0)",
        "A, round 1: <best>",
        "B, round 1: 5.0",
    ]
    ring, dot = circles["A, round 1: <best>"], circles["A, round 1: 6.0 (1.0 to 9.0)"]
    assert ring.get("class") == "ring r0"
    assert (ring.get("cx"), ring.get("cy")) == (dot.get("cx"), dot.get("cy"))


def test_colours_repeat_after_the_last_one():
    series = {str(index): {1: 1.0} for index in range(charts.COLOURS + 1)}
    root = ElementTree.fromstring(charts.lines_chart(series, name="", text=str, low=None, high=None))
    assert [dot.get("class") for dot in root.findall("circle")][-2:] == [f"dot r{charts.COLOURS - 1}", "dot r0"]


def test_one_point_is_drawn_too():
    root = ElementTree.fromstring(charts.line_chart([1], [5.0], name="", text=str, low=None, high=None))
    dot = root.find("circle")
    assert 0 < float(dot.get("cx")) < charts.WIDTH
    assert 0 < float(dot.get("cy")) < charts.HEIGHT


def test_stacked_bars_are_as_high_as_their_parts():
    svg = charts.stacked_bars([1, 2], {"a": [1.0, 2.0], "b": [3.0, float("nan")]}, name="", text=str)
    bars = ElementTree.fromstring(svg).findall("rect")
    heights = {bar.find("title").text: float(bar.get("height")) for bar in bars}
    assert set(heights) == {"Round 1, a: 1.0", "Round 1, b: 3.0", "Round 2, a: 2.0"}
    assert heights["Round 1, b: 3.0"] == pytest.approx(3 * heights["Round 1, a: 1.0"], abs=0.2)
    assert charts.stacked_bars([1], {"a": [0.0]}, name="", text=str) == ""


def test_the_parts_of_a_reward_are_drawn_and_shown_with_the_examples():
    episodes = [episode(0, True), episode(1, False)]
    parts = {"task": 1.0, "style": 0.25, "style/length": 40.0}
    scores = {episodes[0].id: Score(episodes[0].id, 1.5, parts, explanation="style: <b>short</b>")}
    rounds = [{f"components/{name}": value * n for name, value in parts.items()} for n in (1, 2)]
    html = render(Report("x", evaluations=[Evaluation("start", summarise(episodes), episodes, scores)], rounds=rounds))
    shown = Page(html).text
    assert "task 1" in shown
    assert "style: <b>short</b>" in shown
    assert "style: <b>" not in html
    assert shown.count("mean of this reward component") == 2
    assert "components/style/length" in shown


def test_stage_costs_and_unpriced_calls_are_shown():
    rows = [
        StageRow("judge[1]", "ran", 1.0, "a" * 64, "b" * 64, cost=0.25),
        StageRow("judge[2]", "ran", 1.0, "c" * 64, "d" * 64, unpriced=7),
    ]
    base = {"experiment": "x", "run_id": "r", "created": "now", "seed": 0}
    html = render(Report(**base, stages=rows))
    assert "<th>Cost</th>" in html
    assert '<td class="num">0.25</td>' in html
    assert '<td class="num"><span class="range">7 calls of unknown price</span></td>' in html
    free = StageRow("train[1]", "ran", 1.0, "a" * 64, "b" * 64)
    assert "<th>Cost</th>" not in render(Report(**base, stages=[free]))
