"""Gradients of the trainers and of the formulas (`papers`) on the same episodes, in float64 (`plain_llama`).

A training takes two gradient steps. After the first step the parameters are replaced, so that in the second step the
policy differs from the one before the first step by a known amount, whatever the gradient was.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from components.trajectories.schema import Trajectory
from tests.algorithms import papers
from tests.algorithms.builders import MODEL, VOCABULARY, make_context, make_history, make_trajectory
from tests.algorithms.papers import Episode
from tests.algorithms.plain_llama import Adapter, PlainLlama, flat

TEMPERATURE = 0.7
FREE: dict[str, Any] = {"max_grad_norm": 1e9, "pack_tokens": 64}
"""Settings without gradient clipping and with more than one pack."""
UNGUARDED: dict[str, Any] = {**FREE, "max_kl": 1e9, "epochs": 2, "measure_kl": False}
HISTORIES = ("one history", "three histories")


# --- episodes -------------------------------------------------------------------------------------------------------


def layouts(histories: str) -> list[list[int]]:
    """Return the number of turns of each history, for the three episodes of a group. A history ends where the context
    was rewritten."""
    return [[3], [2], [3]] if histories == "one history" else [[1, 1, 1], [3], [2, 1, 1]]


def episodes(histories: str, seed: int = 0) -> tuple[list[Trajectory], list[Episode]]:
    """Return three groups of three episodes, as trajectories and as inputs of the formulas. The engine's
    log-probabilities are not set yet."""
    draw = random.Random(f"{seed}-{histories}")

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(low, high))]

    trajectories, inputs = [], []
    system = tokens(5, 5)
    for group in range(3):
        task, shared = tokens(4, 4), tokens(2, 2)
        for sample, layout in enumerate(layouts(histories)):
            built, states, turn_of, history_of = [], [], [], []
            for index, turns in enumerate(layout):
                parts: list[tuple[bool, list[int]]] = []
                contents = []
                for turn in range(turns):
                    # Later histories begin with a summary instead of the task.
                    state = "task" if index == turn == 0 else draw.choice(["hall", "door"])
                    prompt = system + (task if index == 0 else tokens(2, 4)) if turn == 0 else tokens(1, 3)
                    answer = [*(shared[: draw.randint(1, 2)] if index == turn == 0 else []), *tokens(1, 4)]
                    parts += [(False, prompt), (True, answer)]
                    contents += [state, ""]
                    turn_of += [len(states)] * len(answer)
                    history_of += [index] * len(answer)
                    states.append(state)
                count = sum(len(part) for sampled, part in parts if sampled)
                built.append(make_history(parts, [0.0] * count))
                for message, content in zip(built[-1].messages, contents, strict=True):
                    message.content = content
            reward = round(draw.random(), 3)
            steps = [round(draw.uniform(-1, 1), 3) for _ in states]
            cut_off = (group, sample) == (1, 1)
            if cut_off:
                built[-1].messages[-1].finish_reason = "length"
            result = make_trajectory(f"s{group}", sample, built, reward, sampling={"temperature": TEMPERATURE})
            result.step_rewards = steps
            trajectories.append(result)
            inputs.append(Episode(f"s{group}", reward, steps, states, turn_of, history_of, cut_off))
    return trajectories, inputs


def set_sampler(trajectories: Sequence[Trajectory], old: Sequence[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """Set the engine's log-probabilities: those of the policy before the first step, perturbed by 0.3 nats on average
    and by more at a few tokens. Return them."""
    draw = random.Random(seed)
    result = []
    for trajectory, old_S in zip(trajectories, old, strict=True):
        noise = [draw.choice([-1.6, 1.6]) if draw.random() < 0.08 else draw.gauss(0, 0.3) for _ in old_S]
        sampler_S = (old_S + torch.tensor(noise, dtype=torch.float64)).float()
        result.append(sampler_S.double())
        values = iter(sampler_S.tolist())
        for history in trajectory.histories:
            history.logprobs = [next(values) if sampled else float("nan") for sampled in history.sampled_mask()]
    return result


def split(trajectory: Trajectory) -> Trajectory:
    """Return the same episode with one history per turn, which repeats everything before the turn: every token is
    sampled in the same context."""
    built = []
    for history in trajectory.histories:
        for message in history.messages:
            if message.span is not None:
                start, end = message.span
                parts = [(False, history.token_ids[:start]), (True, history.token_ids[start:end])]
                built.append(make_history(parts, history.logprobs[start:end]))
                built[-1].messages[-1].finish_reason = message.finish_reason
    return replace(trajectory, histories=built)


# --- the formulas' side ---------------------------------------------------------------------------------------------


Columns = dict[str, torch.Tensor]
"""Columns of shape (S,), by name."""


@dataclass
class Reading:
    """Columns of a policy for the sampled tokens of all episodes, and their Jacobians with respect to its
    parameters."""

    columns: Columns
    jacobians: dict[str, torch.Tensor]
    """Jacobians of shape (S, P), by column."""

    def gradient(self, loss: Callable[[Columns], torch.Tensor]) -> torch.Tensor:
        """Return the (P,) gradient of a loss of the columns, by the chain rule."""
        inputs = {name: column.clone().requires_grad_() for name, column in self.columns.items()}
        by_column = torch.autograd.grad(loss(inputs), list(inputs.values()), allow_unused=True)
        pairs = zip(by_column, self.jacobians.values(), strict=True)
        return sum((by_S @ jacobian_SP for by_S, jacobian_SP in pairs if by_S is not None), torch.zeros(()))


def learned(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return the tensors in float64, with gradient, in the order of `flat`."""
    return {name: tensor.double().requires_grad_() for name, tensor in sorted(adapter.items())}


