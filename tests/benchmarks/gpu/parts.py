"""Parts of the benchmark, each a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CODE = Path(__file__).resolve().parents[3]
LAST_LINES = 3
SOFT = 0.75
"""Share of a part's time after which it takes no further repetition."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TQDM_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Part:
    """A part and its time limit."""

    name: str
    seconds: float
    """Time limit on a GPU, in seconds. Time that a part does not use is left to those after it."""


PARTS = (
    Part("model", 60),
    Part("train_b", 110),
    Part("exact", 70),
    Part("train_c", 60),
    Part("train_a", 60),
    Part("train_d", 60),
    Part("generate", 120),
    Part("overlap", 90),
)
"""In the order in which they run: what matters most comes first."""


def run_part(part: Part, settings: dict[str, Any], folder: Path, limit: float) -> dict[str, Any]:
    """Run a part in a process of its own for at most `limit` seconds. Return its status, seconds and result, which is
    what it reported before its end."""
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    request = folder / f"{part.name}.request"
    request.write_text(json.dumps({**settings, "part": part.name, "out": str(out), "seconds": limit * SOFT}))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    began = time.monotonic()
    with open(log, "wb") as output:
        code = _run([sys.executable, "-m", "tests.benchmarks.gpu.part", str(request)], output, caches, limit)
    result = json.loads(out.read_text()) if out.is_file() else {}
    if code is None:
        status = f"incomplete: the time limit of {limit:.0f} s was reached"
    elif code:
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        status = f"failed ({cause}): {last_lines(log)}"
    else:
        status = "complete"
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "result": result}


def _run(command: list[str], output: IO[bytes], caches: dict[str, str], limit: float) -> int | None:
    """Return the exit code of a command; None if it was stopped after the time limit."""
    environment = {**os.environ, **OFFLINE, **caches}
    with _session(command, output, environment) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def _session(command: list[str], output: IO[bytes], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, and end all of the session at the end of the context."""
    process = subprocess.Popen(
        command, cwd=CODE, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path) -> str:
    """Return the last lines of a log, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(line[:300] for line in lines[-LAST_LINES:])
