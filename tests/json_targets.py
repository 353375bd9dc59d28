"""Functions that `test_json_process.py` calls in child processes."""

import asyncio
import fcntl
import os
import resource
import stat
import subprocess
import sys
import time


def echo(**arguments):
    print("this is no response")
    return arguments


def fail(text):
    raise ValueError(text)


def die(code):
    print("the last words", file=sys.stderr, flush=True)
    os._exit(code)


def intrude(line):
    """Write a line to the response pipe, without a response."""
    pipes = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_writable_pipe(fd)]
    for fd in pipes:
        os.write(fd, line.encode() + b"\n")
    time.sleep(3600)


def _is_writable_pipe(fd):
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_WRONLY
    except OSError:  # the listing's own descriptor
        return False


def allocate(megabytes):
    return len(bytearray(megabytes << 20))


def limit(name):
    return resource.getrlimit(getattr(resource, name))


def unserializable():
    return {1, 2}


def hang(seconds=3600.0):
    time.sleep(seconds)


class Leader:
    """Target that starts a process and leaves it running."""

    def __init__(self):
        self.member = subprocess.Popen(["sleep", "3600"])

    def __call__(self, code):
        if code:
            os._exit(code)
        return self.member.pid


class Meeting:
    """Async target: each call waits for the next one."""

    def __init__(self):
        self.names = []
        self.full = asyncio.Event()

    async def __call__(self, name, path=""):
        self.names.append(name)
        self.path = path or getattr(self, "path", "")
        if len(self.names) == 3:
            self.full.set()
        await self.full.wait()
        return self.names

    async def close(self):
        with open(self.path, "w") as file:
            file.write("closed")
