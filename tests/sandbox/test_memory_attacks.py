"""Programs that hold memory outside the resident set size.

Each attack tries to hold four times `memory_mb` in one way, and waits. A control group of the kernel around the
sandbox is the meter: it charges every page, kernel memory too, and reports the peak. It also stops an attack at
four times the limit, so that the machine survives a sandbox without bounds. Run as root and as an ordinary user, with
the sandbox's own control group and without it.
"""

# ruff: noqa: E501 (programs as data)

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from components.sandbox import Limits, ProgramResult, Sandbox, cgroups
from tests.sandbox.unprivileged import USER, run_forked

MB = 1024 * 1024
LIMIT = 256
TARGET = 4 * LIMIT
"""Megabytes that an attack tries to hold."""
FACTOR = 1.2

pytestmark = [
    pytest.mark.security,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("sandbox_here"),
]

PREAMBLE = f"""
import array, ctypes, fcntl, mmap, os, select, signal, socket, struct, sys, threading, time
TARGET = {TARGET} << 20
HOLD = 0.7
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
FAILED = ctypes.c_void_p(-1).value

def spread(count, work):
    "Runs `work` in processes that hold what it returns until the end."
    for number in range(count):
        if os.fork() == 0:
            held = None
            try: held = work(number)
            except (OSError, MemoryError, RuntimeError) as error: print(type(error).__name__, error, flush=True)
            time.sleep(HOLD)
            os._exit(0)
    for _ in range(count): os.wait()

def fill(sock, block=b"x" * 4096):
    sock.setblocking(False)
    try:
        while True: sock.send(block)
    except OSError: pass
"""

