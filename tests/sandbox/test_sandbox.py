"""What a program finds in the sandbox, its limits, and its end. Attempts to escape are in `test_escapes.py`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from components.errors import ResourceError
from components.sandbox import HOME, Limits, Sandbox, bubblewrap, cgroups, seccomp, watch
from tests.sandbox.unprivileged import running

ROOT = Path(__file__).parents[2]
WIDE = Limits(seconds=60)
"""Limits of attacks that must not fail merely because a busy machine is slow."""


pytestmark = [
    pytest.mark.timeout(1800),  # each run starts processes, which a busy machine is slow at
    pytest.mark.usefixtures("sandbox_here"),
]


def json_output(code: str, limits: Limits = WIDE, **more):
    """Return the JSON printed by code in the sandbox, which must exit successfully."""
    result = Sandbox(limits).python(f"import os, json, socket, subprocess, sys, time\n{code}", **more)
    assert result.ok, result
    return json.loads(result.stdout)


def test_a_killed_process_leaves_nothing_of_its_sandboxes():
    """Also if it is killed while they start; of those, the next process that uses the sandbox ends the rest."""
    code = """
import sys, threading
from components.sandbox import Limits, Sandbox
sandbox = Sandbox(Limits(seconds=600))
sandbox.run(["true"])
for _ in range(16):
    threading.Thread(target=sandbox.run, args=[["sleep", sys.argv[1]]]).start()
print(flush=True)
"""
    for number, seconds in enumerate((0, 0.05, 1)):
        mark = f"{600 + number}.{os.getpid()}"  # in the command of each process of these sandboxes
        with subprocess.Popen([sys.executable, "-c", code, mark], cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(seconds)
            process.kill()
        deadline = time.monotonic() + 60
        while left := [one.pid for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or ())]:
            assert time.monotonic() < deadline, left
            watch.kill_orphans()
            time.sleep(0.05)
        cgroups.hierarchy.cache_clear()
        if (place := cgroups.hierarchy()) is not None:
            assert not list(place.folder.glob(f"*-{process.pid}-*"))


def test_a_program_runs():
    result = Sandbox(WIDE).run(["sh", "-c", "cat; cat in/a.txt >&2; exit 3"], stdin="one", files={"in/a.txt": b"two"})
    assert (result.exit_code, result.stdout, result.stderr) == (3, "one", "two")
    assert (result.killed, result.timed_out, result.truncated, result.ok) == ("", False, False, False)
    assert result.seconds > 0
    assert Sandbox(WIDE).run(["no-such-program"]).exit_code == 127
    assert Sandbox(WIDE).run(["sh", "-c", "kill -9 $$"]).exit_code == 128 + 9


def test_each_run_starts_afresh():
    code = f"print(json.dumps([os.getcwd(), sorted(os.listdir('.'))])); open('left', 'w'); open('{HOME}/tmp/left', 'w')"
    assert json_output(code) == json_output(code) == [HOME, [".main.py", "tmp"]]


def test_host_files_are_hidden(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's")
    hidden = [
        "/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/sys/class", "/run", "/var", "/mnt", "/proc/kcore",
        str(Path.home() / ".ssh"), str(ROOT), str(ROOT / "components"), str(secret), sys.prefix,
        "/proc/1/root/etc/passwd",
    ]  # fmt: skip
    code = f"""
found = []
for path in {hidden!r}:
    try:
        found.append(len(os.listdir(path)) if os.path.isdir(path) else open(path).read(10))
    except OSError: pass
print(json.dumps([found, os.listdir("/"), os.listdir("/etc"), os.listdir("/home"), os.listdir("/dev")]))"""
    leaks, top, etc, home, dev = json_output(code)
    assert leaks == []
    assert set(top) <= {"bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr"}
    assert set(etc) <= {"alternatives", "ld.so.cache"}
    assert home == ["agent"]
    assert not {"mem", "kmsg", "sda", "vda", "kvm", "tty"} & set(dev)


def test_temporary_folders_are_in_its_home(tmp_path):
    mark = f"espalier-sandbox-{os.getpid()}"
    code = f"""
