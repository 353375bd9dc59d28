"""Parts of a test in a child process, as root or as an ordinary user; and the processes that a program left."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest

from components.sandbox import bubblewrap, cgroups

T = TypeVar("T")

USER = 54321
"""User id of an ordinary user without name and group."""


def run_forked(work: Callable[[], T], uid: int | None = None, before: Callable[[], None] = lambda: None) -> T:
    """Return the result of `work` in a child process. uid: of the child; 0 is root, if the tests run as root.

    A fork, since an ordinary user may not be able to read the interpreter of the tests: everything is imported already.
    before: runs in the child, before it gives up root.
    """
    if uid is not None and uid != os.geteuid() != 0:
        pytest.skip(f"needs root, to run as user {uid}")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            before()
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                os.chdir("/")
            for cached in (bubblewrap.interpreter, bubblewrap._drops, bubblewrap._works, cgroups.hierarchy):
                cached.cache_clear()
            outcome: object = work()
        except BaseException as error:  # noqa: BLE001
            outcome = RuntimeError(f"{error!r}\n{traceback.format_exc()}")
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        raise ChildProcessError("the child was killed")
    outcome = pickle.loads(data)
    if isinstance(outcome, RuntimeError):
        raise outcome
    return outcome


def running(mark: str) -> list[int]:
    """Return the host's processes with these words in their command line."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and mark in " ".join(process.info["cmdline"] or ()):
            pids.append(process.pid)
    return pids
