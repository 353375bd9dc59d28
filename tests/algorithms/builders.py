"""A tiny model, trajectories with tokens, and reference computations on a plain PEFT model, one sequence at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.compute.spec import Strategy
from components.models.spec import LoraSpec, ModelSpec
from components.trajectories.schema import Failure, History, Message, Scenario, Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.algorithms.reward_models.spec import RewardTrainingSpec
    from components.algorithms.spec import AlgorithmSpec
    from components.algorithms.trainer import JudgedCollection, TrainingContext

MODEL = ModelSpec(name="tiny", source="random", device="cpu", max_length=128, lora=LoraSpec(rank=4, alpha=8.0))
VOCABULARY = 259
TEMPERATURE = 0.7


def make_history(parts: Sequence[tuple[bool, Sequence[int]]], logprobs: Sequence[float]) -> History:
    """Return a history. parts: (sampled, tokens) in order. logprobs: of the sampled tokens."""
    token_ids: list[int] = []
    messages = []
    for sampled, tokens in parts:
        span = (len(token_ids), len(token_ids) + len(tokens)) if sampled else None
        messages.append(Message("assistant" if sampled else "user", "", span=span))
        token_ids += tokens
    built = History(messages, token_ids)
    values = iter(logprobs)
    built.logprobs = [next(values) if sampled else float("nan") for sampled in built.sampled_mask()]
    assert next(values, None) is None
    return built


def make_trajectory(
    group: str,
    sample: int,
    histories: list[History],
    reward: float | None,
    *,
    failure: Failure | None = None,
    sampling: dict[str, Any] | None = None,
) -> Trajectory:
    return Trajectory(
        f"{group}/{sample}",
        Scenario(group, {}, "train"),
        sample,
        histories,
        reward=reward,
        failure=failure,
        sampling={"temperature": TEMPERATURE} if sampling is None else sampling,
    )


# Names that tests outside this folder import.
history, trajectory = make_history, make_trajectory


def batch(seed: int = 0, groups: int = 3, size: int = 3, off_policy: float = 0.4) -> list[Trajectory]:
    """Return groups of two-turn episodes with a shared prompt and partly shared answers. The log-probabilities scatter
    around those of an untrained model, so that some ratios are clipped on either side."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    result = []
    for group in range(groups):
        prompt, first, observation = tokens(12), tokens(4), tokens(6)
        for sample in range(size):
            answer = first[: draw.randint(1, 4)] + tokens(draw.randint(1, 5))
            last = tokens(draw.randint(2, 6))
            parts = [(False, prompt), (True, answer), (False, observation), (True, last)]
            logprobs = [-5.56 + draw.gauss(0, off_policy) for _ in range(len(answer) + len(last))]
            result.append(make_trajectory(f"s{group}", sample, [make_history(parts, logprobs)], reward=draw.random()))
    return result


def demonstrations(count: int = 6) -> list[Trajectory]:
    """Return written conversations, without tokens."""
    result = []
    for index in range(count):
        messages = [
            Message("system", "You work in a shop."),
            Message("user", f"Where is order {index}?"),
            Message("assistant", "On its way." if index % 2 else f"It left on day {index}."),
            Message("user", "Thanks."),
            Message("assistant", "You are welcome."),
        ]
        result.append(Trajectory(f"d{index}/0", Scenario(f"d{index}", {}, "train"), 0, [History(messages)]))
    return result


def make_policy(base_dir: Path, seed: int = 0, model: ModelSpec = MODEL, strategy: Strategy = "ddp"):
    """Return a policy with a non-zero adapter: B is random too."""
    import torch

    from components.algorithms.policy.policy import Policy

    policy = Policy(base_dir, model, seed, strategy)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def train(
    algorithm: AlgorithmSpec, model: ModelSpec, base_dir: Path, trajectories: Sequence[Trajectory], **options: Any
) -> dict[str, float]:
    """Train a policy; options: further fields of the request."""
    from components.algorithms import train as library
    from components.algorithms.trainer import PolicyTrainingRequest

    request = PolicyTrainingRequest(model=model, base_dir=base_dir, trajectories=trajectories, **options)
    return library.train(algorithm, request)


def train_in(
    folder: Path,
    algorithm: AlgorithmSpec,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    model: ModelSpec = MODEL,
    **options: Any,
) -> tuple[Path, dict[str, float], list[dict[str, float]]]:
    """Train a policy in a folder, or resume the training there. Return the folder of the checkpoint, the metrics, and
    those of each step; options: further fields of the request."""
    out, scratch = folder / "out", folder / "scratch"
    for path in (out, scratch):
        path.mkdir(parents=True, exist_ok=True)
    logs: list[dict[str, float]] = []
    options = {"start": None, "reference": None, "seed": 3, "on_step": logs.append} | options
    return out, train(algorithm, model, base_dir, trajectories, out=out, scratch=scratch, **options), logs


def adapter_bytes(folder: Path) -> bytes:
    """Return the adapter of a checkpoint."""
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def train_reward_model(
    spec: RewardTrainingSpec, model: ModelSpec, base_dir: Path, judged: Sequence[JudgedCollection], **options: Any
) -> dict[str, float]:
    """Train a reward model; options: further fields of the request."""
    from components.algorithms.reward_models import trainer
    from components.algorithms.trainer import RewardTrainingRequest

    return trainer.train_reward_model(
        spec, RewardTrainingRequest(model=model, base_dir=base_dir, judged=judged, **options)
    )


def make_context(policy: Policy, optimizer: Any, trajectories: Sequence[Trajectory], **options: Any) -> TrainingContext:
    """Return the context of a training; options: further fields."""
    from components.algorithms.trainer import TrainingContext

    defaults = {"model": MODEL, "base_dir": Path(), "out": Path(), "seed": 0, "on_step": lambda _: None}
    return TrainingContext(policy=policy, optimizer=optimizer, trajectories=trajectories, **defaults | options)


def write_start(base_dir: Path, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of an unknown algorithm: an adapter to start from, but no moments to restore."""
    import torch

    from components.algorithms.loop import checkpoint

    policy = make_policy(base_dir, seed)
    folder.mkdir(parents=True)
    policy.save(policy.folder(folder))
    optimizer = torch.optim.AdamW(policy.parameters.values())
    state = {"optimizer": optimizer, "names": list(policy.parameters), "loss_scale": {}}
    checkpoint.save_state(folder, algorithm="none", step=0, **state)
    return folder


def plain_model(base_dir: Path, policy):
    """Return the policy's model as PEFT and transformers build it, with standard causal attention."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_dir, attn_implementation="sdpa")
    lora = policy.spec.lora
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    set_peft_model_state_dict(model, {name: tensor.clone() for name, tensor in policy.adapter.tensors().items()})
    return model


def plain_logprobs(model, token_ids: Sequence[int], temperature: float):
    """Return the (T-1,) log-probabilities of the tokens after the first, for a single sequence."""
    import torch

    ids_T = torch.tensor(token_ids)
    logps_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0] / temperature, -1)
    return logps_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]


def trainable(model) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def relative_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Return the L2 distance of two sets of tensors, divided by the norm of the second."""
    assert set(left) == set(right)
    distance = sum(float((left[name] - right[name]).square().sum()) for name in left) ** 0.5
    return distance / sum(float(right[name].square().sum()) for name in right) ** 0.5
