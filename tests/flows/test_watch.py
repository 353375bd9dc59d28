"""`python -m flows.stage collect --watch`: live view of an episode, in this and in another process."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest

from components.rollout.live_view import FILE
from flows.history.live_view import as_text, follow
from flows.stage import main
from flows.stages.base import Context
from tests.flows.processes import python, stage_line
from tests.flows.waiting import until

KEY = "0" * 64
FIRST = {"stage": "collect", "what": "collect, round 2", "total": 8, "begun": 1.0}
SAID = [
    {"episode": "s0/0"},
    {"role": "user", "content": "Look.\nThen say."},
    {"role": "assistant", "content": "", "sampled": 7, "calls": ['look_up {"order": "A1"}'], "more_calls": 0},
    {"ended": "s0/0", "reward": 0.5, "success": False, "failure": None},
]


def write(file, *events, mode="a"):
    with file.open(mode) as lines:
        lines.writelines(json.dumps(event) + "\n" for event in events)


def test_it_follows_a_stage_that_works_until_that_ends(tmp_path):
    store = Context.at(tmp_path).store
    out = io.StringIO()
    with store.lock(KEY, 5):
        file = store.scratch(KEY) / FILE
        write(file, FIRST, {"episode": "over"}, *SAID[:2], mode="w")
        reader = threading.Thread(target=follow, args=(tmp_path, "collect", 0.5, out))
        reader.start()
        until(lambda: "Then say." in out.getvalue())
        with file.open("a") as half:
            half.write(json.dumps(SAID[2])[:9])
            half.flush()
            time.sleep(0.3)  # a line that is half there is waited for
            half.write(json.dumps(SAID[2])[9:] + "\n")
        until(lambda: "look_up" in out.getvalue())
        write(file, FIRST, {"episode": "s1/0"}, mode="w")  # begun anew
        until(lambda: "s1/0" in out.getvalue())
        write(file, SAID[3])
        file.unlink()
    reader.join(600)
    assert not reader.is_alive()
    text = out.getvalue()
    assert "over" not in text  # only the last episode that had begun
    assert text.splitlines() == [
        "collect, round 2: 8 episodes",
        "",
        "── s0/0 " + "─" * 20,
        "user: Look.",
        "    Then say.",
        "assistant (7 tokens): ",
        '    → look_up {"order": "A1"}',
        "",
        "── s1/0 " + "─" * 20,
        "── ended: reward 0.5, no success",
        "collect, round 2: no more episodes",
    ]


def test_what_a_dead_process_left_and_other_stages_are_not_followed(tmp_path):
    store = Context.at(tmp_path).store
    write(store.scratch(KEY) / FILE, FIRST, *SAID, mode="w")
    with store.lock(KEY, 5):
        assert not follow(tmp_path, "evaluate", 0, io.StringIO())
    assert not follow(tmp_path, "collect", 0, io.StringIO())
    assert not follow(tmp_path / "nothing", "collect", 0, io.StringIO())


STEERING = [
    {"episode": "a\x1b[2Jb"},
    {"role": "tool", "content": "\x1b]0;title\x07 \r\x00\u202e\x9b31m", "calls": ["run \x1b[A"], "more_calls": 1},
    {"ended": "a", "reward": 0.0, "success": False, "failure": "EngineError: \x1b[31mred"},
]


def test_nothing_that_was_said_steers_the_terminal():
    for event in STEERING:
        assert all(letter.isprintable() or letter == "\n" for letter in as_text(event)), event


REQUEST = {
    "stage": "collect",
    "spec": {
        "model": {"name": "tiny", "source": "random"},
        "environment": {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4},
        "agent": {"max_turns": 2, "max_tokens": 4},
        "collect": {"scenarios": 2, "group_size": 1},
    },
}


@pytest.mark.timeout(1800)
def test_a_stage_that_is_run_shows_its_episodes_beside_its_report(tmp_path):
    done = python(*stage_line(tmp_path, REQUEST), "--watch", timeout=1500)
    assert done.returncode == 0, done.stderr
    *progress, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["status"] == "ran"
    assert progress[-1]["progress"][:2] == [2, 2]
    assert set(progress[-1]["progress"][2]) == {"running", "failed", "tokens_per_s"}
    assert done.stderr.count("── ended: ") >= 1
    assert "assistant (4 tokens): " in done.stderr
    assert not list((tmp_path / "artifacts").glob(f"*/{FILE}"))  # it is no part of the result


REFUSED = [
    (("collect",), "collect requires --watch"),
    ((), "expected one of --request FILE"),
    (("collect", "--watch", "--run", "latest", "--label", "collect[1]"), "expected one of"),
    (("train", "--watch"), "invalid choice: 'train'"),
    (("collect", "--watch", "--wait", "0"), "no collect stage played episodes below"),
    (("collect", "--watch", "--wait", "0"), "for a running collect stage below"),
]


def test_what_cannot_be_watched_is_refused(tmp_path, capsys):
    for arguments, words in REFUSED:
        assert exit_code([*arguments, f"root={tmp_path}"]) == 2, arguments
        assert words in capsys.readouterr().err
    assert exit_code(["collect", "--watch", f"root={tmp_path / 'nothing'}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing: the folder does not exist" in captured.err


def exit_code(arguments):
    """Return the exit code of the command, run in this process: it ends before it redirects the output."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
