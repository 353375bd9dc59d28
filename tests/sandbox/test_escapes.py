"""Sandbox escape attempts of a program, each as root and as an ordinary user.

Each attempt says what it got: what it read, or what it was allowed to do. It must have got nothing. The test looks
from outside, too: at files that it could have written, sockets that it could have reached, processes that it could
have ended. The attempts that need no run of their own share one, each in a process of its own.
"""

# ruff: noqa: E501 (programs as data)

from __future__ import annotations

import functools
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from components.sandbox import Limits, ProgramResult, Sandbox, bubblewrap, seccomp
from tests.sandbox.unprivileged import USER, run_forked, running

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
NOBODY = 65534
MARK = f"espalier-escape-{os.getpid()}"
SECRET = f"secret-{secrets.token_hex(8)}"
"""Secret in a file, in the environment and in the command line of a process of the host."""

pytestmark = [
    pytest.mark.security,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("sandbox_here"),
]

READING = {
    "shadow": "got = open('/etc/shadow').read()",
    "passwd": "got = open('/etc/passwd').read()",
    "home_of_root": "got = os.listdir('/root')",
    "sources_of_the_project": "got = os.listdir(ROOT)",
    "file_of_the_host": "got = open(HIDDEN).read()",
    "file_of_the_host_by_its_own_root": "got = open('/proc/self/root' + HIDDEN).read()",
    "root_of_the_first_process": "got = open('/proc/1/root' + HIDDEN).read()",
    "working_folder_of_the_first_process": "got = open('/proc/1/cwd/' + '../' * 9 + HIDDEN).read()",
    "symbolic_link": "os.symlink(HIDDEN, 'link'); got = open('link').read()",
    "relative_link": "os.symlink('../' * 9 + HIDDEN.lstrip('/'), 'up'); got = open('up').read()",
    "link_to_a_folder": "os.symlink(HIDDEN_FOLDER, 'out'); got = os.listdir('out/')",
    "processes_of_the_host": "got = str(VICTIM) in pids() or len(pids()) > 7",
    "environment_of_the_host": "got = SECRET in everything('environ')",
    "command_lines_of_the_host": "got = SECRET in everything('cmdline')",
    "memory_of_a_process": "got = open(f'/proc/{VICTIM}/mem', 'rb').read(1)",
    "descriptors_of_a_process": "got = os.listdir(f'/proc/{VICTIM}/fd')",
    "inherited_descriptors": "got = [link(f'/proc/self/fd/{n}') for n in range(3, 60) if n not in OWN and link(f'/proc/self/fd/{n}')]",
    "descriptors_of_other_processes": (
        "got = [at for pid in pids() for at in glob.glob(f'/proc/{pid}/fd/*') if HIDDEN_FOLDER in link(at)]"
    ),
    "kernel_memory": "got = [p for p in ('/dev/mem', '/dev/kmem', '/proc/kcore', '/dev/port') if readable(p)]",
    "kernel_log": "got = readable('/dev/kmsg') or call('syslog', 3, buffer, 100) > 0",
    "sysfs": "got = os.listdir('/sys')",
    "control_groups": "got = glob.glob('/sys/fs/cgroup/*') + glob.glob('/sys/fs/cgroup/*/release_agent')",
    "block_devices": "got = [p for p in glob.glob('/dev/*') if stat.S_ISBLK(os.stat(p).st_mode)]",
    "file_handles": "got = call('name_to_handle_at', -100, b'/usr', buffer, buffer, 0) == 0",
    "python_packages": """
import importlib
got = [f'{at}/{name}' for at in packages() for name in os.listdir(at)]
got += glob.glob('/usr/lib*/python3*/ensurepip/_bundled/*')
sys.path += packages() + got
for name in ('yaml', 'pip', 'numpy', 'setuptools', 'components', 'flows'):
    try: got.append(importlib.import_module(name).__file__)
    except Exception: pass""",
}
WRITING = {
    "system_folders": """
got = []
for folder in ('/', '/usr', '/usr/bin', '/usr/local/lib', '/etc', '/dev', '/home', '/proc', '/lib/python3', ROOT, HIDDEN_FOLDER):
    try: open(f'{folder}/{MARK}', 'w').close(); got.append(folder)
    except OSError: pass""",
    "masked_folders": """
got = []
for folder in packages():
    try: open(f'{folder}/{MARK}', 'w').close(); got.append(folder)
    except OSError: pass""",
    "mode_of_a_system_folder": "os.chmod('/usr', 0o777); got = True",
    "removal_of_a_program": "os.remove('/usr/bin/env'); got = True",
    "hard_link_to_a_program": "os.link('/usr/bin/env', 'env'); got = True",
    "the_running_program": "got = os.open('/proc/self/exe', os.O_WRONLY)",
    "the_first_processs_program": "got = os.open('/proc/1/exe', os.O_WRONLY)",
    "standard_input": "got = open('/proc/self/fd/0', 'r+b', buffering=0).write(b'x' * 1000)",
    "core_pattern": "got = put('/proc/sys/kernel/core_pattern', b'|/bin/true')",
    "kernel_settings": "got = [p for p in glob.glob('/proc/sys/*/*') + glob.glob('/proc/sys/net/*/*') if rewritten(p)]",
    "sysrq": "got = put('/proc/sysrq-trigger', b'h')",
    "score_for_the_out_of_memory_killer": "got = put('/proc/self/oom_score_adj', b'-1000')",
    "device_node": "os.mknod('disk', 0o60600, os.makedev(254, 0)); got = True",
    "character_device": "os.mknod('mem', 0o20600, os.makedev(1, 1)); got = True",
    "map_of_users": "got = put('/proc/self/uid_map', b'0 0 1')",
    "host_name": "socket.sethostname('x'); got = True",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0); got = True",
}
NETWORK = {
    "every_family": """
got = []
for family in range(64):
    for kind in range(1, 11):
        if family != 1 and libc.socket(family, kind, 0) >= 0: got.append((family, kind))
        if family != 1 and libc.socketpair(family, kind, 0, buffer) >= 0: got.append((family, kind, 'pair'))""",
    "family_with_other_upper_bits": """
got = [f for f in (2, 10, 16, 40) for high in (1 << 32, 0xffffffff << 32) if libc.syscall(SOCKET, c_long(high | f), 1, 0) >= 0]""",
    "vsock_of_the_hypervisor": "s = socket.socket(40, 1); s.bind((2**32 - 1, 9999)); got = s.getsockname()",
    "listener_on_the_loopback": "got = socket.create_connection(('127.0.0.1', PORT), timeout=2).getpeername()",
    "datagram_to_the_loopback": "got = socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "address_of_the_internet": "got = socket.create_connection(('1.1.1.1', 53), timeout=2).getpeername()",
    "ipv6": "got = socket.create_connection(('::1', PORT), timeout=2).getpeername()",
    "name_server": "got = socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
    "name_lookup": "got = socket.getaddrinfo('example.org', 80)",
    "abstract_socket_of_the_host": "socket.socket(socket.AF_UNIX).connect('\\0' + MARK); got = True",
    "abstract_datagram_to_the_host": "got = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '\\0d' + MARK)",
    "socket_file_of_the_host": "socket.socket(socket.AF_UNIX).connect(HIDDEN_FOLDER + '/socket'); got = True",
    "netlink": "got = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).fileno()",
    "raw_packets": "got = socket.socket(socket.AF_PACKET, socket.SOCK_RAW).fileno()",
    "kernel_cryptography": "got = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).fileno()",
    "interfaces": "got = [l for l in open('/proc/net/dev').read().splitlines()[2:] if not l.strip().startswith('lo:')]",
    "larger_socket_buffer": (
        "s = socket.socket(socket.AF_UNIX); s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22); got = True"
    ),
}
PRIVILEGES = {
    "user_root": "os.setuid(0); got = True",
    "groups": "os.setgroups([0]); got = True",
    "capabilities": "got = call('capset', b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24) == 0",
    "programs_with_set_user_id": """
got = []
for path in glob.glob('/usr/bin/*') + glob.glob('/usr/sbin/*'):
    if os.stat(path).st_mode & 0o6000 if os.path.exists(path) else False:
        for arguments in (['-c', 'id -u'], ['id', '-u']):
            try: out = subprocess.run([path, *arguments], capture_output=True, timeout=5, stdin=subprocess.DEVNULL)
            except (OSError, subprocess.TimeoutExpired): continue
            if out.stdout.strip() == b'0': got.append(path)""",
    "user_namespace": "got = subprocess.run(['unshare', '--user', '--map-root-user', 'true'], capture_output=True).returncode == 0",
    "namespace_by_clone": "got = [f for f in NAMESPACES if spawn(f)]",
    "namespace_by_clone3": "got = call('clone3', struct.pack('=8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64) >= 0",
    "namespace_of_another_process": "got = call('setns', os.open('/proc/1/ns/mnt', 0), 0) == 0",
    "mount": "got = call('mount', b'none', b'/home/agent/tmp', b'tmpfs', 0, 0) == 0",
    "remount_for_writing": "got = call('mount', b'none', b'/usr', 0, 32 | 4096, 0) == 0",
    "mount_by_new_calls": "got = [n for n in ('fsopen', 'open_tree', 'move_mount', 'mount_setattr') if call(n, buffer, 0) >= 0]",
    "calls_newer_than_the_table": "got = [n for n in range(463, 600) if libc.syscall(n, -100, b'/usr', 0) != -1 or ctypes.get_errno() != 38]",
    "unmount": "got = call('umount2', b'/usr', 2) == 0",
    "chroot": "os.chroot('/usr'); got = True",
    "pivot_root": "got = call('pivot_root', b'.', b'.') == 0",
    "trace_the_first_process": "got = call('ptrace', 16, 1, 0, 0) == 0",
    "trace_itself": "got = call('ptrace', 0, 0, 0, 0) == 0",
    "memory_by_call": "got = call('process_vm_readv', 1, buffer, 1, buffer, 1, 0) >= 0",
    "descriptor_by_call": "got = call('pidfd_getfd', os.pidfd_open(1), 0, 0) >= 0",
    "signal_to_the_host": """
for number in (0, 9, 19):
    try: os.kill(VICTIM, number); got = number
    except OSError: pass""",
    "nice_of_the_host": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); got = True",
    "priority": "os.nice(-5); got = True",
    "real_time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); got = True",
    "processors": "os.sched_setaffinity(0, range(os.cpu_count())); got = True",
    "own_limits": """
got = []
for name in ('AS', 'NPROC', 'NOFILE', 'FSIZE', 'CPU', 'MEMLOCK', 'SIGPENDING', 'CORE'):
    kind = getattr(resource, 'RLIMIT_' + name, 11)
    try: resource.setrlimit(kind, (resource.getrlimit(kind)[1] + 1,) * 2); got.append(name)
    except (OSError, ValueError): pass""",
    "limits_of_the_first_process": "resource.prlimit(1, resource.RLIMIT_NOFILE, (10**6, 10**6)); got = True",
    "keys": "got = [n for n in ('add_key', 'keyctl', 'request_key') if call(n, b'user', b'x', b'y', 1, -3) >= 0]",
    "io_uring": "got = call('io_uring_setup', 8, buffer) >= 0",
    "bpf": "got = call('bpf', 0, buffer, 72) >= 0",
    "performance_events": "got = call('perf_event_open', buffer, 0, -1, -1, 0) >= 0",
    "page_faults": "got = call('userfaultfd', 1) >= 0",
    "memory_files": "got = call('memfd_create', b'x', 0) >= 0",
    "system_v_and_queues": """
got = [n for n in ('semget', 'shmget', 'msgget') if call(n, 0, 4, 0o1600) >= 0]
if call('mq_open', b'q', 0o102, 0o600, 0) >= 0: got.append('mq_open')""",
    "filter_of_its_own": "got = [libc.prctl(22, 1), call('seccomp', 0, 0, 0)] != [-1, -1]",
    "kernel_modules": "got = [n for n in ('init_module', 'finit_module', 'delete_module', 'kexec_load') if call(n, 0, 0, 0) >= 0]",
    "reboot": "got = call('reboot', 0xfee1dead, 672274793, 0, 0) == 0",
    "swap_quota_accounting": "got = [n for n in ('swapon', 'swapoff', 'quotactl', 'acct') if call(n, b'/home/agent/x', 0, 0, 0) >= 0]",
    "typing_into_a_terminal": """
got = []
for path in ('/dev/tty', '/dev/console', '/dev/tty0', '/dev/ptmx', '/proc/self/fd/0', '/proc/self/fd/1', '/proc/self/fd/2'):
    for request in (0x5412, 0x541C):
        try: fcntl.ioctl(os.open(path, os.O_RDONLY | os.O_NONBLOCK), request, b'x'); got.append(path)
        except OSError: pass""",
    "loader_sheds_the_filter": """
loader = glob.glob('/lib64/ld-linux*') + glob.glob('/lib/ld-linux*')
shutil.copy(os.path.realpath(sys.executable), 'own'), os.chmod('own', 0o6755)
ask = 'print([l.split()[1] for l in open("/proc/self/status") if l.startswith(("NoNewPrivs", "Seccomp:", "CapEff", "Uid"))])'
out = [subprocess.run([*how, '-I', '-S', '-c', ask], capture_output=True, text=True).stdout.strip()
    for how in ([loader[0], os.path.realpath(sys.executable)], ['./own'])]
got = [o for o in out if o != str(['1000', '0' * 16, '1', '2'])]""",
    "call_of_32_bits": """
import mmap
if os.uname().machine == 'x86_64':
    page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    page.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')
    got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() > 0""",
    "call_of_x32": "got = os.uname().machine == 'x86_64' and libc.syscall(c_long(0x40000000 + 39)) > 0",
}
GROUPS = {"read": READING, "write": WRITING, "network": NETWORK, "privileges": PRIVILEGES}
ATTEMPTS = {f"{group}-{name}": code for group, codes in GROUPS.items() for name, code in codes.items()}

