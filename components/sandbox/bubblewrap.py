"""Sandbox for untrusted programs, based on bubblewrap, on Linux.

A program sees a file system of its own: `/usr` read-only with what Python needs, a few devices, a private `/proc`, and
a temporary home folder in memory. It has no network, none of our environment variables, files or processes, no
privileges and no way to gain any, and the system calls of `seccomp.py` fail. If Espalier runs as root, the program
runs as nobody.

Its usage is bounded. The kernel bounds each process (address space, CPU time, size of a file) and the number of
processes; the home folder has a size; a control group bounds all memory together, if one can be created (`cgroups.py`).
A running program is checked every few milliseconds: one that takes too long, creates too many files or prints too much
is killed with all its subprocesses. Without a control group memory is counted in this way as well (`watch.py`); the
program then runs on one processor, so that it cannot use much more between two checks. Nothing outlives its run.

Output is arbitrary bytes: invalid UTF-8 is decoded as U+FFFD, and of long output the beginning and the end are kept,
with a mark between them.

    sandbox = Sandbox(Limits(seconds=5))
    sandbox.python("print(6 * 7)").stdout                       # "42\\n"
    sandbox.run(["sh", "-c", "wc -l < data.txt"], files={"data.txt": "a\\nb\\n"})
    await sandbox.run_async(["python3", "solution.py"], files={"solution.py": code})
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath

from components.aio import stoppable
from components.errors import ResourceError
from components.sandbox import cgroups, seccomp
from components.sandbox.calls import Answer, CallServer
from components.sandbox.limits import Limits, ProgramResult
from components.sandbox.watch import HOME, OPEN_FILES, kill, kill_orphans, owner_options, watch

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
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 64 MB of the limited address space
}
"""Environment variables of a program; it has no others."""

INSTALL = "Install bubblewrap 0.8 or later (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
NAMESPACES = (
    "User namespaces may be off. To test them, run `bwrap --unshare-all --ro-bind / / true` as the same user; "
    "`sysctl user.max_user_namespaces` must not be 0; on Debian `sysctl kernel.unprivileged_userns_clone` must be 1; "
    "on Ubuntu from 24.04 `sysctl kernel.apparmor_restrict_unprivileged_userns` must be 0, or bwrap needs an AppArmor "
    "profile with `userns`; in Docker, run with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)

_NOBODY = 65534
_MB = 1024 * 1024
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_USR = (*_SYSTEM, "libexec", "include", "share")
_USR_LOCAL = ("bin", "sbin", "lib", "lib64", "include")
_DEVICES = ("null", "full", "random", "urandom")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_WITHOUT_HUGE_PAGES = """
import ctypes, os, sys
PR_SET_THP_DISABLE = 41  # children inherit it
if ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
    sys.exit("the kernel cannot disable huge pages")
os.execv(sys.argv[1], sys.argv[1:])
"""
_PACKAGES = ("lib*/python3*/site-packages", "lib*/python3*/dist-packages", "lib*/python3*/ensurepip/_bundled")
_processors = itertools.count()


class Sandbox:
    """Runner of sandboxed programs. Stateless: one instance serves many threads, and each run starts afresh.

    links: absolute paths that lead to paths below the home folder, for programs that expect their files elsewhere.
    """

    def __init__(self, limits: Limits | None = None, links: Mapping[str, str] | None = None):
        self.limits = limits or Limits()
        self._links = links or {}

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        stop: threading.Event | None = None,
        answer: Answer | None = None,
    ) -> ProgramResult:
        """Run a command to its end.

        files: contents by path below the home folder, written before the command starts. stop: event that kills the
        program. answer: enables calls of the program and answers them (`components.sandbox.calls`).
        Raises ResourceError if the sandbox is not available, and OSError if this run did not start.
        """
        check()
        return _run(self.limits, command, stdin, files or {}, stop, answer, self._links)

    def python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        stop: threading.Event | None = None,
        answer: Answer | None = None,
    ) -> ProgramResult:
        """Run Python code with the standard library and the contents of `files`."""
        contents = {**(files or {}), ".main.py": code}
        return self.run([interpreter()[0], f"{HOME}/.main.py"], stdin=stdin, files=contents, stop=stop, answer=answer)

    async def run_async(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
    ) -> ProgramResult:
        """Run a command as `run` does, without blocking the event loop. Cancelling the task kills the program."""
        stop = threading.Event()
        return await stoppable(functools.partial(self.run, command, stdin=stdin, files=files, stop=stop), stop)


@functools.cache
def interpreter() -> tuple[str, str]:
    """Return the Python of the sandbox, and the folder that it needs besides `/usr`, if any: the interpreter that runs
    Espalier (without its packages), or the system's if the sandbox's user cannot read that one."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    for python, folder in (
        (own, prefix),
        *((Path(f"{usr}/bin/python3"), Path("/usr")) for usr in ("/usr", "/usr/local")),
    ):
        if not os.access(python, os.X_OK) or not python.resolve().is_relative_to(folder):
            continue
        if folder.is_relative_to("/usr"):
            return str(python), ""
        if not _drops() or all(parent.stat().st_mode & 0o005 == 0o005 for parent in [folder, *folder.parents]):
            return str(python), str(folder)
    raise ResourceError(
        f"the sandbox has no Python: it runs as nobody, who cannot read {prefix}, and /usr/bin/python3 does not exist. "
        f"Install one (Debian, Ubuntu: apt-get install python3), or do not run as root"
    )


