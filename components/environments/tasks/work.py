"""Commands on a working folder in the sandbox.

No process and no folder stays on this machine between two commands: each run unpacks an archive in a sandbox of its
own, runs the command there, kills what it left running, and returns the files as an archive. Archives of an agent come
from programs that are not trusted, so they are unpacked in sandboxes only.

The paths of a task are links to the sandbox's home: its working folder, `/tests`, `/logs` and `/solution`. No other
path can be written. Tests run in a sandbox of their own, with a copy of the working folder and nothing else of the
agent's.
"""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.environments.tasks.folder import WORK, FolderTask
from components.sandbox import Limits, Sandbox

# Runs in the sandbox only; here it is text.
_DRIVER = r"""
import base64, io, json, os, signal, subprocess, sys, tarfile, time
request = json.load(sys.stdin)
link, home = int(os.environ.pop("CALLS")), os.getcwd()

def unpack(data, tops=None):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as tar:
        tar.extraction_filter = lambda member, path: member
        tar.extractall(home, [member for member in tar if not tops or member.name.split("/")[0] in tops])

def send(line):
    line += b"\n"
    while line:
        line = line[os.write(link, line):]
    while not os.read(link, 4096).endswith(b"\n"):
        pass

if request["tests"] is None:
    unpack(request["files"])
else:
    unpack(request["files"], ["work"])
    others = set(os.listdir(home)) - {"work", ".main.py"}  # a link in the folder may have led to them
    subprocess.run(["rm", "-rf", "--", *others], check=True)
    unpack(request["tests"])
for name in ("work", "tmp", "tests", "solution", "logs/agent", "logs/artifacts", "logs/verifier", ".bin"):
    os.makedirs(name, exist_ok=True)
for name in ("python", "python3"):
    if not os.path.lexists(f".bin/{name}"):
        os.symlink(sys.executable, f".bin/{name}")
path = f"{home}/.bin:{os.environ['PATH']}"
variables = {**os.environ, "PATH": path, **request["variables"], "PWD": request["at"]}
began = time.monotonic()
process = subprocess.Popen(
    request["command"], cwd=request["at"], env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
)
try:
    code = process.wait(request["seconds"])
except subprocess.TimeoutExpired:
    code = None
seconds = time.monotonic() - began
try:
    os.kill(-1, signal.SIGKILL)  # all but this process
except ProcessLookupError:
    pass
reward, packed = None, io.BytesIO()
if request["tests"] is None:
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name in sorted(set(os.listdir(home)) - {".main.py", ".bin"}):
            tar.add(name)
else:
    for name in ("reward.txt", "reward.json"):
        if os.path.isfile(f"logs/verifier/{name}"):
            with open(f"logs/verifier/{name}", errors="replace") as file:
                reward = [name, file.read(20_000)]
data = base64.b64encode(packed.getvalue())
chunks = [data[at : at + 96_000] for at in range(0, len(data), 96_000)]
send(json.dumps({"code": code, "seconds": seconds, "reward": reward, "chunks": len(chunks)}).encode())
for chunk in chunks:
    send(chunk)
os._exit(0)
"""
_FOLDERS = ("tests", "solution", "logs")
"""Folders at the top, besides the working folder."""
_MOST_LINES = 350
"""Maximum number of lines from the driver: 25 MB of compressed files."""
_OVERHEAD = 30.0
"""Seconds for packing and unpacking, on a busy machine."""
_WHY = {
    "time": "it took longer than {seconds:g} s",
    "memory": "it used more than {memory} MB of memory",
    "files": "it left too many files",
    "output": "it printed without end",
    "calls": "it left too many bytes of files",
    "stopped": "the episode was stopped",
}


@dataclass(frozen=True)
class Command:
    """Result of a command."""

    output: str
    code: int
    """Exit code; -1 if the command was ended."""
    ended: str = ""
    """Reason why it was ended; empty if it ended by itself."""
    files: bytes | None = None
    """Archive of the files after a command; None if they are lost with it."""
    reward: tuple[str, str] | None = None
    """Name and text of the file with the reward, after tests."""
    seconds: float = 0.0


class WorkSandbox:
    """Runner of the commands of a task. memory_mb, disk_mb: limits where the task states none. output: maximum number
    of shown bytes."""

    def __init__(self, task: FolderTask, *, memory_mb: int, disk_mb: int, output: int):
        self._task = task
        self._memory = int(task.settings["environment.memory_mb"] or memory_mb)
        self.disk_mb = min(int(task.settings["environment.storage_mb"] or disk_mb), self._memory)
        self._output = output

    def run(self, files: bytes, command: Sequence[str], seconds: float, stop: threading.Event | None = None) -> Command:
        """Run a command of the agent on the archive of all its files."""
        return self._run(files, None, command, self._task.variables, seconds, stop)

    def test(self, files: bytes, stop: threading.Event | None = None) -> Command:
        """Run the tests on a copy of the working folder in an archive."""
        settings = self._task.settings
        variables = {**self._task.variables, **settings["verifier.env"]}
        command, seconds = ["bash", "-c", "/tests/test.sh"], settings["verifier.timeout_sec"]
        return self._run(files, self._task.tests, command, variables, seconds, stop)

    def _run(
        self,
        files: bytes,
        tests: bytes | None,
        command: Sequence[str],
        variables: Mapping[str, str],
        seconds: float,
        stop: threading.Event | None,
    ) -> Command:
        limits = Limits(
            seconds=seconds + _OVERHEAD,
            cpu_seconds=math.ceil(seconds + _OVERHEAD),
            memory_mb=self._memory,
            disk_mb=self.disk_mb,
            processes=64,
            output_bytes=self._output,
            calls=_MOST_LINES,
        )
        request = {
            "files": base64.b64encode(files).decode(),
            "tests": None if tests is None else base64.b64encode(tests).decode(),
            "command": list(command),
            "variables": dict(variables),
            "at": self._task.workdir,
            "seconds": seconds,
        }
        lines: list[bytes] = []

        def answer(line: bytes) -> bytes:
            lines.append(line)
            return b""

        sandbox = Sandbox(limits, {self._task.workdir: WORK, **{f"/{name}": name for name in _FOLDERS}})
        result = sandbox.python(_DRIVER, stdin=json.dumps(request), stop=stop, answer=answer)
        report = json.loads(lines[0]) if lines else {}
        if result.killed or len(lines) != 1 + report.get("chunks", 0):
            reason = _WHY[result.killed] if result.killed else "its files cannot be read, or are too large"
            ended = reason.format(seconds=seconds, memory=self._memory)
            return Command(
                result.stdout + result.stderr, -1, f"{ended}; its changes of files are lost", seconds=result.seconds
            )
        code = report["code"]
        return Command(
            output=result.stdout,
            code=-1 if code is None else code,
            ended=_WHY["time"].format(seconds=seconds) if code is None else "",
            files=base64.b64decode(b"".join(lines[1:])) if tests is None else None,
            reward=tuple(report["reward"]) if report["reward"] else None,
            seconds=report["seconds"],
        )
