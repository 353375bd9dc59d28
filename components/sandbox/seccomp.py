"""The system calls that sandboxed programs are refused, as a filter for the kernel.

Namespaces hide the host's files, processes and network; limits bound what a program uses. The filter closes what
these leave open: memory that no limit counts (System V shared memory, memfd), new namespaces inside of which a program
would be root, tracing of other processes, and parts of the kernel that no puzzle needs and that had holes before.

A refused call fails with EPERM. `clone3` fails with ENOSYS, because a filter cannot see its flags: C libraries then
use `clone`. A call by another calling convention (32 bits, x32) kills the program, as its numbers mean other calls.
"""

from __future__ import annotations

import errno
import platform
import struct

from components.errors import ResourceError

# name: (x86_64, aarch64)
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that make namespaces."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and the kernel's number of the architecture."""

# Offsets in the kernel's `struct seccomp_data`.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
# Instructions of classic BPF.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def program(machine: str | None = None) -> bytes:
    """The filter, in the form in which the kernel takes it. machine: as `uname -m` says; of this one by default."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ResourceError(f"the sandbox knows no system calls of {machine}; it runs on {' and '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    refused = _RETURN, 0, 0, _FAIL | errno.EPERM
    missing = _RETURN, 0, 0, _FAIL | errno.ENOSYS
    # (instruction, lines to skip where it holds, lines to skip where not, operand)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    lines += [(_EQUAL, 0, 1, CLONE3[column]), missing]
    for numbers in REFUSED.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), refused]
    lines += [
        (_EQUAL, 0, 3, CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        refused,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
