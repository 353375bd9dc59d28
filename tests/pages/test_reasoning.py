"""Reasoning of an episode's messages in each view of it."""

from __future__ import annotations

import json

from components.pages import page as pages
from components.pages.episodes import view
from components.rollout.live_view import LiveProgress
from components.tracking.traces import to_trace
from components.trajectories.convert import to_openai, to_preference, to_sft
from components.trajectories.schema import Message
from flows.annotation import session
from flows.history.live_view import as_text
from tests.trajectories.builders import episode, talk

WHY = "2 & 3 are <five>"


def sample():
    made = episode(success=True, histories=[talk("2 + 3?")])
    made.histories[0].messages.append(Message("assistant", "5", reasoning=WHY))
    made.reward = 1.0
    return made


def test_reports_show_it_folded_and_escaped(tmp_path, monkeypatch):
    (tmp_path / "talk.html.j2").write_text('{% from "parts.html.j2" import talk %}{{ talk(episode) }}')
    monkeypatch.setattr(pages, "TEMPLATES", (tmp_path, pages.TEMPLATES))
    html = pages.page("talk.html.j2", episode=view(sample()))
    assert "<summary>Reasoning: 2 &amp; 3 are &lt;five&gt;</summary>" in html


def test_the_live_view_shows_it_before_the_answer(tmp_path):
    shown = []
    live = LiveProgress({"stage": "collect"}, 1, lambda *_: None, tmp_path / "live.jsonl", listen=shown.append)
    live._show([to_openai(message) for message in sample().histories[0].messages])
    assert as_text(shown[-1]) == f"assistant, reasoning: {WHY}\nassistant: 5"


def test_the_annotation_page_traces_and_exports_have_it():
    trajectory = sample()
    assert session._message(trajectory.histories[0].messages[-1])["reasoning"] == WHY
    _, spans = to_trace(trajectory, experiment_id="0", run_id="r", label="final", start_ms=0)
    outputs = [json.dumps(span.outputs) for span in spans]
    assert any(json.dumps({"reasoning_content": WHY})[1:-1] in text for text in outputs)
    (record,) = to_sft([trajectory])
    assert record["messages"][-1] == {"role": "assistant", "content": "5", "reasoning_content": WHY}
    worse = sample()
    worse.sample, worse.reward = 1, 0.0
    (pair,) = to_preference([trajectory, worse])
    assert pair["chosen"][-1]["reasoning_content"] == WHY
