"""SkyServe: the service file for replicas of an exported model on clouds.

    python -m components.deployment.sky_serve MODEL --name NAME [--engine vllm] [--accelerators L4:1] > serve.yaml
    sky serve up serve.yaml

MODEL is the location of the merged export: a bucket (`s3://…`, `gs://…`), or a repository of the Hugging Face Hub
(`owner/name`). The output is first validated by SkyPilot's own parser, without contacting a cloud. Replicas listen on
all addresses, so they need a key, which clients send as `Authorization: Bearer KEY`; the readiness probe requests
`/health`, which needs none. Secrets are never written: `--secret ESPALIER_SERVER_KEY` of `sky serve up` passes the key,
and `--secret HF_TOKEN` a token of the Hub. `sky serve update` replaces a running version replica by replica, and keeps
the old replicas if the new ones do not become ready.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from components.deployment.vllm_parsers import PYTHONIC, REASONING, TOOL_CALLS
from components.errors import EspalierError, Problem, SpecError
from components.specs.served import SERVER_KEY_VARIABLE

PORT = 8000
Kind = Literal["transformers", "vllm"]
BUCKET = re.compile(r"(s3|gs|r2|cos|oci|https)://\S+")
VLLM_FLAGS = ("dtype", "tool-call-parser", "reasoning-parser")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def service(
    model: str,
    name: str,
    *,
    engine: Kind,
    accelerators: str | None,
    replicas: int,
    max_length: int,
    vllm: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the task with its service. vllm: flags of its server. Raise SpecError for invalid arguments."""
    problems = []
    if not BUCKET.fullmatch(model) and not REPOSITORY.fullmatch(model):
        text = f"{model!r}: expected a bucket (s3://BUCKET/PATH) or a repository of the Hugging Face Hub (owner/name)"
        problems.append(Problem("MODEL", text))
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        problems.append(Problem("--name", f"{name!r}: expected lower-case letters, digits and dashes"))
    if replicas < 1:
        problems.append(Problem("--replicas", f"{replicas}: expected 1 or more"))
    if problems:
        raise SpecError(problems)
    in_bucket = BUCKET.fullmatch(model) is not None
    model_path = "/model" if in_bucket else shlex.quote(model)
    resources: dict[str, Any] = {"ports": PORT}
    if accelerators:
        resources["accelerators"] = accelerators
    if engine == "vllm":
        setup = "uv venv --python 3.11 ~/vllm && uv pip install --python ~/vllm/bin/python vllm"
        run = (
            f'VLLM_API_KEY="${{{SERVER_KEY_VARIABLE}:?pass --secret {SERVER_KEY_VARIABLE}}}" '
            f"~/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model_path} --served-model-name {name} "
            f"--host 0.0.0.0 --port {PORT} --max-model-len {max_length} --enable-auto-tool-choice"
        ) + "".join(f" --{flag} {value}" for flag, value in vllm.items() if value)
    else:
        setup = "make setup"
        fetch = "" if in_bucket else f".venv/bin/hf download {model_path} --local-dir ~/model\n"
        folder = "/model" if in_bucket else "~/model"
        run = (
            f"{fetch}.venv/bin/python -m components.inference.server {folder} --name {name} --host 0.0.0.0 "
            f"--port {PORT} --max-length {max_length}"
        )
    return {
        "name": name,
        "service": {
            "readiness_probe": {"path": "/health", "initial_delay_seconds": 1200},
            "replicas": replicas,
        },
        "secrets": {SERVER_KEY_VARIABLE: None},
        "resources": resources,
        **({"file_mounts": {"/model": {"source": model, "mode": "MOUNT_CACHED"}}} if in_bucket else {}),
        **({"workdir": "."} if engine == "transformers" else {}),
        "setup": setup,
        "run": run,
    }


def check(task: dict[str, Any]) -> None:
    """Raise SpecError if SkyPilot rejects the task."""
    import sky

    try:
        sky.Task.from_yaml_config({name: value for name, value in task.items() if name != "file_mounts"})
    except (ValueError, TypeError, AssertionError) as error:
        raise SpecError([Problem("sky serve", f"SkyPilot rejects the service: {error}")]) from None


def text(task: dict[str, Any]) -> str:
    """Return the task as YAML."""
    import yaml

    return yaml.safe_dump(task, sort_keys=False, width=1000)


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m components.deployment.sky_serve", description="Writes a service.")
    parser.add_argument("model", metavar="MODEL", help="bucket or repository of the merged export")
    parser.add_argument("--name", required=True, help="name of the service, and of the model it serves")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--accelerators", metavar="NAME:COUNT", help="such as L4:1; default: CPUs only")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=2048, help="longest conversation in tokens (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32",
                        help="with vllm: type of the export (%(default)s)")  # fmt: skip
    parsers = [PYTHONIC, *sorted(set(TOOL_CALLS.values()))]
    parser.add_argument("--tool-call-parser", choices=parsers, default=PYTHONIC,
                        help="with vllm: parser of calls; %(default)s if the model's template has none")  # fmt: skip
    parser.add_argument("--reasoning-parser", choices=sorted({"deepseek_r1", *REASONING.values()}),
                        help="with vllm: parser of the family's reasoning; default: none")  # fmt: skip
    options = vars(parser.parse_args(argv))
    try:
        vllm = {flag: options.pop(flag.replace("-", "_")) for flag in VLLM_FLAGS}
        task = service(options.pop("model"), options.pop("name"), **options, vllm=vllm)
        check(task)
    except EspalierError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text(task))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
