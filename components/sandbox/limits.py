"""What a program may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST = {
    "seconds": 0.1,
    "cpu_seconds": 1,
    "memory_mb": 32,
    "processes": 4,
    "disk_mb": 1,
    "files": 16,
    "output_bytes": 100,
    "calls": 1,
}


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    """Of time, with all that it starts."""
    cpu_seconds: int = 10
    """Of CPU time, for each process."""
    memory_mb: int = 512
    """Of memory, for all processes, the files in the home and the kernel's buffers for them together, and of addresses
    for each process."""
    processes: int = 32
    """And threads, at once."""
    disk_mb: int = 64
    """In its home, for all files together."""
    files: int = 4096
    """And folders in its home."""
    output_bytes: int = 20_000
    """Bytes that are kept of stdout, and of stderr; of more, the middle is cut."""
    calls: int = 32
    """That it may make to whoever runs it, where it is given a way (`components.sandbox.calls`)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= _LEAST[name]:
                raise ValueError(f"{name} is {value}; a program needs {_LEAST[name]} or more")


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    exit_code: int
    """As a shell says it: 128 + the signal where a signal ended it."""
    stdout: str
    stderr: str
    killed: str
    """Why it was killed: time, memory, files, output, calls or stopped; empty where it ended by itself."""
    truncated: bool
    """Whether output was cut."""
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.killed == "time"

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.killed