ATTACKS = {
    "many_processes": """
spread(16, lambda _: bytearray(TARGET // 16))""",
    "memory_of_a_process_whose_first_thread_ended": """
def work(_):
    def hold():
        time.sleep(0.1)
        held = bytearray(TARGET // 8)
        time.sleep(HOLD)
        os._exit(0)
    threading.Thread(target=hold).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
spread(8, work)""",
    "home_files_and_heap": """
with open("file", "wb", buffering=0) as file:
    try:
        while True: file.write(bytes(1 << 20))
    except OSError: pass
os.remove  # the file stays
spread(4, lambda _: bytearray(60 << 20))""",
    "shared_mapping_behind_one_page": """
def work(_):
    kept = []
    size = 64 << 20
    for _ in range(TARGET // size):
        at = libc.mmap(None, size, 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0)
        if at == FAILED: raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memset(at, 1, size)
        libc.munmap(at + 4096, size - 4096)
        kept.append(at)
spread(1, work)""",
    "shared_mapping_of_dev_zero": """
def work(_):
    file = os.open("/dev/zero", os.O_RDWR)
    size = 64 << 20
    for _ in range(TARGET // size):
        at = libc.mmap(None, size, 3, mmap.MAP_SHARED, file, 0)
        if at == FAILED: raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memset(at, 1, size)
        libc.munmap(at + 4096, size - 4096)
spread(1, work)""",
    "huge_pages_behind_one_page": """
def work(_):
    huge = 2 << 20
    for _ in range(TARGET // huge):
        at = libc.mmap(None, 2 * huge, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if at == FAILED: raise OSError(ctypes.get_errno(), "mmap")
        start = (at + huge - 1) // huge * huge
        libc.madvise(start, huge, 14)
        ctypes.memset(start, 1, 1)
        libc.munmap(start + 4096, at + 2 * huge - start - 4096)
spread(1, work)""",
    "page_tables": """
def work(_):
    at = 1 << 32
    for n in range(60000):
        got = libc.mmap(at + (n << 30), 4096, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if got == FAILED: raise OSError(ctypes.get_errno(), "mmap")
        ctypes.string_at(got, 1)
spread(3, work)""",
    "mappings": """
def work(_):
    size = 60000 * 4096
    while True:
        at = libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if at != FAILED: break
        size -= 4 << 20
    for n in range(0, size // 4096, 2): libc.mprotect(at + n * 4096, 4096, 1)
spread(28, work)""",
    "pipes": """
def work(_):
    kept = []
    while True:
        try: kept.append(os.pipe())
        except OSError: break
        for size in (1 << 20, 1 << 18, 1 << 17):
            try:
                fcntl.fcntl(kept[-1][1], 1031, size)
                break
            except OSError: pass
        os.set_blocking(kept[-1][1], False)
        try:
            while True: os.write(kept[-1][1], b"x" * 4096)
        except OSError: pass
    return kept
spread(28, work)""",
    "vmsplice_of_huge_pages": """
def work(_):
    huge, kept = 2 << 20, []
    for _ in range(32):
        kept.append(os.pipe())
        for _ in range(16):
            at = libc.mmap(None, 2 * huge, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            start = (at + huge - 1) // huge * huge
            libc.madvise(start, huge, 14)
            ctypes.memset(start, 1, 1)
            part = (ctypes.c_size_t * 2)(start, 4096)
            if libc.vmsplice(kept[-1][1], part, ctypes.c_size_t(1), 2) < 0: raise OSError(ctypes.get_errno(), "vmsplice")
            libc.munmap(at, 2 * huge)
    return kept
spread(1, work)""",
    "unix_stream": """
def work(_):
    kept = []
    while True:
        try: pair = socket.socketpair()
        except OSError: return kept
        for one in pair:
            try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            except OSError: pass
            fill(one)
        kept.append(pair)
spread(16, work)""",
    "unix_datagrams": """
def work(_):
    kept = []
    while True:
        try: pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError: return kept
        for one in pair:
            try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            except OSError: pass
            fill(one, b"x" * 65536)
        kept.append(pair)
spread(16, work)""",
    "sockets_in_flight": """
carrier = socket.socketpair()
carrier[0].setblocking(False)
more = [socket.socketpair() for _ in range(4)]
for number in range(4000):
    try:
        pair = socket.socketpair()
        for one in pair:
            try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            except OSError: pass
            fill(one)
        carrier[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [p.fileno() for p in pair]))])
        for one in pair: one.close()
    except OSError as error:
        print(number, error)
        break
time.sleep(HOLD)""",
    "tcp_loopback": """
def work(_):
    kept = []
    server = socket.create_server(("127.0.0.1", 0))
    for _ in range(100):
        client = socket.create_connection(server.getsockname())
        kept.append((client, server.accept()[0]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        kept[-1][1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        fill(client)
    return kept
subprocess = __import__("subprocess")
spread(8, work)""",
    "system_v": """
def work(_):
    for n in range(3000): libc.semget(0, 32000, 0o1600)
    for n in range(100):
        found = libc.shmget(0, 16 << 20, 0o1600)
        if found >= 0:
            libc.shmat.restype = ctypes.c_void_p
            at = libc.shmat(found, None, 0)
            if at != FAILED:
                ctypes.memset(at, 1, 16 << 20)
                libc.shmdt(ctypes.c_void_p(at))
spread(1, work)""",
    "epoll": """
def work(_):
    fds = []
    try:
        while len(fds) < 230: fds.append(os.eventfd(0))
    except OSError: pass
    kept = []
    for _ in fds[:110]:
        os.close(fds.pop())
        poll = select.epoll()
        kept.append(poll)
        for fd in fds:
            try: poll.register(fd)
            except OSError: pass
    return kept
spread(28, work)""",
    "epoll_of_passed_files": """
def work(_):
    poll = select.epoll()
    ours, theirs = socket.socketpair()
    files = [os.eventfd(0) for _ in range(100)]
    at = 110
    for _ in range(100):
        for fd in files:
            for n in range(at, 126):
                os.dup2(fd, n)
                try: poll.register(n)
                except OSError: pass
        for n in range(at, 126): os.close(n)
        other = os.fork()
        if other == 0:
            time.sleep(3 * HOLD)
            os._exit(0)
        for fd in files: os.close(fd)
        files = [os.eventfd(0) for _ in range(100)]
    return poll
spread(8, work)""",
    "file_locks": """
def work(number):
    kept = [os.open(f"lock{number}.{n}", os.O_RDWR | os.O_CREAT) for n in range(100)]
    for at in range(0, 2 * 200, 2):
        for file in kept: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
spread(28, work)""",
    "futex_hash": """
def work(_):
    for bits in (22, 21, 20):
        if libc.prctl(78, 1, ctypes.c_ulong(1 << bits), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0: return
    raise OSError(ctypes.get_errno(), "prctl")
spread(8, work)""",
    "thread_stacks": """
threading.stack_size(48 << 20)
def deep(n=0):
    at = ctypes.create_string_buffer(1)
    data = (ctypes.c_char * (8 << 20))()
    time.sleep(HOLD)
def work(_):
    threads = [threading.Thread(target=deep) for _ in range(4)]
    for one in threads: one.start()
    held = bytearray(100 << 20)
    for one in threads: one.join()
spread(6, work)""",
    "inotify": """
def work(number):
    fd = libc.inotify_init1(0)
    count = 0
    for folder, names, files in os.walk("/usr"):
        for name in files:
            if libc.inotify_add_watch(fd, os.path.join(folder, name).encode(errors="surrogateescape"), 2) < 0:
                raise OSError(ctypes.get_errno(), f"inotify after {count}")
            count += 1
spread(1, work)""",
    "timers": """
def work(number):
    for n in range(100000):
        if libc.syscall(222 if os.uname().machine == "x86_64" else 107, 1, None, ctypes.byref(ctypes.c_int())) < 0:
            raise OSError(ctypes.get_errno(), f"timer after {n}")
spread(16, work)""",
    "flood_of_output": """
block = b"x" * 65536
while True: os.write(1, block)""",
}


