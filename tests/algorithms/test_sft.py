"""SFT on packs compared with TRL's SFTTrainer on padded rows: the same loss, gradient and weights."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.algorithms.sft.spec import SFTSpec
from components.algorithms.sft.trainer import examples, reward_weights, train_sft
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.parts import CORRECTION
from components.trajectories.schema import History, Message
from tests.algorithms.builders import (
    MODEL,
    batch,
    demonstrations,
    make_context,
    make_history,
    make_policy,
    make_trajectory,
    plain_model,
    relative_difference,
    train_in,
    trainable,
)
from tests.trajectories.builders import FAILURE

SPEC = SFTSpec(learning_rate=1e-3, batch_size=3, epochs=2, pack_tokens=64, weight_decay=0.01)
LONG = 512


@pytest.fixture
def chat(base_dir) -> ChatFormat:
    return ChatFormat(load_tokenizer(base_dir))


def adamw(spec: SFTSpec, parameters) -> torch.optim.AdamW:
    betas = (spec.beta1, spec.beta2)
    return torch.optim.AdamW(parameters, lr=spec.learning_rate, betas=betas, weight_decay=spec.weight_decay)


def watch(optimizer, parameters: dict) -> list[dict[str, torch.Tensor]]:
    """Record the gradients of each later step."""
    recorded: list[dict[str, torch.Tensor]] = []

    def note(*_) -> None:
        recorded.append({name: parameter.grad.clone() for name, parameter in parameters.items()})

    optimizer.register_step_pre_hook(note)
    return recorded


def trl(spec: SFTSpec, base_dir: Path, model: torch.nn.Module, rows: list[dict], weights: dict, folder: Path):
    """Return (losses by step, gradients by step, final weights) of TRL's trainer with its own batches, collator,
    log-probabilities, count of tokens, clipping and schedule. TRL has no weights: they multiply its log-probabilities.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    padded = [
        {
            "input_ids": row["input_ids"],
            "labels": [token if index in row["targets"] else -100 for index, token in enumerate(row["input_ids"])],
            "weight": weights[row["trajectory_id"]],
        }
        for row in rows
    ]

    class WeightedTrainer(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weight_B = inputs.pop("weight")
            if spec.weight_temperature is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            logprob_BT = model(**inputs, use_cache=False, fused_lm_head=True).log_probs
            return -(logprob_BT * weight_B[:, None]).sum() / num_items_in_batch

    optimizer = adamw(spec, trainable(model).values())
    grads = watch(optimizer, trainable(model))
    trainer = WeightedTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=spec.batch_size,
            num_train_epochs=spec.epochs,
            learning_rate=spec.learning_rate,
            lr_scheduler_type=spec.schedule,
            max_grad_norm=spec.max_grad_norm,
            max_length=None,
            seed=5,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        ),
        train_dataset=Dataset.from_list(padded),
        processing_class=load_tokenizer(base_dir),
        optimizers=(optimizer, None),
    )
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: {
        "weight": torch.tensor([row.pop("weight") for row in rows]),
        **collator(rows),
    }
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, grads, {name: p.detach() for name, p in trainable(model).items()}


def with_second_history(trajectories: list) -> list:
    """Give every other trajectory a second, shorter history."""
    for index, trajectory in enumerate(trajectories[::2]):
        messages = [Message("user", f"Hello {index}."), Message("assistant", "Hi." * (index + 1))]
        trajectory.histories.append(History(messages, agent="helper"))
    return trajectories


def scored(trajectories: list) -> list:
    for index, trajectory in enumerate(trajectories):
        trajectory.reward = index / len(trajectories)
    return trajectories


def mixed() -> list:
    return [*demonstrations(5), *batch(groups=1, size=2)]


