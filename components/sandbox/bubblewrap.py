"""Programs that a model wrote run here and nowhere else: in bubblewrap, on Linux.

A program sees a file system of its own: `/usr` read-only with what Python needs, a few devices, a private `/proc`, and
a home in memory that is gone afterwards. It has no network, none of our environment variables, files or processes, no
privileges and no way to new ones, and the system calls of `seccomp.py` fail. Where Espalier runs as root, the program
runs as nobody.

What it uses is bounded. The kernel bounds each process (address space, CPU time, size of a file) and the number of
processes; the home has a size; and while a program runs it is looked at every few milliseconds: one that takes too
long, or whose processes hold too much memory, create too many files or print without end, is killed with everything
that it started. Nothing outlives its run. Between two looks a program can hold a little more than it may.

Output is bytes of any kind: what is not UTF-8 is shown as U+FFFD, and of much output the beginning and the end are
kept, with a mark between them.

    sandbox = Sandbox(Limits(seconds=5))
    sandbox.python("print(6 * 7)").stdout                       # "42\\n"
    sandbox.run(["sh", "-c", "wc -l < data.txt"], files={"data.txt": "a\\nb\\n"})
    await sandbox.run_async(["python3", "solution.py"], files={"solution.py": code})
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

from components.errors import ResourceError
from components.sandbox import seccomp
from components.sandbox.calls import Answer, Calls
from components.sandbox.limits import Limits, Result
from components.sandbox.watch import HOME, kill, watch

T = TypeVar("T")

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "TMPDIR": f"{HOME}/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 64 MB of addresses, which are limited
}
"""All environment variables of a program."""

INSTALL = "Install bubblewrap 0.8 or later (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
NAMESPACES = (
    "User namespaces may be off. To see whether they are: `bwrap --unshare-all --ro-bind / / true` as the same user; "
    "`sysctl user.max_user_namespaces` must not be 0; on Debian `sysctl kernel.unprivileged_userns_clone` must be 1; "
    "on Ubuntu from 24.04 `sysctl kernel.apparmor_restrict_unprivileged_userns` must be 0, or bwrap needs an AppArmor "
    "profile with `userns`; in Docker, run with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)

_NOBODY = 65534
_MB = 1024 * 1024
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")


class Sandbox:
    """Runs programs. It holds nothing: one instance serves many threads, and each run starts afresh."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        stop: threading.Event | None = None,
        answer: Answer | None = None,
    ) -> Result:
        """Runs a command to its end.

        files: by path below the home, there before the command starts. stop: kills the program when it is set.
        answer: what the program may call (`components.sandbox.calls`).
        Raises ResourceError where there is no sandbox, and OSError where it did not start this once.
        """
        check()
        return _run(self.limits, command, stdin, files or {}, stop, answer)

    def python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        stop: threading.Event | None = None,
        answer: Answer | None = None,
    ) -> Result:
        """Runs Python code, with the standard library and what `files` holds."""
        given = {**(files or {}), ".main.py": code}
        return self.run([interpreter()[0], f"{HOME}/.main.py"], stdin=stdin, files=given, stop=stop, answer=answer)

    async def run_async(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
    ) -> Result:
        """As `run`, without holding up the loop. A program whose task is cancelled is killed."""
        stop = threading.Event()
        return await stoppable(functools.partial(self.run, command, stdin=stdin, files=files, stop=stop), stop)


async def stoppable(work: Callable[[], T], stop: threading.Event, pool: Executor | None = None) -> T:
    """What `work` returns, done in a thread. Cancelled, `stop` is set and the end of the work awaited. pool: of threads
    of its own, for work that waits for what is done in other threads."""
    task = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        with suppress(Exception):
            await task
        raise


