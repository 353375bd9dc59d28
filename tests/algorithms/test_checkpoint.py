"""Checkpoints continue a training bitwise identically, in any process, with a warm or a cold model cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.algorithms.loop import checkpoint
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.train import policy_digest
from components.errors import ArtifactError
from components.models.spec import LoraSpec
from tests.algorithms.builders import (
    MODEL,
    batch,
    demonstrations,
    make_policy,
    plain_logprobs,
    plain_model,
    train,
    trainable,
    write_start,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "optimizer.safetensors", "trainer.json"]
FILES += ["rng.safetensors"]
DROPOUT = MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, dropout=0.2)})
"""Model with dropout, so that results depend on the random state."""
ROUNDS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOSpec(learning_rate=1e-3, kl_coefficient=0.1, minibatches=2, warmup_steps=5), batch),
    "sft": (SFTSpec(learning_rate=1e-3, batch_size=4, warmup_steps=5, schedule="constant"), demonstrations),
}
"""Algorithm and training data, the same in each round."""


def one_round(base_dir: Path, name: str, begin: Path | None, out: Path, warm: dict | None) -> Path:
    spec, make = ROUNDS[name]
    out.mkdir(parents=True)
    scratch = out.with_name(f"{out.name}-scratch")
    scratch.mkdir()
    train(
        spec,
        DROPOUT,
        base_dir,
        make(),
        start=begin,
        reference=begin,
        out=out,
        scratch=scratch,
        seed=11,
        on_step=lambda _: None,
        warm=warm,
    )
    return out


def differing(left: Path, right: Path) -> list[str]:
    """Return the names of the files that differ."""
    critic = [f"critic/{path.name}" for path in sorted((left / "critic").glob("*"))]
    learned = ["weights/model.safetensors"] if (left / "weights").is_dir() else FILES[:2]
    return [
        name for name in [*learned, *FILES[2:], *critic] if (left / name).read_bytes() != (right / name).read_bytes()
    ]


@dataclass
class Rounds:
    folder: Path
    output: str
    touched: dict[str, list[str]]
    homes: list[Path]


@pytest.fixture(scope="module")
def rounds(base_dir, tmp_path_factory) -> Rounds:
    """Run a first and a second round with one warm policy, and the second again in a separate process, which has only
    the first round's folder; its home, working directory and temporary folder are empty."""
    folder = tmp_path_factory.mktemp("rounds")
    for name in ROUNDS:
        warm: dict = {}
        first = one_round(base_dir, name, None, folder / name / "first", warm)
        one_round(base_dir, name, first, folder / name / "second", warm)
    homes = [tmp_path_factory.mktemp(name) for name in ("home", "cwd", "tmp")]
    remaining = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DO_NOT"))}
    variables = {"HOME": homes[0], "TMPDIR": homes[2], "PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.algorithms.alone", str(base_dir), str(folder)],
        cwd=homes[1],
        env={**remaining, "OMP_NUM_THREADS": str(torch.get_num_threads()), **{k: str(v) for k, v in variables.items()}},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr
    return Rounds(folder, done.stdout, json.loads(done.stderr.splitlines()[-1]), homes)


@pytest.mark.parametrize("name", ROUNDS)
def test_two_rounds_in_one_go_are_one_round_and_one_in_a_fresh_process(rounds, name):
    folder = rounds.folder / name
    assert differing(folder / "second", folder / "alone") == []
    assert {"adapter/adapter_model.safetensors", "rng.safetensors"} <= set(
        differing(folder / "second", folder / "first")
    )


@pytest.mark.parametrize("name", ROUNDS)
def test_warm_and_cold_give_the_same_bytes(rounds, base_dir, tmp_path, name):
    folder = rounds.folder / name
    assert differing(folder / "first", one_round(base_dir, name, None, tmp_path / "cold", None)) == []
    warm: dict = {}
    for other in ("grpo", "sft"):  # a policy that was used in all earlier trainings
        one_round(base_dir, other, rounds.folder / other / "first", tmp_path / f"before-{other}", warm)
    assert len(warm) == 1
    assert differing(folder / "second", one_round(base_dir, name, folder / "first", tmp_path / "warm", warm)) == []
    assert differing(folder / "first", one_round(base_dir, name, None, tmp_path / "anew", warm)) == []


def test_nothing_is_printed_and_nothing_written_outside_of_out_and_scratch(rounds):
    assert rounds.output == ""
    assert [str(path) for home in rounds.homes for path in home.rglob("*")] == []
    outside = [path for path in rounds.touched["written"] if not path.startswith((str(rounds.folder), "/dev/"))]
    assert outside == []


def test_no_host_is_asked_for(rounds):
    assert rounds.touched["hosts"] == []


