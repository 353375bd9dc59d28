"""The message of a vLLM server that dies at its start, on logs in the formats of vLLM 0.26 and 0.32: the processes
write into one file, records have a prefix on each line (`NewLineFormatter`), and other output has that of the process
(0.26, `decorate_logs`) or none (0.32)."""

from __future__ import annotations

import pytest

from components.inference.vllm.start_errors import explain

HALF = """Traceback (most recent call last):
  File "/v/vllm/v1/engine/core.py", line 1080, in run_engine_core
    engine_core = EngineCoreProc(*args, **kwargs)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/v/vllm/lora/ops/triton_ops/lora_shrink_op.py", line 179, in _lora_shrink
    assert weight.dtype in [torch.float16, torch.bfloat16]
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError"""
WAITING = """Traceback (most recent call last):
  File "/v/vllm/entrypoints/openai/api_server.py", line 801, in <module>
    uvloop.run(run_server(args))
  File "/v/vllm/v1/engine/utils.py", line 1272, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"""
MEMORY = """Traceback (most recent call last):
  File "/v/vllm/v1/worker/utils.py", line 436, in request_memory
    raise ValueError(
ValueError: Free memory on device cuda:0 (9.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.5, \
39.5 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."""
CHAINED = """Traceback (most recent call last):
  File "/v/torch/cuda/__init__.py", line 414, in _lazy_init
    torch._C._cuda_init()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/v/vllm/v1/worker/gpu_worker.py", line 90, in clean
    del model
RuntimeError: nothing to clean"""
HEADS = """Traceback (most recent call last):
  File "/v/vllm/entrypoints/openai/api_server.py", line 801, in <module>
    uvloop.run(run_server(args))
  File "/v/pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2). [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""


def logged(process: str, text: str) -> str:
    """A record of vLLM's logger: the prefix on each line."""
    prefix = f"({process}) ERROR 11-27 22:57:49 [core.py:1330] "
    return "".join(f"{prefix}{line}\r\n" for line in text.splitlines())


def written(process: str, text: str) -> str:
    """Output of another source in version 0.26: the prefix of the process."""
    return "".join(f"({process}) {line}\n" for line in text.splitlines())


def alternating(*texts: str) -> str:
    """Lines of several processes in turn."""
    return "".join("".join(lines) for lines in zip(*(text.splitlines(keepends=True) for text in texts), strict=True))


START = "(APIServer pid=4) INFO 11-27 22:57:40 [api_server.py:580] vLLM API server version 0.26.0\n"
ENGINE, WORKER = "EngineCore pid=7", "Worker_TP{} pid={}"
LOGS = {
    "assertion, 0.26": (
        START + logged(ENGINE, f"EngineCore failed to start.\n{HALF}") + written(ENGINE, HALF)
        + written("APIServer pid=4", WAITING),
        ["AssertionError\n  assert weight.dtype in", 'File "/v/vllm/lora/ops/triton_ops/lora_shrink_op.py", line 179',
         "Remedy: vLLM computes LoRA adapters on a GPU in 16 bits only: set model.dtype=bfloat16"],
    ),
    "assertion, 0.32": (
        START + logged(ENGINE, f"EngineCore failed to start.\n{HALF}") + HALF + "\n" + WAITING + "\n",
        ["AssertionError\n  assert weight.dtype in", "model.dtype=bfloat16"],
    ),
    "memory": (
        START + logged(ENGINE, MEMORY) + WAITING, ["ValueError: Free memory on device cuda:0 (9.1/79.1 GiB)",
        "/v/vllm/v1/worker/utils.py", "Remedy: other processes, such as the trainer, use the memory"],
    ),
    "workers alternate": (
        START + alternating(*(logged(WORKER.format(rank, rank + 8), HALF) for rank in (0, 1))) + WAITING,
        ["AssertionError\n  assert weight.dtype in", "lora_shrink_op.py"],
    ),
    "the first of a chain": (START + logged(ENGINE, CHAINED) + WAITING, ["torch.OutOfMemoryError", "_lazy_init"]),
    "the engine's, although the server's stands above": (
        written("APIServer pid=4", WAITING) + logged(ENGINE, MEMORY), ["ValueError: Free memory"],
    ),
    "the server's alone, with the lines of its message": (
        START + written("APIServer pid=4", HEADS),
        ["ValidationError: 1 validation error", "(9) must be divisible by tensor parallel size (2)",
         "a divisor of the model's attention heads"],
    ),
    "colours": (
        f"\x1b[0;36m({ENGINE})\x1b[0;0m ERROR 11-27 22:57:49 [core.py:1330] Traceback (most recent call last):\n"
        f"\x1b[0;36m({ENGINE})\x1b[0;0m ERROR 11-27 22:57:49 [core.py:1330]   File \"a.py\", line 1, in b\n"
        f"\x1b[0;36m({ENGINE})\x1b[0;0m ERROR 11-27 22:57:49 [core.py:1330] OSError: no space",
        ["OSError: no space\n  File \"a.py\""],
    ),
    "an option": (
        "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --tensor-paralel 2\n",
        ["Its first error: unrecognized arguments: --tensor-paralel 2", "correct inference.arguments"],
    ),
    "no traceback": (
        "".join(f"line {number}\n" for number in range(20)), ["Its last lines:\n  line 8\n", "line 19"],
    ),
    "killed inside a traceback": (f"{START}Traceback (most recent call last):\n  File \"a\"", ["Its last lines:"]),
    "nothing": ("", ["(nothing)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS)
def test_the_first_error_of_a_log_is_shown_with_its_file_and_its_remedy(case):
    log, parts = LOGS[case]
    explanation = explain(log)
    assert [part for part in parts if part not in explanation] == [], explanation
    assert "Engine core initialization failed" not in explanation
