"""Extraction of events from the lines of a log."""

from components.compute.sky.report import LineSplitter, event

DONE = {"key": "k", "digest": "d", "status": "ran"}


def test_event_is_found_inside_any_line():
    assert event('(train, pid=25280) {"progress": [1, 5, {}]}') == {"progress": [1, 5, {}]}
    assert event('(head, rank=0, pid=2) {"waiting": "for \\"it\\""}') == {"waiting": 'for "it"'}
    assert event('loading weights 50%{"key": "k", "digest": "d", "status": "ran"}') == DONE
    assert event('{"error": {"type": "X", "message": "{\\"key\\": 1}"}}')["error"]["type"] == "X"


def test_similar_text_is_not_an_event():
    assert event('{"progress": [1, 5') is None
    assert event('2026 INFO request {"key": "k", "spec": {}}') is None
    assert event("a line") is None


def test_lines_come_in_pieces_with_colours():
    lines = LineSplitter()
    assert list(lines.feed("\x1b[36m(t, pid=1)\x1b[0m one\n\ntw")) == ["(t, pid=1) one"]
    assert list(lines.feed("o\r\nthree")) == ["two"]
    assert list(lines.end()) == ["three"]
    assert list(lines.end()) == []
