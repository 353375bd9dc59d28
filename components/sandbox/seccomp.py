"""Filter of the system calls that sandboxed programs may not use.

Namespaces hide the host's files, processes and network; limits bound a program's usage. The filter closes what these
leave open:

- sockets other than unix sockets: AF_VSOCK reaches the hypervisor, and TCP buffers belong to no process's memory;
- kernel memory that no limit and no count covers: System V objects, memfd, anonymous shared mappings (their pages
  outlive the part of the mapping that shows them), larger buffers of pipes and sockets, epoll, inotify, splice;
- new namespaces, in which a program would be root; tracing of other processes;
- parts of the kernel that programs do not need and that had vulnerabilities.

A refused call fails with EPERM, a socket of another family with EAFNOSUPPORT. `clone3` fails with ENOSYS, because a
filter cannot see its flags: C libraries then fall back to `clone`. Calls newer than this table also fail with ENOSYS. A
call with another calling convention (32 bits, x32) kills the program, because its numbers mean other calls.

`semop`, `shmat` and similar calls need no rule: they work on objects of the IPC namespace, which is empty.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from components.errors import ResourceError

# name: (x86_64, aarch64)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "sendfile": (40, 71),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setns": (308, 268),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "splice": (275, 76),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
NEWEST = 462
"""Last number that both tables share (`mseal`, Linux 6.10)."""


@dataclass(frozen=True)
class Rule:
    """Allowed values of one argument of a call. The kernel takes these arguments as 32-bit integers, or tests bits of
    the lower half only, so the filter ignores the upper half as well."""

    numbers: tuple[int, int]
    """Number of the call on x86_64 and aarch64."""
    argument: int
    """Index of the argument, from 0."""
    allowed: tuple[int, ...] = ()
    """Only these values pass, if there are any."""
    refused: tuple[int, ...] = ()
    """All values except these pass."""
    mask: int = 0xFFFFFFFF
    """Mask of the compared bits."""
    error: int = errno.EPERM


_AF_UNIX = 1
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
NEW_NAMESPACES = 0x7E020000
"""Flags of `clone` that create namespaces."""

RULES = {
    "socket": Rule((41, 198), 0, allowed=(_AF_UNIX,), error=errno.EAFNOSUPPORT),
    "socketpair": Rule((53, 199), 0, allowed=(_AF_UNIX,), error=errno.EAFNOSUPPORT),
    # SO_REUSEADDR, BROADCAST, RCVBUF, KEEPALIVE, LINGER, REUSEPORT, PASSCRED and time limits; above all not SO_SNDBUF,
    # SO_ATTACH_FILTER
    "setsockopt": Rule((54, 208), 2, allowed=(2, 6, 8, 9, 13, 15, 16, 20, 21, 66, 67)),
    # F_DUPFD to F_GETSIG (with the locks that end when their process closes the file), F_SETOWN_EX, F_GETOWN_EX,
    # F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS; above all not F_SETPIPE_SZ, F_OFD_SETLK, F_NOTIFY
    "fcntl": Rule((72, 25), 1, allowed=(*range(12), 15, 16, 1030, 1032, 1033, 1034)),
    # Signal at the end of the parent, dumpable, name, seccomp (read), capabilities (read), timer slack, subreaper, no
    # new privileges, huge pages (read); above all not PR_FUTEX_HASH, PR_SET_SECCOMP, PR_SET_VMA, PR_SET_THP_DISABLE
    "prctl": Rule((157, 167), 0, allowed=(1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 42)),
    # MAP_SHARED or MAP_SHARED_VALIDATE with MAP_ANONYMOUS
    "mmap": Rule((9, 222), 3, refused=(0x21,), mask=0x21),
    # MADV_HUGEPAGE, MADV_COLLAPSE: one mapped page holds a huge page of 2 MB
    "madvise": Rule((28, 233), 2, refused=(14, 25)),
    # CLOSE_RANGE_UNSHARE: a table of open files for each thread
    "close_range": Rule((436, 436), 2, refused=(2,), mask=2),
    # TIOCSTI, TIOCLINUX
    "ioctl": Rule((16, 29), 1, refused=(0x5412, 0x541C)),
}
"""Calls with some arguments refused. `clone` has two conditions and is handled in `program`."""

CLONE = (56, 220)
CLONE3 = (435, 435)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and the kernel's number of the architecture."""

# Offsets in the kernel's `struct seccomp_data`; for an argument, of its lower half on a little-endian machine.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
# Instructions of classic BPF.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Line = tuple[int, int, int, int]
"""Instruction, lines to skip if it holds, lines to skip if not, operand."""


def program(machine: str | None = None) -> bytes:
    """Return the filter in the kernel's format. machine: as in `uname -m`; default: this machine."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ResourceError(f"the sandbox does not support {machine}; expected {' or '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    lines += [(_AT_LEAST, 0, 1, NEWEST + 1), _fail(errno.ENOSYS)]
    lines += [(_EQUAL, 0, 1, CLONE3[column]), _fail(errno.ENOSYS)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), _fail(errno.EPERM)]
    for rule in RULES.values():
        lines += _call(rule.numbers[column], _checked(rule))
    # Either a thread that shares the open files of its process, or a process with open files of its own: their memory
    # is counted per process.
    tables = Rule(CLONE, 0, refused=(_CLONE_FILES, _CLONE_THREAD), mask=_CLONE_FILES | _CLONE_THREAD)
    namespaces: list[Line] = [(_LOAD, 0, 0, _ARGUMENTS), (_ANY_BIT, 0, 1, NEW_NAMESPACES), _fail(errno.EPERM)]
    lines += _call(CLONE[column], [*namespaces, *_checked(tables)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _call(number: int, body: Iterable[Line]) -> list[Line]:
    """Return the lines that decide about one call."""
    body = list(body)
    return [(_EQUAL, 0, len(body), number), *body]


def _checked(rule: Rule) -> list[Line]:
    """Return the lines that load an argument and return a decision."""
    verdict = _ALLOW if rule.allowed else _FAIL | rule.error
    lines: list[Line] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)]
    if rule.mask != 0xFFFFFFFF:
        lines.append((_AND, 0, 0, rule.mask))
    for value in rule.allowed or rule.refused:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, verdict)]
    return [*lines, _fail(rule.error) if rule.allowed else (_RETURN, 0, 0, _ALLOW)]


def _fail(error: int) -> Line:
    return _RETURN, 0, 0, _FAIL | error
