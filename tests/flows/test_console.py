"""Console output and log file of a run."""

import io
import logging
import re
import time
from pathlib import Path

import pytest

from components.errors import ResourceError
from flows.terminal import console
from flows.terminal.console import duration, logging_to
from flows.terminal.exit_codes import print_error
from flows.terminal.pages import write_new_page


def test_lines_go_to_the_screen_and_to_the_file(screen, tmp_path):
    shown, stream = screen
    before = logging.getLogger().handlers[:]
    with logging_to(tmp_path / "logs" / "run.log", shown):
        assert logging.getLogger().handlers != before
        shown.line("round 1/2  reward 0.500 [not markup]")
        logging.getLogger("flows.x").info("only in the file")
        logging.getLogger("some.library").warning("take care")
        logging.getLogger("prefect.engine").error("Crash detected!")  # without a handler that sends to the server
        logging.getLogger("py.warnings").warning("old")  # where captureWarnings sends them
    assert logging.getLogger().handlers == before
    text, log = stream.getvalue(), (tmp_path / "logs" / "run.log").read_text()
    assert "round 1/2  reward 0.500 [not markup]" in text
    assert "take care" in text
    assert "only in the file" not in text
    assert "Crash" not in text
    assert "old" not in text
    for words in ("round 1/2", "only in the file", "take care", "Crash detected!", "old"):
        assert words in log


def test_progress_without_a_terminal_is_a_line_now_and_then(screen, monkeypatch):
    shown, stream = screen
    clock = iter([0.0, 0.0, 20.0, 21.0, 40.0, 41.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with shown.stage("collect[1]", "episodes") as progress:
        progress(8, 48)  # eight from an earlier try
        progress(18, 48, {"loss": 0.25})
        progress(19, 48)
        progress(48, 48)
    assert stream.getvalue() == "  collect[1]: 18/48 episodes, 20 s, about 60 s left  loss 0.25\n"


def test_a_stage_takes_about_as_long_as_the_last_of_its_kind(screen, monkeypatch):
    shown, stream = screen
    clock = iter([0.0, 0.0, 16.0, 50.0, 50.0, 100.0, 100.0, 120.0, 160.0, 161.0, 161.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with shown.stage("collect[1]", "episodes") as progress:
        progress(0, 48)
        progress(1, 48)  # too little to go by
        progress(48, 48)
    with shown.stage("collect[2]", "episodes") as progress:
        progress(0, 48)
        progress(1, 48)
        progress(24, 48)  # longer than the last one: by its own speed
        progress(48, 48)
    assert stream.getvalue().splitlines() == [
        "  collect[1]: 1/48 episodes, 16 s",
        "  collect[2]: 1/48 episodes, 20 s, about 30 s left",
        "  collect[2]: 24/48 episodes, 60 s, about 60 s left",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_stages_at_the_same_time_have_a_bar_each_in_one_display(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    shown = console.Console(stream)
    for _ in range(2):  # and again, after the display was put away
        with shown.stage("train[1]", "steps") as one, shown.stage("collect[2]", "episodes") as other:
            one(1, 4, {"loss": 0.25})
            other(3, 9, {"running": 2.0, "failed": 1.0, "reward": 0.5, "tokens_per_s": 81.0})
            shown.bars._progress.refresh()
            shown.line("beside the bars")
    text = re.sub(r"\x1b\[[\d;?]*\w", "", stream.getvalue())
    for words in ("train[1]", "1/4 steps", "loss 0.25", "collect[2]", "3/9 episodes"):
        assert words in text
    assert "running 2, failed 1, reward 0.5, tokens/s 81" in text
    assert text.count("beside the bars") == 2


def test_durations():
    assert [duration(seconds) for seconds in (0.04, 59.6, 185, 7800)] == ["0.0 s", "60 s", "3 min 05 s", "2 h 10 min"]


ESCAPE = "\x1b]0;owned\x07\x1b[2Jgone\x9b31m"


def test_foreign_text_in_errors_lines_and_warnings_has_no_control_codes(capsys, screen, tmp_path):
    print_error(ResourceError(f"the server answered: {ESCAPE}\n\tsecond line"))
    shown = capsys.readouterr().err
    assert not set("\x1b\x07\x9b") & set(shown)
    assert "gone" in shown
    assert shown.endswith("\n        second line\n")
    shown, stream = screen
    with logging_to(tmp_path / "log", shown):
        shown.line(ESCAPE)
        logging.getLogger("somebody").warning(ESCAPE)
    assert not set("\x1b\x07\x9b") & set(stream.getvalue())
    assert stream.getvalue().count("gone") == 2


def test_all_commands_use_the_one_printer_for_errors():
    flows = Path(__file__).parents[2] / "flows"
    printed = re.compile(r"print\((error|str\(error\)|message|f\"[^\"]*\{error\})")
    assert [path.name for path in flows.rglob("*.py") if printed.search(path.read_text())] == []


def test_pages_of_the_same_second_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20261128-001500")
    folder = tmp_path / "certify"
    paths = [write_new_page(folder, "shop", text) for text in "abc"]
    names = ["shop-20261128-001500.html", "shop-20261128-001500-2.html", "shop-20261128-001500-3.html"]
    assert paths == [folder / name for name in names]
    assert [path.read_text() for path in paths] == ["a", "b", "c"]
    with pytest.raises(ResourceError, match=r"cannot write .*; give another file: --html FILE"):
        write_new_page(paths[0], "shop", "d")