@functools.cache
def interpreter() -> tuple[str, str]:
    """The Python of the sandbox, and the folder that it needs besides `/usr`, if any: the one that runs Espalier
    (without its packages), or the system's, where the sandbox's user cannot read that."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    for python, folder in (
        (own, prefix),
        *((Path(f"{at}/bin/python3"), Path("/usr")) for at in ("/usr", "/usr/local")),
    ):
        if not python.exists() or not python.resolve().is_relative_to(folder):
            continue
        if folder.is_relative_to("/usr"):
            return str(python), ""
        if not _drops() or all(one.stat().st_mode & 0o005 == 0o005 for one in [folder, *folder.parents]):
            return str(python), str(folder)
    raise ResourceError(
        f"the sandbox has no Python: it runs as nobody, who cannot read {prefix}, and there is no /usr/bin/python3. "
        f"Install one (Debian, Ubuntu: apt-get install python3), or do not run as root"
    )


def check() -> None:
    """Raises ResourceError, saying what to do, where programs cannot be run here."""
    if sys.platform != "linux":
        raise ResourceError(
            f"the sandbox needs Linux; this is {sys.platform}. Run this on Linux, or in a virtual machine"
        )
    for tool, install in (("bwrap", INSTALL), ("prlimit", "Install util-linux")):
        if shutil.which(tool) is None:
            raise ResourceError(f"the sandbox needs {tool}, which is not here. {install}")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise ResourceError("the sandbox needs /proc/PID/task/PID/children, which this kernel does not have")
    _works(shutil.which("bwrap"), interpreter())


@functools.lru_cache(maxsize=4)
def _works(bwrap: str, python: tuple[str, str]) -> None:
    """Tries it once; a failure is not remembered."""
    script = "import socket, ssl, subprocess; subprocess.run(['true'], check=True); print('works')"
    try:
        found = _run(Limits(), [python[0], "-I", "-c", script], b"", {}, None)
    except OSError as error:
        raise ResourceError(f"the sandbox does not work here: {error}. {INSTALL}. {NAMESPACES}") from error
    if found.stdout != "works\n":
        raise ResourceError(
            f"the sandbox does not work here: Python ended with {found.exit_code} in it, saying "
            f"{(found.stdout + found.stderr).strip()!r:.300}; expected it to start another program. "
            f"Limits of processes need Linux 5.14 or later"
        )


def _run(
    limits: Limits,
    command: Sequence[str],
    stdin: str | bytes,
    files: Mapping[str, str | bytes],
    stop: threading.Event | None,
    answer: Answer | None = None,
) -> Result:
    began = time.monotonic()
    with ExitStack() as stack:
        passed: list[int] = []
        environment = ENVIRONMENT
        calls = None if answer is None else Calls(answer, limits.calls)
        if calls is not None:
            stack.callback(calls.close)
            passed.append(calls.inside.fileno())
            environment = ENVIRONMENT | calls.environment()

        def sealed(data: str | bytes) -> int:
            fd = _sealed(data)
            stack.callback(os.close, fd)
            return fd

        def handed(data: str | bytes) -> str:
            passed.append(sealed(data))
            return str(passed[-1])

        arguments = _namespaces(limits)
        for name, content in files.items():
            arguments += ["--perms", "0644", "--file", handed(content), _below_home(name)]
        status_read, status_write = os.pipe()
        stack.callback(os.close, status_read)
        passed.append(status_write)
        try:
            arguments += ["--seccomp", handed(seccomp.program()), "--json-status-fd", str(status_write)]
            process = subprocess.Popen(
                [*arguments, "--", *_limiter(limits), *command],
                executable=shutil.which("bwrap"),
                stdin=sealed(stdin),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,  # not only of the program: /proc/1/environ in the sandbox is that of bwrap
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
                **({"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if _drops() else {}),  # type: ignore[call-overload]
            )
        finally:
            os.close(status_write)
        if calls is not None:
            calls.begin()
        try:
            killed, kept = watch(process, limits, began, stop, calls)
        finally:
            kill(process)
        os.set_blocking(status_read, False)
        status = b""
        with suppress(BlockingIOError):
            status = os.read(status_read, 4096)
    seconds = time.monotonic() - began
    stdout, stderr = (one.text() for one in kept)
    *lines, _ = status.split(b"\n")  # killed, it may have been in the middle of one
    ends = [json.loads(line).get("exit-code") for line in lines]
    ended = [code for code in ends if code is not None]
    if not ended and not killed:
        raise OSError(f"bwrap did not run the program: {stderr.strip() or f'it ended with {process.returncode}'}")
    code = ended[0] if ended else 128 + signal.SIGKILL
    return Result(code, stdout, stderr, killed, any(one.cut for one in kept), seconds)


def _namespaces(limits: Limits) -> list[str]:
    """What bwrap is told: everything of a program's own, and read-only, but for its home."""
    told = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    told += ["--new-session", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            told += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            told += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        told += ["--ro-bind-try", name, name]
    if folder := interpreter()[1]:
        told += ["--ro-bind", folder, folder]
    told += ["--proc", "/proc"]
    for name in _DEVICES:
        told += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, at in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        told += ["--symlink", f"/proc/self/fd{at}", f"/dev/{name}"]
    told += ["--size", str(limits.disk_mb * _MB), "--perms", "0755", "--tmpfs", HOME, "--dir", f"{HOME}/tmp"]
    for name in ("/tmp", "/dev/shm"):
        told += ["--symlink", f"{HOME}/tmp", name]
    return [*told, "--remount-ro", "/", "--chdir", HOME]


def _limiter(limits: Limits) -> list[str]:
    """Inside of the sandbox, as the number of processes is counted for each user namespace."""
    return [
        "/usr/bin/prlimit",
        f"--as={limits.memory_mb * _MB}",
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
        f"--fsize={limits.disk_mb * _MB}",
        f"--nproc={limits.processes}",
        "--nofile=256",
        "--core=0",
        "--",
    ]


def _sealed(data: str | bytes) -> int:
    """A file in memory that nobody can change: a program can open its standard input again, to write."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    left = memoryview(data.encode(errors="surrogatepass") if isinstance(data, str) else data)
    while left:
        left = left[os.write(fd, left) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _below_home(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"files: {name!r} is no path below the home; expected one such as data/input.txt")
    return f"{HOME}/{path}"


@functools.cache
def _drops() -> bool:
    """Whether the sandbox is started as nobody: root is bound by no limit of processes, and owns the system's files."""
    if os.geteuid() != 0:
        return False
    ranges = [[int(one) for one in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= _NOBODY < start + count for start, _, count in ranges)