class Meter:
    """Memory control group of the kernel; its peak is the most that it held at once."""

    def __init__(self, folder: Path, version: int):
        self.folder = folder
        self.version = version

    def peak(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.folder / name).read_text())


@contextmanager
def metered(most: int) -> Iterator[Meter]:
    """Create a control group limited to `most` bytes; skip the test if none can be created."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    if own is not None:
        meter = Meter(Path(f"/sys/fs/cgroup/memory{own}/espalier-test-{os.getpid()}"), 1)
        bound = "memory.limit_in_bytes"
    else:
        own = next((path for number, _, path in lines if number == "0"), "/")
        meter = Meter(Path(f"/sys/fs/cgroup{Path(own).parent}/espalier-test-{os.getpid()}"), 2)
        bound = "memory.max"
    try:
        meter.folder.mkdir()
        (meter.folder / bound).write_text(str(most))
    except OSError as error:
        with suppress(OSError):
            meter.folder.rmdir()
        pytest.skip(f"no control group to measure with: {error}")
    try:
        yield meter
    finally:
        deadline = time.monotonic() + 600
        while meter.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                meter.folder.rmdir()
            time.sleep(0.05)


def attack(code: str, uid: int, counted: bool) -> tuple[ProgramResult | None, float]:
    """Return how an attack ended, and the peak in megabytes. counted: without a control group for the sandbox."""

    def run() -> ProgramResult | None:
        if counted:
            cgroups.hierarchy = lambda: None
        elif cgroups.hierarchy() is None:
            return None
        return Sandbox(Limits(seconds=20, cpu_seconds=30, memory_mb=LIMIT)).python(code)

    with metered(4 * LIMIT * MB) as meter:

        def enter() -> None:
            (meter.folder / "cgroup.procs").write_text("0")
            # Not to test how busy the machine is: whoever watches is not held up. What it starts has no such right.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))

        try:
            result = run_forked(run, uid, before=enter)
        except ChildProcessError:  # the meter's own limit killed it
            return None, meter.peak() / MB
        if result is None:
            pytest.skip("no control group for a sandbox can be created beside that of the meter")
        return result, meter.peak() / MB


QUICK = {"many_processes", "unix_stream", "futex_hash"}


@pytest.mark.parametrize(
    ("uid", "counted"),
    [(0, False), (0, True), (USER, True)],
    ids=["root-control-group", "root-counted", "user-counted"],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ATTACKS]
)
def test_memory_stays_within_its_limit(name: str, uid: int, counted: bool):
    result, peak = attack(PREAMBLE + ATTACKS[name], uid, counted)
    assert peak <= FACTOR * LIMIT, result
    assert result is not None
    assert result.killed in ("", "memory", "output", "time")


@pytest.mark.parametrize("counted", [False, True], ids=["control-group", "counted"])
def test_a_program_within_its_limit_is_not_killed(counted: bool):
    code = (
        "import multiprocessing, sqlite3, asyncio, threading, os, time\n"
        + """
def work(_):
    held = bytearray(12 << 20)
    time.sleep(0.3)
    return len(held)
database = sqlite3.connect("data.db")
database.execute("create table t (x)")
database.executemany("insert into t values (?)", [(n,) for n in range(1000)])
database.commit()
threads = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(8)]
for thread in threads: thread.start()
with multiprocessing.Pool(6) as pool: print(sum(pool.map(work, range(6))) >> 20)
async def pipe():
    process = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()
print(asyncio.run(pipe()))
held = bytearray(100 << 20)
time.sleep(0.3)
print(multiprocessing.Value("i", 5).value)
"""
    )
    result, _ = attack(code, 0, counted)
    assert result is not None
    assert (result.killed, result.stdout, result.stderr) == ("", "72\nhello\n5\n", "")
