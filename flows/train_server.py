"""`python -m flows.train_server model=NAME [overrides]`: serve a model to clients of the Tinker API, for training.

    python -m flows.train_server model=smollm2_135m root=runs
    TINKER_BASE_URL=http://127.0.0.1:8050 TINKER_API_KEY=tml-local python their_program.py

Clients create LoRA models on the base, train and sample them, and save checkpoints, which are below the root. The
service continues where it ended, also after it was killed: clients that wait for a result get it from the next process
with the same root and port. docs/guides/tinker.md describes what it offers and what it refuses.

It listens on this machine only. On another address (`--host`) clients send the key in ESPALIER_SERVER_KEY, which their
package expects to begin with tml-.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import with_exit_codes

if TYPE_CHECKING:
    from components.inference.server import ListenOptions
    from flows.experiment.spec import ExperimentSpec

PORT = 8050
KEY_PREFIX = "tml-"
"""Beginning of the keys that the client's package accepts."""


def serve(spec: ExperimentSpec, listen: ListenOptions, options: argparse.Namespace) -> None:
    """Serve the model of an experiment until interrupted. Raises SpecError and ResourceError."""
    from components.artifacts import lock_file
    from components.errors import SpecError
    from components.inference.access import check_key
    from components.inference.server import AppServer
    from components.inference.transformers.engine import TransformersEngine
    from components.models.untied import untied
    from components.models.weights import CACHE, prepare
    from components.tracking.store import check as check_tracking
    from components.tracking.store import local_uri
    from flows.stages.base import Context
    from flows.train_service.app import create_app
    from flows.train_service.retention import FOLDER, LOCK
    from flows.train_service.runs import ModelRuns
    from flows.train_service.sampler import Sampler
    from flows.train_service.service import ServedBase, Service
    from flows.train_service.trainer import AdapterTrainer

    for stage in ("train", "collect"):
        if (place := spec.compute.placement(stage)) != "local":
            text = f"{place}: the service trains in its own process; expected local. Start it on the machine itself"
            raise SpecError.at(f"compute.stages.{stage}", text)
    if not spec.inference.in_process:
        text = f"{spec.inference.name}: the service samples in its own process; expected embedded"
        raise SpecError.at("inference.name", text)
    check_key(listen.host, listen.key, KEY_PREFIX)
    model = spec.resolve_dtypes(spec.model, "train")
    if model.dtype == "float16":
        text = "float16: gradients of clients would underflow; expected float32 or bfloat16"
        raise SpecError.at("model.dtype", text)
    root = Path(spec.root)
    Context.created(root)
    check_tracking(spec.tracking.uri or local_uri(root))
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    with open(folder / LOCK, "a+") as lock, ModelRuns(spec, options.overrides) as runs:
        lock_file(lock, f"the training service below {root}", 5.0, lambda _: None)
        plain = prepare(model, root / CACHE)
        base_dir = untied(plain, model, root / CACHE)
        engine = TransformersEngine(base_dir, max_length=model.max_length, dtype=model.dtype, device=model.device)
        try:
            hub = model.source == "hub" and not Path(model.name).is_dir()
            own = [options.name] if options.name else []
            names = tuple(dict.fromkeys((*own, model.name, str(plain.resolve()))))
            service_place = ServedBase(names, model.name if hub else str(plain.resolve()), folder)
            service = Service(service_place, AdapterTrainer(base_dir, model, folder / "states"), Sampler(engine), runs)
            with AppServer(create_app(service), listen) as server:
                address = {"model": names[0], "url": server.root_url, "root": spec.root}
                text = f"serves {names[0]} for training at {server.root_url} (Ctrl-C stops); results are below {root}"
                print(json.dumps(address) if options.json else text, flush=True)
                server.wait()
        finally:
            engine.close()


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Return exit code 0; 2 for a user error; 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.train_server",
        description="Serves a model for training to clients of the Tinker API (docs/guides/tinker.md).",
    )
    parser.add_argument("overrides", nargs="*", help="model=NAME, root=DIR, and other keys of an experiment")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any free one (default: {PORT})")
    parser.add_argument("--name", help="another name by which clients may ask for the model")
    parser.add_argument("--allowed-host", action="append", default=[], dest="allowed_hosts", metavar="NAME[:PORT]",
                        help="accept this Host header too; may be given again")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the address as one JSON object")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port}: expected 0 to 65535")
    from components.inference.access import key_from_environment
    from components.inference.server import ListenOptions
    from flows.experiment.compose import compose
    from flows.loop.policy import SETTINGS
    from flows.terminal.console import hush

    hush()
    os.environ.setdefault("TQDM_DISABLE", "1")
    spec = compose([*SETTINGS, "name=train_server", *options.overrides], config_dir=options.config_dir)
    listen = ListenOptions(
        options.host, options.port, key=key_from_environment(), allowed_hosts=tuple(options.allowed_hosts)
    )
    serve(spec, listen, options)
    return 0


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
