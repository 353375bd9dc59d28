"""Signals: clean exit, and forced exit if cleanup is blocked."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from flows.terminal.interrupt import EXIT_CODE, LIMITS


def start(code):
    head = "import time, sys\nfrom flows.terminal.interrupt import Interruption\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_where_the_program_is(number):
    process = start("""
        try:
            with Interruption() as interruption:
                print("ready", flush=True)
                time.sleep(60)
        except KeyboardInterrupt:
            print("put away", interruption.happened, flush=True)
    """)
    process.send_signal(number)
    out, _ = process.communicate(timeout=600)
    assert (out, process.returncode) == ("put away True\n", 0)


def test_blocked_cleanup_is_cut_short_after_the_last_words_and_none_of_them_can_block_the_exit():
    process = start("""
        import threading
        def words():
            print("last words", flush=True)
        def broken():
            raise RuntimeError("of no use")
        with Interruption() as interruption:
            interruption.last_words += [words, broken, threading.Event().wait]
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                time.sleep(60)
    """)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=600)
    assert time.monotonic() - began >= LIMITS[signal.SIGINT]
    assert (out, process.returncode) == ("last words\n", EXIT_CODE)
    assert "of no use" in errors


def test_after_the_run_signals_are_what_they_were():
    process = start("""
        import signal
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        with Interruption():
            pass
        assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        print("ready", flush=True)
    """)
    assert process.wait(600) == 0
    process.communicate()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return None", 0),
        ("return 3", 3),
        ("sys.exit(2)", 2),
        ("sys.exit('wrong')", 1),
        ("raise ValueError('wrong')", 1),
    ],
)
def test_a_command_is_left_with_its_exit_code_and_its_last_duties_done(body, code):
    process = start(f"""
        import atexit
        from flows.terminal.interrupt import leave
        atexit.register(print, "duty", file=sys.stderr)
        def main():
            print("ready", flush=True)
            {body}
        leave(main)
    """)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == code
    assert "duty" in errors
    assert ("wrong" in errors) == ("wrong" in body)