os.makedirs({str(tmp_path / mark)!r})
open("/tmp/{mark}", "w").write("mine")
print(json.dumps(open("/dev/shm/{mark}").read()))"""
    assert json_output(code) == "mine"
    assert [path for path in (f"/tmp/{mark}", f"/dev/shm/{mark}", tmp_path / mark) if os.path.exists(path)] == []


def test_environment_variables_are_its_own():
    assert set(json_output("print(json.dumps(sorted(os.environ)))")) <= {*bubblewrap.ENVIRONMENT, "PWD", "LC_CTYPE"}


def test_there_are_no_privileges():
    code = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([[status[name].strip() for name in ("CapEff", "CapPrm", "CapAmb", "NoNewPrivs", "Seccomp")],
    os.getuid(), os.getgid(), os.getsid(0) != 0, open("/proc/self/uid_map").read().split()[1]]))"""
    *own, on_the_host = json_output(code)
    assert own == [["0" * 16, "0" * 16, "0" * 16, "1", "2"], 1000, 1000, True]
    assert on_the_host != "0"


@pytest.mark.skipif(platform.machine() not in seccomp.MACHINES, reason="no table")
def test_refused_system_calls_fail():
    column = seccomp.MACHINES[platform.machine()][0]
    numbers = {name: two[column] for name, two in seccomp.REFUSED.items() if two[column] is not None}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    value = libc.syscall(*map(ctypes.c_long, arguments))
    return [value, ctypes.get_errno()]
new = [call({seccomp.CLONE[column]}, flag, 0, 0, 0, 0) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000 | 17)]
print(json.dumps([{{name: call(number, 0, 0, 0, 0) for name, number in {numbers!r}.items()}}, new, call(435, 0, 0)]))"""
    results, new, clone3 = json_output(code)
    assert results == {name: [-1, 1] for name in numbers}
    assert new == [[-1, 1]] * 4
    assert clone3 == [-1, 38]
    libc = ctypes.CDLL(None, use_errno=True)  # and here they would not: the call is there, its arguments are bad
    assert libc.syscall(ctypes.c_long(numbers["memfd_create"]), None, 0) == -1
    assert ctypes.get_errno() == 14


def test_the_filter_is_well_formed():
    for machine in seccomp.MACHINES:
        filled = seccomp.program(machine)
        lines = list(struct.iter_unpack("=HBBI", filled))
        assert len(lines) < 4096
        for at, (code, yes, no, _) in enumerate(lines):
            assert at + 1 + max(yes, no) < len(lines) or code == 0x06
        assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)
    with pytest.raises(ResourceError, match="riscv64"):
        seccomp.program("riscv64")


def test_an_endless_loop_is_ended():
    result = Sandbox(Limits(seconds=1)).python("print('begun', flush=True)\nwhile True: pass", stdin="endless-mark")
    assert (result.killed, result.timed_out, result.exit_code) == ("time", True, 137)
    result = Sandbox(Limits(seconds=60, cpu_seconds=1)).python("while True: pass")
    assert (result.killed, result.exit_code) == ("", 128 + signal.SIGXCPU)


def test_fork_bomb_is_limited():
    limits = Limits(seconds=1, processes=16)
    most = 0
    over = threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.05):
            most = max(most, len(running("fork-mark")))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        result = Sandbox(limits).run([bubblewrap.interpreter()[0], "-c", bomb, "fork-mark"])
    finally:
        over.set()
        thread.join()
    assert result.timed_out
    assert most <= 16 + 3
    assert running("fork-mark") == []
    code = """
import threading
begun = []
try:
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        begun.append(1)
except RuntimeError: pass
print(json.dumps(len(begun)))"""
    assert json_output(code, Limits(seconds=60, processes=16)) <= 16


def test_a_memory_bomb_is_ended():
    limits = Limits(seconds=60, memory_mb=128)
    alone = Sandbox(limits).python("x = []\nwhile True: x.append(bytearray(1_000_000))")
    assert alone.exit_code != 0
    assert alone.killed == "memory" or "MemoryError" in alone.stderr
    many = """
