"""Seccomp filter, run by an interpreter of classic BPF: both architectures are tested on either."""

from __future__ import annotations

import errno
import struct

import pytest

from components.sandbox import seccomp

pytestmark = pytest.mark.security

ALLOWED, KILLED = "allowed", "killed"


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str | int:
    """Return the filter's decision about a call: allowed, killed, or the error."""
    data = struct.pack("<iIQ", number, seccomp.MACHINES[machine][1] if architecture is None else architecture, 0)
    data += b"".join(struct.pack("<Q", value) for value in (*arguments, *[0] * (6 - len(arguments))))
    lines = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at, accumulator = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            if operand == 0x7FFF0000:
                return ALLOWED
            return KILLED if operand == 0x80000000 else operand & 0xFFFF
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: accumulator & operand != 0,
            }[code]
            at += yes if holds else no


@pytest.fixture(params=list(seccomp.MACHINES))
def machine(request) -> str:
    return request.param


def argument(machine: str, name: str, value: int) -> str | int:
    rule = seccomp.RULES[name]
    arguments = [0] * rule.argument + [value]
    return decide(machine, rule.numbers[seccomp.MACHINES[machine][0]], *arguments)


def test_unix_is_the_only_family_of_sockets(machine: str, subtests: pytest.Subtests):
    """The kernel reads 32 bits of the family, and so does the filter: upper bits do not change the family."""
    for upper in [0, 1 << 32, 0xFFFFFFFF << 32]:
        for name in ["socket", "socketpair"]:
            with subtests.test(name, upper=upper):
                decisions = {family: argument(machine, name, upper | family) for family in (*range(256), 0xFFFFFFFF)}
                assert [family for family, decision in decisions.items() if decision == ALLOWED] == [1]
                assert set(decisions.values()) == {ALLOWED, errno.EAFNOSUPPORT}


def test_arguments_are_checked_against_lists(machine: str, subtests: pytest.Subtests):
    for name, allowed, refused in [
        ("setsockopt", [2, 16, 20], [7, 26, 32, 50, 51]),
        ("fcntl", [0, 1, 2, 3, 4, 6, 7, 1030, 1032], [37, 38, 1024, 1026, 1031]),
        ("prctl", [1, 4, 15, 38], [22, 35, 41, 47, 78, 0x53564D41]),
        ("mmap", [0x22, 0x01, 0x02, 0x20022], [0x21, 0x23, 0x40021, 0x8021]),
        ("madvise", [4, 8], [14, 25]),
        ("close_range", [0, 4], [2, 6]),
        ("ioctl", [0x5401, 0x541B], [0x5412, 0x541C]),
    ]:
        with subtests.test(name):
            assert [argument(machine, name, value) for value in allowed] == [ALLOWED] * len(allowed)
            for upper in (0, 1 << 32):
                assert [argument(machine, name, upper | value) for value in refused] == [errno.EPERM] * len(refused)


def test_calls_are_refused_by_number(machine: str):
    column = seccomp.MACHINES[machine][0]
    for numbers in seccomp.REFUSED.values():
        if numbers[column] is not None:
            assert decide(machine, numbers[column]) == errno.EPERM
    assert decide(machine, seccomp.CLONE3[column]) == errno.ENOSYS
    assert decide(machine, seccomp.NEWEST) == ALLOWED
    for newer in (463, 467, 1000, 0x3FFFFFFF):
        assert decide(machine, newer) == errno.ENOSYS
    assert decide(machine, (0, 63)[column]) == ALLOWED  # read
    assert decide("x86_64", 0x40000000 + 41) == KILLED
    assert decide(machine, 1, architecture=0x40000003) == KILLED


def test_a_new_process_or_thread_is_an_ordinary_one(machine: str):
    number = seccomp.CLONE[seccomp.MACHINES[machine][0]]
    assert decide(machine, number, 17) == ALLOWED  # fork
    assert decide(machine, number, 0x4111) == ALLOWED  # posix_spawn
    assert decide(machine, number, 0x3D0F00) == ALLOWED  # pthread_create
    assert decide(machine, number, 17 | 0x400) == errno.EPERM  # a process that shares open files
    assert decide(machine, number, 0x3D0F00 & ~0x400) == errno.EPERM  # a thread that does not
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, number, 17 | bit) == errno.EPERM
