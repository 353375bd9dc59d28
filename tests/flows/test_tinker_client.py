"""The real client of the Tinker API, and programs of tinker-cookbook, against the training service. They run where
HARNESSES names the folder with both packages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TINKER = Path(os.environ.get("HARNESSES", "nowhere")) / "tinker"
pytestmark = pytest.mark.skipif(
    not (TINKER / "tinker").is_dir(), reason="HARNESSES names no folder with tinker's client; run `make test-harnesses`"
)
NAME = "meta-llama/Llama-3.2-1B"
"""A name for which the cookbook knows a renderer; the weights are those of the tiny model."""


class Server:
    """Process of the service."""

    def __init__(self, root: Path):
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]

    def start(self) -> None:
        command = [sys.executable, "-m", "flows.train_server", "model=tiny", f"root={self.root}", "--json",
                   "--name", NAME, "--port", str(self.port)]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["model"] == NAME

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def served(root: Path) -> Iterator[Server]:
    server = Server(root)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def program(server: Server, folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start a program of a client in a folder where the name of the model is a folder, as on the hub."""
    (folder / NAME).parent.mkdir(parents=True, exist_ok=True)
    weights = next(path for path in (server.root / "models").glob("tiny-*") if "untied" not in path.name)
    (folder / NAME).symlink_to(weights)
    environment = {**os.environ, "TINKER_BASE_URL": f"http://127.0.0.1:{server.port}", "TINKER_API_KEY": "tml-test",
                   "TINKER_TELEMETRY": "0", "HF_DATASETS_OFFLINE": "1",
                   "PYTHONPATH": str(TINKER.resolve())}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


LOOP = """
    import sys, tinker
    from tinker import types
    client = tinker.ServiceClient()
    model = client.create_lora_training_client(base_model="meta-llama/Llama-3.2-1B", rank=4, seed=3).result()
    tokens = list(range(10, 40))
    weights = [1.0] * 29
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
    for step in range(12):
        batch = model.forward_backward([datum] * 8, "cross_entropy")
        update = model.optim_step(types.AdamParams(learning_rate=1e-3))
        print(repr(batch.result().metrics["loss:sum"]), update.result().metrics["grad_norm"], flush=True)
    sampler = model.save_weights_and_get_sampling_client().result()
    print(sampler.sample(types.ModelInput.from_ints(tokens[:5]), 1, types.SamplingParams(max_tokens=5, seed=1)).result()
          .sequences[0].tokens, flush=True)
    path, rest = model.save_state("w").result().path, tinker.RestClient()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    saved, = rest.list_user_checkpoints().result().checkpoints
    print(saved.checkpoint_id, saved.expires_at is not None, flush=True)
    try:
        rest.copy_weights(path, "project").result()
    except tinker.NotFoundError as error:
        print("no such route" in str(error), flush=True)
"""


def test_a_client_does_not_notice_that_the_service_is_killed(tmp_path):
    def played(name: str, kills: int) -> list[str]:
        with served(tmp_path / name) as server:
            running = program(server, tmp_path / f"{name}-client", "-c", textwrap.dedent(LOOP))
            assert running.stdout is not None
            lines = []
            for _ in range(kills):
                lines += [running.stdout.readline() for _ in range(4)]
                server.kill()
                time.sleep(1)  # the client asks, and nobody answers
                server.start()
            output, _ = running.communicate(timeout=300)
            assert running.returncode == 0, output
            return [line for line in [*lines, *output.splitlines(keepends=True)] if "Retrying" not in line]

    undisturbed = played("whole", 0)
    assert len(undisturbed) == 15
    assert undisturbed[13:] == ["weights/w True\n", "True\n"]
    assert played("killed", 1) == undisturbed


PROGRAMS = {
    "supervised loop": ["sl_loop", "batch_size=16", "max_length=512", "save_every=2"],
    "RL on arithmetic": [
        "math_rl.train", "env=arithmetic", "group_size=4", "groups_per_batch=8", "loss_fn=importance_sampling",
        "max_steps=2", "save_every=1", "eval_every=0",
    ],
    "DPO": ["preference.dpo.train", "dataset=hhh", "batch_size=8", "max_length=512", "max_steps=2"],
    "several turns": [
        "multiplayer_rl.guess_number.train", "renderer_name=role_colon", "group_size=2", "batch_size=8", "max_tokens=8",
        "max_steps=2", "eval_every=0", "save_every=0",
    ],
    "on-policy distillation": [
        "distillation.on_policy_distillation", f"teacher_model={NAME}", "group_size=2", "groups_per_batch=4",
        "max_tokens=8", "lora_rank=8", "max_steps=2", "save_every=0", "eval_every=0",
    ],
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Write data sets in the form of those that the programs load from the hub."""
    said = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
    pairs = {"chosen": "\n\nHuman: Say {0}.\n\nAssistant: {0}", "rejected": "\n\nHuman: Say {0}.\n\nAssistant: no"}
    sets = {
        "HuggingFaceH4/no_robots": [{"prompt": "Say it.", "messages": said}] * 64,
        "Anthropic/hh-rlhf": [{key: text.format(index) for key, text in pairs.items()} for index in range(1060)],
        "zwhe99/DeepMath-103K": [{"question": f"What is {index} + 1?", "final_answer": "2"} for index in range(32)],
    }
    for name, rows in sets.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_programs_of_the_cookbook_run_unchanged(tmp_path):
    with served(tmp_path / "root") as server:
        for index, (name, (module, *arguments)) in enumerate(PROGRAMS.items()):
            folder = tmp_path / str(index)
            write_data(folder)
            arguments += [f"model_name={NAME}", f"log_path={folder / 'log'}"]
            running = program(server, folder, "-m", f"tinker_cookbook.recipes.{module}", *arguments)
            output, _ = running.communicate(timeout=600)
            assert running.returncode == 0, (name, output[-3000:])
            assert len((folder / "log" / "metrics.jsonl").read_text().splitlines()) >= 2, name