def check() -> None:
    """Raise ResourceError, saying what to do, if the sandbox is not available."""
    if sys.platform != "linux":
        raise ResourceError(
            f"the sandbox needs Linux; this is {sys.platform}. Use Linux, or a virtual machine with Linux"
        )
    for tool, install in (("bwrap", INSTALL), ("prlimit", "Install util-linux")):
        if shutil.which(tool) is None:
            raise ResourceError(f"the sandbox needs {tool}, which is not installed. {install}")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise ResourceError("the sandbox needs /proc/PID/task/PID/children, which this kernel does not provide")
    _works(shutil.which("bwrap"), interpreter())


@functools.lru_cache(maxsize=4)
def _works(bwrap: str, python: tuple[str, str]) -> None:
    """Run a test program once, without sandboxes left by killed processes; a failure is not cached."""
    kill_orphans()
    script = "import socket, ssl, subprocess; subprocess.run(['true'], check=True); print('works')"
    try:
        result = _run(Limits(seconds=60), [python[0], "-I", "-c", script], b"", {}, None)
    except OSError as error:
        raise ResourceError(f"the sandbox does not work here: {error}. {INSTALL}. {NAMESPACES}") from error
    if result.stdout != "works\n":
        raise ResourceError(
            f"the sandbox does not work here: Python exited with {result.exit_code} "
            f"(killed for: {result.killed or 'nothing'}) and the output "
            f"{(result.stdout + result.stderr).strip()!r:.300}; expected it to start another program. "
            f"Limits of processes need Linux 5.14 or later"
        )