def sampled_places(trajectories: Sequence[Trajectory]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids and the indices of the sampled tokens of each history, over all episodes."""
    return [
        (history_.token_ids, [index for index, sampled in enumerate(history_.sampled_mask()) if sampled])
        for trajectory in trajectories
        for history_ in trajectory.histories
    ]


def logprobs_and_entropies(
    model: PlainLlama, adapter: Adapter | None, token_ids: list[int], positions: list[int], temperature: float
) -> Columns:
    """Return the columns of one history."""
    logps_SV = model.logps(model.hidden(token_ids, adapter)[[position - 1 for position in positions]], temperature)
    chosen_S1 = logps_SV.gather(-1, torch.tensor([token_ids[position] for position in positions])[:, None])
    return {"logprob": chosen_S1[:, 0], "entropy": -(logps_SV.exp() * logps_SV).sum(-1)}


def logprobs(
    model: PlainLlama, adapter: Adapter | None, trajectories: Sequence[Trajectory], temperature: float
) -> torch.Tensor:
    """Return the (S,) log-probabilities of the sampled tokens, without gradient."""
    with torch.no_grad():
        columns = [
            logprobs_and_entropies(model, adapter, *history_inputs, temperature)["logprob"]
            for history_inputs in sampled_places(trajectories)
        ]
    return torch.cat(columns)


def reading(parameters: Mapping[str, torch.Tensor], histories: Iterable[Columns]) -> Reading:
    """Return the reading. parameters: result of `learned`. histories: columns of each history, with the graph of their
    forward pass."""
    columns, jacobians = defaultdict(list), defaultdict(list)
    for history_columns in histories:
        for number, (name, values) in enumerate(history_columns.items(), start=1):
            rows = torch.autograd.grad(
                values,
                list(parameters.values()),
                torch.eye(len(values), dtype=torch.float64),
                is_grads_batched=True,
                retain_graph=number < len(history_columns),
                allow_unused=True,
            )
            filled = [
                torch.zeros(len(values), parameter.numel(), dtype=torch.float64)
                if row is None
                else row.reshape(len(values), -1)
                for row, parameter in zip(rows, parameters.values(), strict=True)
            ]
            columns[name].append(values.detach())
            jacobians[name].append(torch.cat(filled, 1))
    return Reading(*({name: torch.cat(parts) for name, parts in by_name.items()} for by_name in (columns, jacobians)))


def policy_reading(
    model: PlainLlama, adapter: Adapter, trajectories: Sequence[Trajectory], temperature: float
) -> Reading:
    parameters = learned(adapter)
    return reading(
        parameters,
        (
            logprobs_and_entropies(model, parameters, *history_inputs, temperature)
            for history_inputs in sampled_places(trajectories)
        ),
    )


# --- both sides -----------------------------------------------------------------------------------------------------


class Replaces(torch.optim.Optimizer):
    """Optimizer that records the gradient of each step and replaces the parameters by given ones after the first
    step."""

    def __init__(self, groups: Sequence[Mapping[str, torch.nn.Parameter]], then: Adapter):
        self.named = {name: parameter for group in groups for name, parameter in group.items()}
        self.then = then
        self.gradients: list[torch.Tensor] = []
        super().__init__([{"params": list(group.values())} for group in groups], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        self.gradients.append(flat({name: parameter.grad for name, parameter in self.named.items()}))
        for name, parameter in self.named.items():
            parameter.copy_(self.then[name])


def moved(adapter: Adapter, by: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: tensor + by * torch.randn(tensor.shape, generator=generator) for name, tensor in adapter.items()}


class Bench:
    """The tiny model, its episodes, and its adapters: before the first step, after it, and the reference. Weights are
    scaled up, because a fresh model assigns nearly the same probability to every token."""

    def __init__(self, base_dir: Path, folder: Path):
        """Build the bench from a tiny model, in an empty folder."""
        import shutil

        from safetensors.torch import load_file, save_file

        from components.algorithms.policy.policy import Policy

        self.base_dir = folder / "base"
        shutil.copytree(base_dir, self.base_dir)
        weights = load_file(self.base_dir / "model.safetensors")
        scaled = {
            name: tensor * (8.0 if "embed" in name else 1.0 if "norm" in name else 4.0)
            for name, tensor in weights.items()
        }
        save_file(scaled, self.base_dir / "model.safetensors", metadata={"format": "pt"})
        self.policy = Policy(self.base_dir, MODEL, 0)
        assert MODEL.lora is not None
        self.model = PlainLlama(self.base_dir, MODEL.lora.alpha / MODEL.lora.rank)
        fresh = {name: parameter.detach().clone() for name, parameter in self.policy.parameters.items()}
        generator = torch.Generator().manual_seed(1)
        self.start = moved(fresh, 0.05, generator)
        self.after = moved(self.start, 0.02, generator)
        # With this seed, KTO's reference point is above 0.
        self.reference = moved(self.start, 0.012, torch.Generator().manual_seed(29))
        self.set(self.reference)
        self.policy.save(folder / "reference")
        self.policy.use_reference(folder / "reference")
        self._scratch, self._count = folder, 0

    def set(self, adapter: Adapter) -> None:
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                parameter.copy_(adapter[name])

    def scratch(self) -> Path:
        self._count += 1
        folder = self._scratch / f"scratch{self._count}"
        folder.mkdir()
        return folder

    @cached_property
    def batches(self) -> dict[str, Batch]:
        return {name: Batch(self, name) for name in HISTORIES}


class Batch:
    """Episodes of one kind, and the policies' columns at the sampling temperature and at temperature 1."""

    def __init__(self, bench: Bench, histories: str):
        self.bench = bench
        self.trajectories, self.episodes = episodes(histories)
        self.steps = self._steps(TEMPERATURE)
        self.old = self.split(self.steps[0].columns["logprob"])
        self.reference = self.split(logprobs(bench.model, bench.reference, self.trajectories, TEMPERATURE))
        self.sampler = set_sampler(self.trajectories, self.old)

    def _steps(self, temperature: float) -> list[Reading]:
        """Return the readings of the policy in the first and in the second step."""
        return [
            policy_reading(self.bench.model, adapter, self.trajectories, temperature)
            for adapter in (self.bench.start, self.bench.after)
        ]

    @cached_property
    def plain_steps(self) -> list[Reading]:
        return self._steps(1.0)

    @cached_property
    def plain_reference(self) -> list[torch.Tensor]:
        return self.split(logprobs(self.bench.model, self.bench.reference, self.trajectories, 1.0))

    def split(self, column_S: torch.Tensor) -> list[torch.Tensor]:
        """Return a column by episode."""
        return list(column_S.split([episode.tokens for episode in self.episodes]))

    def columns(self, columns: Columns) -> list[papers.Columns]:
        """Return the columns of each episode, as the formulas read them."""
        logprob, entropy = self.split(columns["logprob"]), self.split(columns["entropy"])
        rows = zip(logprob, self.old, self.sampler, self.reference, entropy, strict=True)
        return [papers.Columns(*row) for row in rows]


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.norm() > 0, "a gradient of 0 would show nothing"
    return float((ours - expected).norm() / expected.norm())


def step_errors(
    optimizer: Replaces,
    logs: Sequence[Mapping[str, float]],
    steps: Sequence[Reading],
    loss: Callable[[Columns], torch.Tensor],
) -> list[float]:
    """Return the relative error of the gradient of each step, and the absolute error of the logged loss of each."""
    gradients = [
        relative_error(ours, step.gradient(loss)) for ours, step in zip(optimizer.gradients, steps, strict=True)
    ]
    losses = [abs(log["loss"] - float(loss(step.columns))) for log, step in zip(logs, steps, strict=True)]
    return gradients + losses


def policy_gradient_errors(bench: Bench, spec: Any, histories: str) -> list[float]:
    """Return the errors of the trainer's gradient and loss in each of its two steps. Of a product of ratios only the
    gradients are compared: the formula, which counts it once for each token, has another value."""
    from components.algorithms.policy_gradient.trainer import train_policy_gradient

    batch, policy = bench.batches[histories], bench.policy
    bench.set(bench.start)
    optimizer = Replaces([policy.parameters], bench.after)
    logs: list[dict[str, float]] = []
    options = {"step": 0, "seed": 0, "scratch": bench.scratch(), "on_step": logs.append}
    train_policy_gradient(spec, make_context(policy, optimizer, batch.trajectories, **options))

    def loss(columns: Columns) -> torch.Tensor:
        return papers.policy_gradient(spec, batch.episodes, batch.columns(columns))

    errors = step_errors(optimizer, logs, batch.steps, loss)
    return errors[:2] if spec.ratio == "sequence" else errors
