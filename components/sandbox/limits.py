"""Resource limits of a sandboxed program, and its result."""

from __future__ import annotations

from dataclasses import dataclass

_MINIMUM = {
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
    """Resource limits of a program."""

    seconds: float = 10.0
    """Wall-clock seconds of the program and all its subprocesses."""
    cpu_seconds: int = 10
    """CPU seconds of each process."""
    memory_mb: int = 512
    """Memory in MB: of all processes, the files in the home folder and the kernel's buffers together, and the address
    space of each process."""
    processes: int = 32
    """Concurrent processes and threads."""
    disk_mb: int = 64
    """Size in MB of all files in the home folder."""
    files: int = 4096
    """Number of files and folders in the home folder."""
    output_bytes: int = 20_000
    """Bytes of stdout, and of stderr, that are returned; longer output is cut in the middle."""
    calls: int = 32
    """Calls that the program may make to its host, if calls are enabled (`components.sandbox.calls`)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= _MINIMUM[name]:
                raise ValueError(f"{name} = {value}: expected at least {_MINIMUM[name]}")


@dataclass(frozen=True)
class ProgramResult:
    """Outcome of a program."""

    exit_code: int
    """Exit code as in a shell: 128 + the signal if a signal ended the program."""
    stdout: str
    stderr: str
    killed: str
    """Reason for killing it: time, memory, files, output, calls or stopped; empty if it ended by itself."""
    truncated: bool
    """True if output was cut."""
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.killed == "time"

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.killed