def with_sliding_window(base_dir: Path, folder: Path) -> Path:
    """Copy a Llama model as a Mistral model, whose tensors have the same names."""
    shutil.copytree(base_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WHOLE = MODEL.model_copy(update={"lora": None})
ORACLE_CASES = {
    "small packs": ({}, mixed, MODEL),
    "one pack": ({"pack_tokens": 1024}, mixed, MODEL),
    "sliding window": ({"pack_tokens": 256}, mixed, MODEL),
    "weighted, several histories": (
        {"batch_size": 2, "weight_temperature": 0.5},
        lambda: with_second_history(scored(demonstrations(4))),
        MODEL,
    ),
    "three epochs, constant, clipped": ({"epochs": 3, "schedule": "constant", "max_grad_norm": 0.05}, mixed, MODEL),
    "gradient checkpointing": ({"gradient_checkpointing": True}, mixed, MODEL),
    "all weights": ({"learning_rate": 1e-4}, mixed, WHOLE),
}


@pytest.mark.parametrize("case", ORACLE_CASES)
def test_loss_gradient_and_weights_are_those_of_trl(base_dir, chat, tmp_path, case):
    """In float32. Gradients of later steps are those of weights that differ by rounding, so 1e-4 is allowed there."""
    changes, make_trajectories, model = ORACLE_CASES[case]
    spec, trajectories = SPEC.model_copy(update=changes), make_trajectories()
    model = model.model_copy(update={"max_length": LONG})
    if "sliding window" in case:
        base_dir = with_sliding_window(base_dir, tmp_path / "model")
    policy = make_policy(base_dir, model=model)
    policy.checkpoint_layers(spec.gradient_checkpointing)
    plain = plain_model(base_dir, policy) if model.lora else AutoModelForCausalLM.from_pretrained(base_dir)
    optimizer = adamw(spec, policy.parameters.values())
    grads = watch(optimizer, policy.parameters)
    logs: list[dict[str, float]] = []
    options = {"base_dir": base_dir, "seed": 5, "scratch": tmp_path, "on_step": logs.append}
    step, metrics = train_sft(spec, make_context(policy, optimizer, trajectories, **options))
    rows = examples(chat, trajectories, LONG)
    weights = dict.fromkeys((trajectory.id for trajectory in trajectories), 1.0)
    if spec.weight_temperature is not None:
        weights = reward_weights(trajectories, spec.weight_temperature)
    losses, expected_grads, expected = trl(spec, base_dir, plain, rows, weights, tmp_path)
    assert step == len(logs) == len(losses) == spec.epochs * math.ceil(len(rows) / spec.batch_size)
    assert [log["step"] for log in logs] == list(range(1, step + 1))
    assert [log["loss"] for log in logs] == pytest.approx(losses, abs=1e-5)
    for ours, expected_values in zip(grads, expected_grads, strict=True):
        assert relative_difference(ours, expected_values) <= 1e-4
    assert relative_difference(grads[0], expected_grads[0]) <= 1e-5
    assert relative_difference({name: p.detach() for name, p in policy.parameters.items()}, expected) <= 1e-5
    assert metrics["computed_tokens"] < metrics["tokens"]
    assert metrics["examples"] == len(rows)
    assert metrics["loss"] == pytest.approx(sum(losses) / step, abs=1e-5)
    if case == "small packs":
        assert (len(rows), step) == (7, 6)  # 7 rows in batches of 3, twice


def test_only_what_the_assistant_says_is_learned(chat):
    rows = examples(chat, demonstrations(2), LONG)
    learned = [chat.tokenizer.decode([row["input_ids"][index] for index in row["targets"]]) for row in rows]
    assert learned == [
        "It left on day 0.<|im_end|>You are welcome.<|im_end|>",
        "On its way.<|im_end|>You are welcome.<|im_end|>",
    ]
    whole = chat.tokenizer.decode(rows[0]["input_ids"])
    assert whole.startswith("<|im_start|>system\nYou work in a shop.<|im_end|>\n<|im_start|>user\nWhere is order 0?")
    assert [row["trajectory_id"] for row in rows] == ["d0/0", "d1/0"]


def test_sampled_tokens_are_learned_as_they_were_sampled(chat):
    tokens = [7, 7, 200, 201, 202, 9]  # no text is tokenized like this
    (row,) = examples(
        chat, [make_trajectory("a", 0, [make_history([(False, tokens[:3]), (True, tokens[3:])], [0.0] * 3)], 1.0)], LONG
    )
    assert (row["input_ids"], row["targets"]) == (tokens, [3, 4, 5])


def test_long_histories_and_failed_episodes_are_left_out(chat, caplog):
    demos = demonstrations(3)
    demos[1].failure = FAILURE
    long = len(examples(chat, demos[:1], LONG)[0]["input_ids"])
    with caplog.at_level(logging.WARNING):
        kept_rows = examples(chat, [*demos, *batch(groups=1, size=1)], long - 1)
    assert [row["trajectory_id"] for row in kept_rows] == ["s0/0"]
    assert f"longer than model.max_length={long - 1} tokens" in caplog.text


def test_several_histories_are_several_rows(chat):
    (demo,) = demonstrations(1)
    demo.histories.append(History([Message("user", "Hello."), Message("assistant", "Hi.")], agent="helper"))
    assert [row["trajectory_id"] for row in examples(chat, [demo], LONG)] == ["d0/0", "d0/0"]


def run(base_dir, spec, trajectories, folder: Path, **more):
    return train_in(folder, spec, base_dir, trajectories, **{"seed": 0, **more})[:2]


def test_nothing_is_printed_and_nothing_left_in_the_working_directory(base_dir, tmp_path, capfd, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(base_dir, SPEC, demonstrations(), tmp_path / "run")
    assert capfd.readouterr().out == ""
    assert list((tmp_path / "here").iterdir()) == []


def test_the_learning_rate_rises_and_falls_linearly(base_dir, tmp_path):
    logs: list[dict[str, float]] = []
    spec = SPEC.model_copy(update={"warmup_steps": 2})
    run(base_dir, spec, demonstrations(), tmp_path, on_step=logs.append)
    rates = [spec.learning_rate * share for share in (1 / 2, 3 / 4, 2 / 4, 1 / 4)]
    assert [log["learning_rate"] for log in logs] == pytest.approx(rates)


def test_the_random_generators_of_the_process_are_not_seeded(base_dir, tmp_path):
    import random

    import numpy

    before = random.getstate(), numpy.random.get_state()[1].tolist()
    run(base_dir, SPEC, demonstrations(), tmp_path)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_a_warm_policy_keeps_its_own_forward(base_dir, tmp_path):
    warm: dict = {}
    for name in ("a", "b"):
        run(base_dir, SPEC, demonstrations(), tmp_path / name, warm=warm)
        (policy,) = warm.values()
        assert "forward" not in vars(policy.model.get_base_model())


def test_no_examples_change_nothing(base_dir, start, tmp_path):
    empty = batch(groups=1, size=1)
    empty[0].histories = [make_history([(False, [5, 6])], [])]
    out, metrics = run(base_dir, SPEC, empty, tmp_path, start=start)
    assert metrics == {"skipped": 1.0}
    name = "adapter/adapter_model.safetensors"
    assert (out / name).read_bytes() == (start / name).read_bytes()


# --- weighted behaviour cloning ---------------------------------------------------------------------------------------


def test_weights_are_a_softmax_of_the_rewards_with_a_mean_of_one():
    inputs = [make_trajectory("a", index, [], reward) for index, reward in enumerate([1.0, 0.0, 0.5, None])]
    actual = reward_weights(inputs, 0.5)
    powers = [math.exp(value / 0.5) for value in (1.0, 0.0, 0.5)]
    assert list(actual) == ["a/0", "a/1", "a/2"]
    assert list(actual.values()) == pytest.approx([3 * power / sum(powers) for power in powers])
    inputs[0].reward = 1e6  # does not overflow
    assert list(reward_weights(inputs, 0.5).values()) == [3.0, 0.0, 0.0]
    assert reward_weights([], 0.5) == {}


def test_of_a_correction_only_the_last_message_is_learned(chat):
    messages = [
        Message("user", "a"),
        Message("assistant", "wrong"),
        Message("user", "b"),
        Message("assistant", "right"),
    ]
    shown = make_trajectory("s", 0, [History(messages)], None)
    (full_row,) = examples(chat, [shown], LONG)
    shown.policy = CORRECTION
    (correction_row,) = examples(chat, [shown], LONG)
    learned = chat.tokenizer.decode([correction_row["input_ids"][index] for index in correction_row["targets"]])
    assert correction_row["input_ids"] == full_row["input_ids"]
    assert "right" in learned
    assert "wrong" not in learned
    assert set(correction_row["targets"]) < set(full_row["targets"])