DRIVER = r"""
import ctypes, fcntl, glob, json, os, resource, shutil, signal, socket, stat, struct, subprocess, sys, time
from ctypes import c_long
given = json.load(sys.stdin)
globals().update(given["names"])
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
NAMESPACES = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]

def call(name, *arguments):
    whole = [c_long(one) if isinstance(one, int) else one for one in arguments]
    return libc.syscall(c_long(NUMBERS[name]), *whole)

def spawn(flags):
    pid = libc.syscall(c_long(CLONE), c_long(flags | 17), None, None, None, None)
    if pid == 0: os._exit(0)
    return pid > 0

def pids(): return [name for name in os.listdir("/proc") if name.isdigit()]

def link(path):
    try: return os.readlink(path)
    except OSError: return ""

def everything(kind):
    text = ""
    for pid in pids():
        try: text += open(f"/proc/{pid}/{kind}").read()
        except OSError: pass
    return text

def readable(path):
    try: return os.open(path, os.O_RDONLY | os.O_NONBLOCK) >= 0
    except OSError: return False

def put(path, data):
    return os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), data)

def rewritten(path):
    try: return put(path, open(path, "rb").read(4096) or b"0")
    except OSError: return False

def packages():
    return [at for to in ("", "/local", "/share") for at in glob.glob(f"/usr{to}/lib*/*/*-packages") + glob.glob(f"/usr{to}/python-wheels")]

results = {}
for name, code in given["attempts"].items():
    read, write = os.pipe()
    OWN = (read, write)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        began = time.monotonic()
        scope = dict(globals(), got=None)
        try:
            exec(code, scope)
            told = {"got": scope["got"] or None}
        except Exception as error:
            told = {"got": scope["got"] or None, "error": repr(error)}
        told["seconds"] = time.monotonic() - began
        os.write(write, json.dumps(told, default=repr).encode()[:60000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe: data = pipe.read()
    _, status = os.waitpid(child, 0)
    results[name] = json.loads(data) if data else {"got": None, "signal": os.WTERMSIG(status)}
print(json.dumps(results))
"""