def _run(
    limits: Limits,
    command: Sequence[str],
    stdin: str | bytes,
    files: Mapping[str, str | bytes],
    stop: threading.Event | None,
    answer: Answer | None = None,
    links: Mapping[str, str] | None = None,
) -> ProgramResult:
    began = time.monotonic()
    with ExitStack() as stack:
        inherited_fds: list[int] = []
        environment = ENVIRONMENT
        calls = None if answer is None else CallServer(answer, limits.calls)
        if calls is not None:
            stack.callback(calls.close)
            inherited_fds.append(calls.inside.fileno())
            environment = ENVIRONMENT | calls.environment()

        def sealed(data: str | bytes) -> int:
            fd = _sealed(data)
            stack.callback(os.close, fd)
            return fd

        def inherited_fd(data: str | bytes) -> str:
            inherited_fds.append(sealed(data))
            return str(inherited_fds[-1])

        options = _namespaces(limits, links or {})
        for name, content in files.items():
            options += ["--perms", "0644", "--file", inherited_fd(content), _below_home(name)]
        status_read, status_write = os.pipe()
        stack.callback(os.close, status_read)
        with ExitStack() as child_files:
            child_files.callback(os.close, status_write)
            options += ["--seccomp", inherited_fd(seccomp.program()), "--json-status-fd", str(status_write)]
            # bwrap waits for its options, so it and all its subprocesses are bounded before they start.
            options_read, options_write = os.pipe()
            child_files.callback(os.close, options_read)
            gate = stack.enter_context(os.fdopen(options_write, "wb", buffering=0))
            group = _group(limits, stack)
            process = subprocess.Popen(
                [*_launcher(group), *owner_options(), "--args", str(options_read), "--", *_limiter(limits), *command],
                stdin=sealed(stdin),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,  # also of bwrap itself: /proc/1/environ in the sandbox is bwrap's
                cwd="/",
                pass_fds=[*inherited_fds, status_write, options_read],
                start_new_session=True,
                **({"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if _drops() else {}),  # type: ignore[call-overload]
            )
        try:
            if group is None:
                processors = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(process.pid, {processors[next(_processors) % len(processors)]})
            else:
                group.add(process.pid)
            with suppress(BrokenPipeError):  # it has ended, and its stderr has the reason
                _write(gate.fileno(), "\0".join([*options, ""]).encode())
            gate.close()
            if calls is not None:
                calls.begin()
            killed, buffers = watch(process, limits, began, stop, calls, group)
        finally:
            kill(process)
        os.set_blocking(status_read, False)
        status = b""
        with suppress(BlockingIOError):
            status = os.read(status_read, 4096)
    seconds = time.monotonic() - began
    stdout, stderr = (buffer.text() for buffer in buffers)
    *lines, _ = status.split(b"\n")  # if killed, it may have written part of a line
    reported = [json.loads(line).get("exit-code") for line in lines]
    exit_codes = [code for code in reported if code is not None]
    if not exit_codes and not killed:
        raise OSError(f"bwrap did not run the program: {stderr.strip() or f'exit code {process.returncode}'}")
    code = exit_codes[0] if exit_codes else 128 + signal.SIGKILL
    return ProgramResult(code, stdout, stderr, killed, any(buffer.cut for buffer in buffers), seconds)


def _group(limits: Limits, stack: ExitStack) -> cgroups.ControlGroup | None:
    """Return a control group that is removed with the stack; None if groups cannot be created."""
    hierarchy = cgroups.hierarchy()
    if hierarchy is None:
        return None
    group = cgroups.ControlGroup(hierarchy, limits)
    stack.callback(group.close)
    return group


def _launcher(group: cgroups.ControlGroup | None) -> list[str]:
    """Return the command that starts bwrap. If memory is counted, huge pages are disabled: a program could hold 2 MB
    while it reports 4 kB of each."""
    bwrap = shutil.which("bwrap") or "bwrap"
    if group is not None or "[always]" not in _read(_HUGE_PAGES):
        return [bwrap]
    return [interpreter()[0], "-I", "-S", "-c", _WITHOUT_HUGE_PAGES, bwrap]


def _namespaces(limits: Limits, links: Mapping[str, str]) -> list[str]:
    """Return the options of bwrap for separate namespaces and a read-only file system, except the home folder."""
    options = ["--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    options += ["--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    options += _system()
    options += ["--proc", "/proc"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # A shared mapping of /dev/zero holds pages that are not counted; /dev/full reads the same.
    options += ["--symlink", "full", "/dev/zero"]
    for name, at in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        options += ["--symlink", f"/proc/self/fd{at}", f"/dev/{name}"]
    options += ["--size", str(limits.disk_mb * _MB), "--perms", "0755", "--tmpfs", HOME, "--dir", f"{HOME}/tmp"]
    for name in ("/tmp", "/dev/shm"):
        options += ["--symlink", f"{HOME}/tmp", name]
    for name, target in links.items():
        if "\0" in name:  # it would end the option, and begin others
            raise ValueError(f"links: {name!r} contains a zero byte")
        options += ["--symlink", _below_home(target), name]
    return [*options, "--remount-ro", "/", "--chdir", HOME]


def _system() -> list[str]:
    """Return the options of bwrap for the readable part of the file system: the host's programs and libraries, and a
    Python with its standard library. Python packages are hidden, especially our own."""
    visible = [f"/usr/{name}" for name in _USR] + [f"/usr/local/{name}" for name in _USR_LOCAL]
    visible += ["/etc/ld.so.cache", "/etc/alternatives"]
    python, folder = interpreter()
    if folder:
        visible += [str(Path(python).resolve()), f"{folder}/lib", f"{folder}/lib64"]
    options: list[str] = []
    for path in visible + [f"/{name}" for name in _SYSTEM]:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    for hidden in _hidden_packages(tuple(filter(os.path.isdir, visible)), folder):
        options += ["--size", "4096", "--perms", "0555", "--tmpfs", hidden, "--remount-ro", hidden]
    return options


@functools.cache
def _hidden_packages(visible: tuple[str, ...], prefix: str) -> list[str]:
    """Return the folders below the visible ones that contain Python packages, including Espalier's."""
    folders = {Path("/usr/share/python-wheels"), Path(__file__).resolve().parents[2]}
    for folder in filter(None, ("/usr", "/usr/local", prefix)):
        folders |= {path for pattern in _PACKAGES for path in Path(folder).glob(pattern)}
    below = {path.resolve() for path in folders if path.is_dir()}
    return sorted(str(path) for path in below if any(path.is_relative_to(at) and str(path) != at for at in visible))


def _limiter(limits: Limits) -> list[str]:
    """Return the command prefix that limits each process. It runs inside, where the number of processes is counted per
    user namespace."""
    return [
        "/usr/bin/prlimit",
        f"--as={limits.memory_mb * _MB}",
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
        f"--fsize={limits.disk_mb * _MB}",
        f"--nproc={limits.processes}",
        f"--nofile={OPEN_FILES}",
        "--core=0",
        "--memlock=0",
        "--msgqueue=0",
        "--sigpending=256",
        "--",
    ]


def _sealed(data: str | bytes) -> int:
    """Return a sealed file in memory: a program could otherwise reopen its standard input for writing."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write(fd, data.encode(errors="surrogatepass") if isinstance(data, str) else data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # the kernel has no huge pages
        return ""


def _write(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def _below_home(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"files: {name!r} is not a path below the home; expected one such as data/input.txt")
    return f"{HOME}/{path}"


@functools.cache
def _drops() -> bool:
    """Return True if the sandbox is started as nobody: root has no process limit and owns the system's files."""
    if os.geteuid() != 0:
        return False
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= _NOBODY < start + count for start, _, count in ranges)
