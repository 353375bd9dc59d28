"""The first error of a vLLM server's log, with its remedy.

A server runs in several processes, each of which logs its own traceback when another one fails: the last lines of the
log only say that "engine core initialization failed". The cause is the first traceback of the process that failed,
which stands above. Lines have the prefix `(PROCESS pid=N) LEVEL DATE TIME [FILE:LINE]`, parts of which are missing in
output that is not logged; lines of several workers alternate.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LAST_LINES = 12
"""Number of log lines that are shown if there is no traceback."""
LONGEST = 300
"""Maximum number of characters that are shown of a line."""
_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
_ENGINE = re.compile(r"\((EngineCore|Worker)")
"""Processes that load the model; the API server only waits for them."""
_REFUSED_OPTION = re.compile(r"^\S+: error: (.*)")
"""Message of the argument parser."""
REMEDIES = (
    (
        r"assert \w+\.dtype in \[torch\.float16, torch\.bfloat16\]",
        "vLLM computes LoRA adapters on a GPU in 16 bits only: set model.dtype=bfloat16",
    ),
    (
        r"less than desired GPU memory utilization|No available memory for the cache|out of memory|OutOfMemory",
        "other processes, such as the trainer, use the memory of the GPU: lower inference.gpu_memory if too little is "
        "free, raise it if the cache has no room; see nvidia-smi",
    ),
    (
        r"larger than the available KV cache",
        "one sequence of model.max_length tokens does not fit: lower model.max_length, or raise inference.gpu_memory",
    ),
    (
        r"must be divisible by tensor parallel size|is not divisible by",
        "set +inference.arguments.tensor-parallel-size to a divisor of the model's attention heads",
    ),
    (
        r"ompute capability",
        "the GPU is older than the number format: set model.dtype=float16, or float32 with inference=embedded",
    ),
    (r"driver (on your system )?is too old|driver version is insufficient", "update the NVIDIA driver"),
    (
        r"Failed to infer device type|No CUDA GPUs are available|no NVIDIA driver",
        "vLLM sees no GPU: check CUDA_VISIBLE_DEVICES and nvidia-smi, or install the CPU build (make vllm)",
    ),
    (
        r"ax_model_len|derived max",
        "the model has fewer positions than model.max_length: lower model.max_length",
    ),
    (
        r"failed to be inspected|are not supported|no vLLM implementation",
        "this version of vLLM does not run the model: set inference=embedded",
    ),
    (r"C compiler|gcc|Python\.h", "Triton compiles kernels: install gcc and the headers of this Python"),
    (r"No module named", "vLLM's environment is incomplete: `make vllm` creates it again"),
    (
        r"unrecognized arguments|invalid choice|expected one argument",
        "this version of vLLM does not have the option: correct inference.arguments",
    ),
)
"""Patterns of known causes, and what to do."""


class _Line(NamedTuple):
    process: str
    """Prefix of the process, such as `(EngineCore pid=7) `; empty without one."""
    text: str


def explain(log: str) -> str:
    """Return the first error of a log, with the file that raised it and a remedy if the cause is known; its last lines
    if it has no traceback."""
    lines = [_parsed(line) for line in log.splitlines() if line.strip()]
    error = _first_traceback(lines) or _refused_option(lines)
    if error is None:
        shown = [f"  {line.process}{line.text}"[: LONGEST + 2] for line in lines[-LAST_LINES:]]
        return "\n".join(["Its last lines:", *(shown or ["  (nothing)"])])
    remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, error)), None)
    return f"Its first error: {error}" + (f"\nRemedy: {remedy}" if remedy else "")


def _parsed(line: str) -> _Line:
    line = _COLOR.sub("", line).rstrip()
    prefix = _PREFIX.match(line)
    assert prefix is not None  # all its parts are optional
    return _Line(prefix[1] or "", line[prefix.end() :])


def _first_traceback(lines: list[_Line]) -> str | None:
    """Return the exception and the file of the first traceback: of an engine or a worker if one of them has any."""
    starts = [number for number, line in enumerate(lines) if line.text.strip() == _TRACEBACK]
    if not starts:
        return None
    start = next((number for number in starts if _ENGINE.match(lines[number].process)), starts[0])
    process, depth = lines[start].process, len(lines[start].text) - len(lines[start].text.lstrip())
    frames: list[str] = []
    message: list[str] = []
    for line in lines[start + 1 :]:
        if line.process != process:
            continue
        text = line.text[depth:]
        indented = text.startswith(" ")
        if not message and indented:
            frames.append(text.strip())
        elif (message and not indented) or text.strip() == _TRACEBACK or len(message) == 3:
            break
        else:
            message.append(text.strip())
    if not message:
        return None
    place = next((frame for frame in reversed(frames) if frame.startswith("File ")), "")
    source = [frame for frame in frames[-2:] if frame.startswith("assert ")] if ": " not in message[0] else []
    return "\n  ".join(part[:LONGEST] for part in [*message, *source, place] if part)


def _refused_option(lines: list[_Line]) -> str | None:
    """Return the message of the argument parser."""
    return next((matched[1] for line in lines if (matched := _REFUSED_OPTION.match(line.text))), None)