@dataclass
class Outcome:
    """Outcome of all attempts of one user."""

    attempts: dict[str, dict[str, Any]]
    connections: int
    datagrams: int
    victim_alive: bool
    victim_nice: int
    marks: list[str]
    stdout: str


@functools.cache
def outcome(uid: int) -> Outcome:
    """Run all attempts in one sandbox, with listeners, files and a process on the host as targets."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="escape-"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)  # the sandbox's user on the host could read it
        (folder / "hidden.txt").write_text(SECRET)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        streams = [stack.enter_context(socket.socket()), stack.enter_context(socket.socket(socket.AF_UNIX))]
        streams.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
        streams[0].bind(("127.0.0.1", 0))
        streams[1].bind(f"\0{MARK}")
        streams[2].bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        datagrams = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))]
        datagrams[0].bind(f"\0d{MARK}")
        for listener in streams:
            listener.listen()
            listener.setblocking(False)
        datagrams[0].setblocking(False)
        socket.create_connection(streams[0].getsockname()).close()
        streams[0].accept()[0].close()  # so it can be reached, from here
        hidden = stack.enter_context(open(folder / "hidden.txt"))
        os.set_inheritable(hidden.fileno(), True)
        same = {"user": NOBODY if uid == 0 else uid, "group": NOBODY if uid == 0 else uid} if os.geteuid() == 0 else {}
        victim = subprocess.Popen(
            ["sleep", "300"], env={"ESPALIER": SECRET, "PATH": os.environ["PATH"]}, cwd="/", **same
        )
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        column = seccomp.MACHINES[platform.machine()][0]
        numbers = {name: two[column] for name, two in seccomp.REFUSED.items() if two[column] is not None}
        numbers |= {"capset": (126, 91)[column], "clone3": 435}
        names = {
            "ROOT": str(ROOT),
            "HIDDEN": str(folder / "hidden.txt"),
            "HIDDEN_FOLDER": str(folder),
            "SECRET": SECRET,
            "MARK": MARK,
            "VICTIM": victim.pid,
            "PORT": streams[0].getsockname()[1],
            "NUMBERS": numbers,
            "CLONE": seccomp.CLONE[column],
            "SOCKET": seccomp.RULES["socket"].numbers[column],
        }
        request = json.dumps({"names": names, "attempts": ATTEMPTS}).replace(SECRET, SECRET[:9] + "@" + SECRET[9:])
        driver = DRIVER.replace("json.load(sys.stdin)", "json.loads(sys.stdin.read().replace('@', ''))")
        os.environ["ESPALIER_SECRET"] = SECRET
        stack.callback(os.environ.pop, "ESPALIER_SECRET")
        limits = Limits(seconds=120, cpu_seconds=60, output_bytes=1_000_000)
        result = run_forked(lambda: Sandbox(limits).python(driver, stdin=request), uid)
        assert result.ok, result
        reached = 0
        for listener in streams:
            try:
                listener.accept()[0].close()
                reached += 1
            except BlockingIOError:
                pass
        received = 0
        with suppress(BlockingIOError):
            received = len(datagrams[0].recv(10))
        places = ["/", "/usr", "/usr/bin", "/usr/local/lib", "/etc", "/dev", "/home", folder, *sys.path]
        marks = [str(place) for place in places if os.path.exists(f"{place}/{MARK}")]
        process = psutil.Process(victim.pid)
        alive = process.status() == psutil.STATUS_SLEEPING
        return Outcome(json.loads(result.stdout), reached, received, alive, process.nice(), marks, result.stdout)


def run_together(runs: Mapping[str, Callable[[], T]], uid: int) -> dict[str, T]:
    """Return the results of sandboxes that run at once, in one child process of that user."""

    def work() -> dict[str, T]:
        with ThreadPoolExecutor(len(runs)) as pool:
            return dict(zip(runs, pool.map(lambda run: run(), runs.values()), strict=True))

    return run_forked(work, uid)


uids = pytest.mark.parametrize("uid", [0, USER], ids=["root", "user"])


@uids
def test_an_attempt_gets_nothing(uid: int, subtests: pytest.Subtests):
    broken = ("NameError", "AttributeError", "SyntaxError", "TypeError", "KeyError", "IndexError", "ArgumentError")
    attempts = outcome(uid).attempts
    assert attempts.keys() == ATTEMPTS.keys()
    for name, attempt in attempts.items():
        with subtests.test(name):
            assert attempt["got"] is None
            assert not attempt.get("error", "").startswith(broken), "the attempt itself is wrong"
            if name.endswith(("call_of_32_bits", "call_of_x32")) and platform.machine() == "x86_64":
                assert attempt["signal"] == signal.SIGSYS


@uids
def test_nothing_outside_has_changed(uid: int):
    observed = outcome(uid)
    assert (observed.connections, observed.datagrams, observed.marks) == (0, 0, [])
    assert (observed.victim_alive, observed.victim_nice) == (True, psutil.Process().nice())
    assert SECRET not in observed.stdout


slow_uids = pytest.mark.parametrize(
    "uid", [pytest.param(0, id="root"), pytest.param(USER, id="user", marks=pytest.mark.slow)]
)
"""Attempts that need a run each."""

SURVIVORS = {
    "child": "if os.fork() == 0: sleep()",
    "daemon": "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: sleep()\n os._exit(0)",
    "deaf_daemon": (
        "if os.fork() == 0:\n os.setsid(); [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15)]\n"
        " os.closerange(0, 100); sleep()"
    ),
    "adopted_by_a_subreaper": (
        "ctypes.CDLL(None).prctl(36, 1)\nfor _ in range(5):\n if os.fork() == 0:\n  os.setpgid(0, 0); sleep()"
    ),
    "stopped_child": "if os.fork() == 0:\n os.setsid(); signal.raise_signal(signal.SIGSTOP); sleep()",
    "end_of_everything": "if os.fork() == 0:\n os.setsid(); sleep()\nos.kill(-1, 9)",
    "end_of_the_first_process": (
        "for n in range(1, 32):\n try: os.kill(1, n)\n except OSError: pass\nif os.fork() == 0: sleep()"
    ),
}


@slow_uids
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "killed"])
def test_no_process_survives(ends: bool, uid: int, subtests: pytest.Subtests):
    sandbox = Sandbox(Limits(seconds=60 if ends else 2))
    marks = {name: f"{MARK}-{name}-{uid}-{ends}" for name in SURVIVORS}
    runs = {}
    for name, survivor in SURVIVORS.items():
        sleep = f"def sleep(): os.execv('/bin/sh', ['sh', '-c', 'sleep 300', '{marks[name]}'])"
        code = f"import ctypes, os, signal, sys, time\n{sleep}\n{survivor}\nprint('tried', flush=True)\ntime.sleep({0.1 if ends else 300})"
        runs[name] = functools.partial(sandbox.python, code)
    for name, result in run_together(runs, uid).items():
        mark = marks[name]
        with subtests.test(name):
            assert result.killed == ("" if ends else "time")
            assert result.stdout == "tried\n"
            deadline = time.monotonic() + 600
            while running(mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert running(mark) == []


EXHAUSTION = {
    # name: (code, limits, how it may end)
    "fork_bomb": ("while True:\n try: os.fork()\n except OSError: pass", {"seconds": 1, "processes": 16}, {"time"}),
    "many_short_processes": (
        "while True:\n if os.fork() == 0:\n  for _ in range(10**6): pass\n  os._exit(0)\n os.wait()",
        {"seconds": 1},
        {"time"},
    ),
    "handler_of_the_limit_of_cpu_time": (
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"seconds": 60, "cpu_seconds": 1},
        {-9, -24},
    ),
    "disk": (
        "try:\n for n in range(99): open(f'f{n}', 'wb').write(bytes(1 << 20))\nexcept OSError: pass\n"
        "size = sum(os.stat(n).st_blocks * 512 for n in os.listdir() if n[0] == 'f')\n"
        "sys.exit(6_000_000 < size <= 8 << 20 and 7)",
        {"disk_mb": 8, "seconds": 60},
        {7},
    ),
    "sparse_file": (
        "try: os.truncate(os.open('s', os.O_CREAT | os.O_RDWR), 1 << 40)\nexcept OSError: sys.exit(7)",
        {"seconds": 60},
        {7, -25},
    ),
    "files": (
        "n = 0\nwhile True: n += 1; os.symlink('x' * 4000, f'l{n}')",
        {"files": 500, "seconds": 60},
        {"files", 1},
    ),
    "folders": ("n = 0\nwhile True: n += 1; os.mkdir(f'd{n}')", {"files": 500, "seconds": 60}, {"files"}),
    "descriptors": (
        "held = []\ntry:\n while True: held.append(os.dup(0))\nexcept OSError: sys.exit(len(held) <= 128 and 7)",
        {"seconds": 60},
        {7},
    ),
    "output": ("while True: os.write(2, b'x' * 65536)", {"seconds": 60, "output_bytes": 1000}, {"output"}),
    "output_in_a_loop_of_children": (
        "while True:\n if os.fork() == 0:\n  os.write(1, b'x' * 60000); os._exit(0)\n os.wait()",
        {"seconds": 60, "output_bytes": 1000},
        {"output"},
    ),
    "closed_output": ("os.close(1), os.close(2)\ntime.sleep(100)", {"seconds": 0.7}, {"time"}),
}

SLOW_EXHAUSTION = {"handler_of_the_limit_of_cpu_time"}


@slow_uids
def test_resource_usage_is_bounded(uid: int, subtests: pytest.Subtests):
    _check_exhaustion(sorted(EXHAUSTION.keys() - SLOW_EXHAUSTION), uid, subtests)


@pytest.mark.slow
@uids
def test_processor_time_is_bounded_for_a_program_that_ignores_the_signal(uid: int, subtests: pytest.Subtests):
    _check_exhaustion(sorted(SLOW_EXHAUSTION), uid, subtests)


def _check_exhaustion(names: list[str], uid: int, subtests: pytest.Subtests) -> None:
    runs = {}
    for name in names:
        code, limits, _ = EXHAUSTION[name]
        runs[name] = functools.partial(Sandbox(Limits(**limits)).python, f"import os, signal, sys, time\n{code}")
    for name, result in run_together(runs, uid).items():
        with subtests.test(name):
            number = result.exit_code - 128 if result.exit_code > 128 else 0
            assert {result.killed, result.exit_code, -number} & EXHAUSTION[name][2], result
            assert result.seconds < 60
            assert len(result.stdout) + len(result.stderr) < 50_000


CALLS = {
    "endless_line": "while True: os.write(link, b'x' * 4096)",
    "many_lines": "while True: os.write(link, b'[]\\n')",
    "no_text": "os.write(link, bytes(range(256)).replace(b'\\n', b'') + b'\\n'); os.read(link, 9); os._exit(0)",
    "passed_files": (
        "import array, socket; s = socket.socket(fileno=link)\n"
        "for _ in range(20): s.sendmsg([b'x'], [(1, 1, array.array('i', [0, 1, 2]))])\n"
        "s.send(b'\\n'); s.recv(9); os._exit(0)"
    ),
    "closed": "os.close(link); time.sleep(0.2)",
}


@slow_uids
def test_calls_of_a_program_are_bounded(uid: int, subtests: pytest.Subtests):
    """The host sees at most `calls` lines of at most 100,000 bytes, and leaks no file descriptors."""
    for name, call in CALLS.items():
        with subtests.test(name):
            program = f"import os, time; link = int(os.environ['CALLS'])\n{call}"
            result, lines, descriptors = run_forked(functools.partial(_calling, program), uid)
            assert result.killed in ("", "calls")
            assert (len(lines) <= 4, max(map(len, lines), default=0) <= 100_000, descriptors) == (True, True, 0)


def _calling(program: str) -> tuple[ProgramResult, list[bytes], int]:
    """Return the result of a program, its calls, and the number of descriptors that it left open on the host."""
    lines: list[bytes] = []

    def answer(line: bytes) -> bytes:
        lines.append(line)
        return b"{}"

    before = len(os.listdir("/proc/self/fd"))
    result = Sandbox(Limits(seconds=30, calls=4)).python(program, answer=answer)
    return result, lines, len(os.listdir("/proc/self/fd")) - before


@uids
def test_system_wide_packages_are_hidden(uid: int, monkeypatch: pytest.MonkeyPatch):
    """Packages for the sandbox's own Python, and a checkout in a system folder that programs can read."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to install something system-wide")
    packages = next(Path(at) for at in ("/usr/local/lib", "/usr/lib") if list(Path(at).glob("python3*/*-packages")))
    package = next(packages.glob("python3*/*-packages")) / f"espalier_{os.getpid()}"
    checkout = Path(f"/usr/local/lib/{MARK}")
    try:
        for folder in (package, checkout / "components" / "sandbox"):
            folder.mkdir(parents=True)
            (folder / "watch.py").write_text(SECRET)
        monkeypatch.setattr(bubblewrap, "__file__", str(checkout / "components" / "sandbox" / "bubblewrap.py"))
        bubblewrap._hidden_packages.cache_clear()
        paths = [str(package / "watch.py"), str(checkout / "components" / "sandbox" / "watch.py")]
        code = f"import os; print([os.path.exists(path) for path in {paths!r}], os.listdir('/usr/local/lib'))"
        result = run_forked(lambda: Sandbox(Limits(seconds=60)).python(code), uid)
        assert result.stdout.startswith("[False, False]"), result
    finally:
        bubblewrap._hidden_packages.cache_clear()
        shutil.rmtree(package, ignore_errors=True)
        shutil.rmtree(checkout, ignore_errors=True)


@pytest.mark.skipif(platform.machine() not in seccomp.MACHINES, reason="no table of system calls")
def test_there_are_sixty_attempts():
    assert len(ATTEMPTS) + len(SURVIVORS) + len(EXHAUSTION) + len(CALLS) >= 60