import os, time
for _ in range(3): os.fork()
x = []
try:
    while len(x) < 90: x.append(b"x" * 1_000_000)
except MemoryError: pass
time.sleep(60)"""
    result = Sandbox(limits).run([bubblewrap.interpreter()[0], "-c", many, "memory-mark"])
    assert result.killed == "memory"
    assert running("memory-mark") == []


def test_where_memory_is_counted_a_program_has_one_processor_and_no_huge_pages(monkeypatch, tmp_path):
    (tmp_path / "enabled").write_text("[always] madvise never")
    monkeypatch.setattr(bubblewrap, "_HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(cgroups, "hierarchy", lambda: None)
    code = """
lines = [line.split(":")[1].strip() for line in open("/proc/self/status") if line.startswith("THP_enabled")]
print(json.dumps([len(os.sched_getaffinity(0)), lines]))"""
    assert json_output(code) == [1, ["0"]]


def test_a_flood_of_output_is_cut_and_ended():
    limits = Limits(seconds=60, output_bytes=1000)
    result = Sandbox(limits).python("print('a' * 600 + 'b' * 3000 + 'c' * 499)")
    assert result.stdout == "a" * 500 + "\n[... 3100 bytes cut ...]\n" + "c" * 499 + "\n"
    assert (result.truncated, result.killed, result.ok) == (True, "", True)
    flood = Sandbox(limits).run(["sh", "-c", "yes 1>&2"])
    assert (flood.killed, flood.truncated) == ("output", True)
    assert len(flood.stderr) < 1100
    whole = Sandbox(limits).python("print('a' * 999)")
    assert (whole.stdout, whole.truncated) == ("a" * 999 + "\n", False)


def test_output_of_any_bytes_is_text():
    result = Sandbox(WIDE).python("import sys; sys.stdout.buffer.write(bytes(range(256)) + b'\\xf0\\x9f')")
    assert result.stdout.encode().decode().count("�") > 100
    assert "\x00" in result.stdout
    odd = Sandbox(WIDE).python("print('\ud83d')")  # a lone surrogate, as JSON from a model may hold
    assert odd.exit_code == 1
    assert "SyntaxError" in odd.stderr


def test_many_run_at_once_and_a_cancelled_one_is_killed():
    sandbox = Sandbox(WIDE)
    mark = f"300.{os.getpid()}77"

    async def go():
        results = await asyncio.gather(*(sandbox.run_async(["sh", "-c", f"echo {n}"]) for n in range(4)))
        long = asyncio.create_task(sandbox.run_async(["sleep", mark]))
        while not running(f"sleep {mark}"):
            await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return [result.stdout for result in results]

    assert asyncio.run(go()) == [f"{n}\n" for n in range(4)]
    assert running(f"sleep {mark}") == []


def test_stop_during_startup_kills_at_once(monkeypatch):
    monkeypatch.setattr(watch, "_LOOK", 0.0)
    stop = threading.Event()
    stop.set()
    for _ in range(15):
        assert Sandbox(WIDE).run(["sleep", "600"], stop=stop).killed == "stopped"


def test_files_stay_below_the_home(subtests):
    for name in ["/etc/x", "../x", "a/../../x", "", "a\0b"]:
        with subtests.test(name), pytest.raises(ValueError, match="below the home"):
            Sandbox().run(["true"], files={name: "x"})


def test_limits_are_checked():
    with pytest.raises(ValueError, match="memory_mb = 1: expected at least 32"):
        Limits(memory_mb=1)
    with pytest.raises(ValueError, match="seconds"):
        Limits(seconds=float("nan"))


def test_missing_sandbox_is_reported_with_advice(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="apt-get install bubblewrap"):
        Sandbox().run(["true"])
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    (tmp_path / "prlimit").symlink_to("/usr/bin/prlimit")
    if os.geteuid() == 0:
        monkeypatch.setattr(bubblewrap, "_drops", lambda: False)  # nobody cannot read this folder
    with pytest.raises(ResourceError, match=r"No permissions.*user\.max_user_namespaces"):
        Sandbox().run(["true"])
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ResourceError, match="needs Linux"):
        Sandbox().run(["true"])
