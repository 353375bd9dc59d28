"""Two processes, with whole or with sharded base weights, take the step of one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.algorithms.builders import batch, make_policy

CODE = Path(__file__).resolve().parents[2]
WORKER = """
import json, sys
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed
from tests.algorithms import test_distributed

base_dir, out, kind, rank, port, algorithm = sys.argv[1:]
if rank != "alone":
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2, timeout=timedelta(seconds=120)
    )
json.dump(test_distributed.one_step(Path(base_dir), kind, algorithm), open(out, "w"))
if rank != "alone":
    distributed.destroy_process_group()
"""


def one_step(base_dir: Path, kind: str, algorithm: str) -> dict:
    """The gradient before the step, and the metrics, of five groups in more packs than processes, an odd number."""
    import tempfile

    import torch

    from components.algorithms import distributed
    from components.algorithms.critic import Critic
    from components.algorithms.policy_gradient import train_policy_gradient
    from components.algorithms.ppo import train_ppo
    from components.algorithms.preference import train_preference
    from components.algorithms.spec import DPOSpec, GRPOSpec, PPOSpec

    policy = make_policy(base_dir)
    if kind == "fsdp":
        distributed.shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
    gradient = {}

    def keep(*_) -> None:
        gradient.update({name: one.grad.flatten().tolist() for name, one in policy.parameters.items()})

    optimizer.register_step_pre_hook(keep)
    logs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        rest = {"step": 0, "seed": 0, "scratch": Path(scratch), "on_step": logs.append}
        trajectories = batch(groups=5)
        if algorithm == "ppo":
            ppo = PPOSpec(pack_tokens=64, max_grad_norm=1e9)
            critic = Critic(policy, ppo)
            optimizer.add_param_group({"params": list(critic.parameters.values())})
            train_ppo(ppo, policy, critic, optimizer, trajectories, **rest)
        elif algorithm == "grpo":
            spec = GRPOSpec(kl_coefficient=0.1, pack_tokens=64, max_grad_norm=1e9)
            train_policy_gradient(spec, policy, optimizer, trajectories, **rest)
        else:
            preference = DPOSpec(pack_tokens=64, max_grad_norm=1e9)
            train_preference(preference, policy, optimizer, base_dir, trajectories, **rest)
    changing = ("seconds", "tokens_per_s")
    metrics = {name: value for name, value in logs[0].items() if name not in changing}
    after = {name: one.detach().flatten().tolist() for name, one in policy.parameters.items()}
    return {"gradient": gradient, "metrics": metrics, "after": after}


def start(base_dir: Path, out: Path, kind: str, rank: str, port: int, algorithm: str) -> subprocess.Popen:
    arguments = [str(base_dir), str(out), kind, rank, str(port), algorithm]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], cwd=CODE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("kind", "algorithm"), [("ddp", "grpo"), ("fsdp", "grpo"), ("ddp", "dpo"), ("ddp", "ppo")])
def test_two_processes_take_the_step_of_one(base_dir, tmp_path, kind, algorithm):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = {rank: start(base_dir, tmp_path / rank, kind, rank, port, algorithm) for rank in ("0", "1")}
    for rank, process in running.items():
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, f"{rank}: {errors[-3000:]}"
    alone = one_step(base_dir, "alone", algorithm)
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in ("0", "1"))
    assert first == second  # the same step everywhere, bit for bit
    for part in ("gradient", "after"):
        for name, values in alone[part].items():
            scale = max(map(abs, values)) or 1.0
            assert first[part][name] == pytest.approx(values, abs=2e-6 * scale), name
    assert first["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
