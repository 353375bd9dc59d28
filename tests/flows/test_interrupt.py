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
def test_a_signal_raises_where_the_program_is_and_signals_are_then_what_they_were(number):
    process = start("""
        import signal
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        try:
            with Interruption() as interruption:
                print("ready", flush=True)
                time.sleep(60)
        except KeyboardInterrupt:
            print("put away", flush=True)
        assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        assert signal.set_wakeup_fd(-1) == -1
    """)
    process.send_signal(number)
    out, errors = process.communicate(timeout=600)
    assert (out, process.returncode) == ("put away\n", 0), errors


def test_blocked_cleanup_is_cut_short_after_the_last_words_and_none_of_them_can_block_the_exit():
    process = start("""
        import signal, threading
        from flows.terminal import interrupt
        interrupt.LIMITS |= {signal.SIGINT: 0.5, signal.SIGTERM: 1.0}
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
    assert time.monotonic() - began >= 0.5
    assert (out, process.returncode) == ("last words\n", EXIT_CODE)
    assert "of no use" in errors


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_during_a_computation_outside_python_ends_the_process(again):
    """The main thread runs no signal handler there. SIGTERM leaves 25 s, which a Ctrl-C after it cuts short."""
    process = start("""
        import ctypes, threading
        sys.setswitchinterval(1000)  # the thread gets the interpreter when the main thread is in the last call
        going = threading.Event()
        threading.Thread(target=lambda: (going.wait(), print("ready", flush=True)), daemon=True).start()
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        with Interruption() as interruption:
            interruption.last_words.append(lambda: print("last words", flush=True))
            lock(mutex)
            going.set()
            lock(mutex)
    """)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM if again else signal.SIGINT)
    while again and process.poll() is None:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=600)
    assert (out, process.returncode) == ("last words\n", EXIT_CODE)
    assert ("interrupted again" if again else "did not finish") in errors
    assert not again or time.monotonic() - began < LIMITS[signal.SIGTERM]


def test_a_signal_to_a_forked_process_does_not_end_its_parent():
    process = start("""
        import os, signal
        from flows.terminal import interrupt
        interrupt.LIMITS[signal.SIGINT] = 0.1
        with Interruption():
            if not (child := os.fork()):
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(60)
                except KeyboardInterrupt:
                    os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            time.sleep(0.5)
        print("ready", flush=True)
    """)
    process.communicate(timeout=600)
    assert process.returncode == 0


def test_a_command_is_left_with_its_exit_code_and_its_last_duties_done():
    bodies = {
        "return None": 0,
        "return 3": 3,
        "sys.exit(2)": 2,
        "sys.exit('wrong')": 1,
        "raise ValueError('wrong')": 1,
    }
    processes = {
        body: start(f"""
        import atexit
        from flows.terminal.interrupt import leave
        atexit.register(print, "duty", file=sys.stderr)
        def main():
            print("ready", flush=True)
            {body}
        leave(main)
    """)
        for body in bodies
    }
    for body, process in processes.items():
        _, errors = process.communicate(timeout=600)
        assert (process.returncode, "duty" in errors) == (bodies[body], True), body
        assert ("wrong" in errors) == ("wrong" in body)
