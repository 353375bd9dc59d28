"""SkyServe: the service file for replicas of an exported model on clouds.

    python -m components.deployment.sky_serve MODEL --name NAME [--engine vllm] [--accelerators L4:1] > serve.yaml
    sky serve up serve.yaml

MODEL is where every replica finds the merged export: a bucket (`s3://…`, `gs://…`), or a repository of the Hugging Face
Hub (`owner/name`). What is written is checked by SkyPilot's own reader first, which asks no cloud. Replicas listen on
all addresses, so they need a key, which clients send as `Authorization: Bearer KEY`; the readiness probe asks for
`/health`, which needs none. Secrets are never written: `--secret ESPALIER_SERVER_KEY` of `sky serve up` passes the key,
and `--secret HF_TOKEN` a token of the Hub. `sky serve update` puts a new version in place of one that
runs, replica by replica, and keeps the old ones where the new do not get ready.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Literal

from components.errors import EspalierError, Problem, SpecError
from components.specs.served import SERVER_KEY_VARIABLE

PORT = 8000
Kind = Literal["transformers", "vllm"]
BUCKET = re.compile(r"(s3|gs|r2|cos|oci|https)://\S+")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def service(
    model: str, name: str, *, engine: Kind, accelerators: str | None, replicas: int, max_length: int
) -> dict[str, Any]:
    """The task with its service. Raises SpecError where something cannot be used."""
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
    place = "/model" if in_bucket else shlex.quote(model)
    resources: dict[str, Any] = {"ports": PORT}
    if accelerators:
        resources["accelerators"] = accelerators
    if engine == "vllm":
        setup = "uv venv --python 3.11 ~/vllm && uv pip install --python ~/vllm/bin/python vllm"
        run = (
            f'VLLM_API_KEY="${{{SERVER_KEY_VARIABLE}:?pass --secret {SERVER_KEY_VARIABLE}}}" '
            f"~/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {place} --served-model-name {name} "
            f"--host 0.0.0.0 --port {PORT} --max-model-len {max_length}"
        )
    else:
        setup = "make setup"
        fetch = "" if in_bucket else f".venv/bin/hf download {place} --local-dir ~/model\n"
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
    """Raises SpecError where SkyPilot cannot read it."""
    import sky

    try:
        sky.Task.from_yaml_config({name: value for name, value in task.items() if name != "file_mounts"})
    except (ValueError, TypeError, AssertionError) as error:
        raise SpecError([Problem("sky serve", f"SkyPilot refuses the service: {error}")]) from None


def text(task: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(task, sort_keys=False, width=1000)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m components.deployment.sky_serve", description="Writes a service.")
    parser.add_argument("model", metavar="MODEL", help="bucket or repository that holds the merged export")
    parser.add_argument("--name", required=True, help="of the service, and of the model there")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--accelerators", metavar="NAME:COUNT", help="such as L4:1; none takes CPUs")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=2048, help="longest conversation, tokens (%(default)s)")
    options = vars(parser.parse_args(argv))
    try:
        task = service(options.pop("model"), options.pop("name"), **options)
        check(task)
    except EspalierError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text(task))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