@pytest.mark.parametrize("name", ROUNDS)
def test_optimizer_step_and_random_state_are_restored(rounds, base_dir, name):
    folder = rounds.folder / name / "second"
    policy = Policy(base_dir, DROPOUT, seed=0)
    names, parameters = list(policy.parameters), list(policy.parameters.values())
    optimizer = torch.optim.AdamW(parameters)
    remaining = torch.get_rng_state()
    try:
        step = checkpoint.load_state(
            folder, algorithm=name, optimizer=optimizer, names=names, loss_scale=LossScale.of("float32")
        )
        assert torch.equal(torch.get_rng_state(), load_file(folder / "rng.safetensors")["torch"])
    finally:
        torch.set_rng_state(remaining)
    assert step == 4  # two steps per round
    saved = load_file(folder / "optimizer.safetensors")
    assert len(saved) == 2 * len(names)
    for label, parameter in zip(names, parameters, strict=True):
        state = optimizer.state[parameter]
        assert float(state["step"]) == 4
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment], saved[f"{label}/{moment}"])
            assert float(state[moment].abs().sum()) > 0


def test_the_state_of_another_algorithm_is_left_alone(rounds, base_dir, tmp_path):
    policy = Policy(base_dir, DROPOUT, seed=0)
    optimizer = torch.optim.AdamW(policy.parameters.values())
    before = torch.get_rng_state()
    folder = rounds.folder / "sft" / "second"
    assert (
        checkpoint.load_state(
            folder,
            algorithm="grpo",
            optimizer=optimizer,
            names=list(policy.parameters),
            loss_scale=LossScale.of("float32"),
        )
        == 0
    )
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    out = one_round(base_dir, "grpo", folder, tmp_path / "out", None)
    assert json.loads((out / "trainer.json").read_text())["step"] == 2
    assert set(json.loads((out / "trainer.json").read_text())["optimizer_steps"].values()) == {2.0}


@pytest.mark.parametrize("name", ROUNDS)
def test_warm_up_goes_on_over_rounds(rounds, name):
    spec, _ = ROUNDS[name]
    lines = [(rounds.folder / name / round_ / "log.jsonl").read_text().splitlines() for round_ in ("first", "second")]
    logs = [json.loads(line) for round_lines in lines for line in round_lines]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    rates = [spec.learning_rate * share for share in (0.2, 0.4, 0.6, 0.8)]
    assert [log["learning_rate"] for log in logs] == pytest.approx(rates)


def test_a_saved_adapter_is_what_peft_reads(base_dir, tmp_path):
    policy = make_policy(base_dir)
    policy.save(tmp_path)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), tmp_path)
    tokens = [5, 9, 17, 3, 200]
    expected = plain_logprobs(plain_model(base_dir, policy), tokens, 1.0)
    assert plain_logprobs(read, tokens, 1.0).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert len(trainable(policy.model)) == len(load_file(tmp_path / "adapter_model.safetensors"))


def test_a_saved_adapter_names_no_path(base_dir, tmp_path):
    local = MODEL.model_copy(update={"name": str(base_dir), "source": "hub"})
    for spec in (MODEL, local):
        Policy(base_dir, spec, seed=0).save(tmp_path / "adapter")
        text = (tmp_path / "adapter" / "adapter_config.json").read_text()
        assert "/" not in text
        config = json.loads(text)
        assert config["base_model_name_or_path"] == Path(spec.name).name
        assert config["target_modules"] == sorted(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        )


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraSpec(rank=8, alpha=8.0), "has rank 4 and alpha 8, but model.lora has rank 8 and alpha 8"),
        (LoraSpec(rank=4, alpha=16.0), "has rank 4 and alpha 8, but model.lora has rank 4 and alpha 16"),
        (LoraSpec(rank=4, alpha=8.0, target_modules=["q_proj"]), "model.lora.target_modules=.'q_proj'."),
    ],
)
@pytest.mark.parametrize("role", ["start", "reference"])
def test_an_adapter_of_another_shape_is_refused(base_dir, start, tmp_path, lora, message, role):
    spec = MODEL.model_copy(update={"lora": lora})
    where = {"start": None, "reference": None, role: start}
    with pytest.raises(ArtifactError, match=message):
        train(
            GRPOSpec(), spec, base_dir, batch(), out=tmp_path, scratch=tmp_path, seed=0, on_step=lambda _: None, **where
        )
    assert not (tmp_path / "adapter").exists()


def test_the_digest_is_that_of_the_tensors(base_dir, start, tmp_path):
    again = write_start(base_dir, tmp_path / "again")
    other = write_start(base_dir, tmp_path / "other", seed=1)
    assert policy_digest(start) == policy_digest(again) != policy_digest(other)
