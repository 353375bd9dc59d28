"""Parse command lines of vLLM's server, in vLLM's environment: a JSON list of them on standard input, a JSON list of
answers on standard output. Without a GPU, vLLM takes the machine for a CPU; no weights are read."""

import io
import json
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout

import vllm.platforms

if not vllm.platforms.current_platform.device_type:  # a build for GPUs on a machine without one
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
logging.disable(logging.CRITICAL)

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

try:  # since 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args


def answer(parser, options):
    """The engine's configuration, or the error."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            given = parser.parse_args(options)
        validate_parsed_serve_args(given)
        engine = AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except SystemExit:
        return {"error": said.getvalue()[-500:]}
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}
    lora = engine.lora_config
    return {
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "max_length": engine.model_config.max_model_len,
        "logprobs": engine.model_config.logprobs_mode,
        "rank": lora and lora.max_lora_rank,
        "ranks": engine.parallel_config.tensor_parallel_size,
    }


answers = sys.stdout
with redirect_stdout(sys.stderr):
    parser = make_arg_parser(FlexibleArgumentParser())
    results = [answer(parser, options) for options in json.load(sys.stdin)]
json.dump(results, answers)
