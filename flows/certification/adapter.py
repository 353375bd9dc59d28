"""Check that the engine answers with the weights that it was given last.

Two probes, policies with random non-zero changes, are delivered to the engine as a run delivers its policies, then the
base model again. After each delivery, the log-probabilities of sampled tokens have to equal those that the trainer
computes with these weights, and to differ from those with the others. A probe's change is enlarged until it moves the
log-probabilities clearly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError
from components.evaluation.checks import PropertyCheck, check_result
from components.inference.protocol import BASE_POLICY, Sampling
from components.models import trained_weights
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory
from flows.certification.completions import LogprobDifference, logprobs_under, sample, sampled_logprobs
from flows.certification.subject import Subject

if TYPE_CHECKING:
    import torch

NAME = "adapter"
PROBES = ("probe 1", "probe 2")
BASE = "the base model"
FIRST_SCALE = 0.01
"""First standard deviation of a probe's change; of all weights relative to their own deviation."""
MOST_STEPS = 12
"""Maximum number of enlargements of a probe."""
MOST_GROWTH = 8.0
"""Maximum factor of one enlargement."""
SEPARATION = 10.0
"""Factor by which a probe's mean change of the log-probabilities exceeds the tolerance of the mean."""
LEAST_CHANGE = 0.05
"""Least mean change of the log-probabilities, in nats."""


class Probes:
    """Probe policies as checkpoint folders."""

    def __init__(self, subject: Subject, trajectories: Sequence[Trajectory]):
        self._subject = subject
        self.folders: dict[str, Path] = {}
        """Folder of the trained weights of each probe."""
        self.changes: dict[str, float] = {}
        """Mean change of the log-probabilities by each probe, in nats."""
        self._scale = FIRST_SCALE
        with self.loaded(BASE):
            base_S = logprobs_under(subject, trajectories, Cut())
        for seed, name in enumerate(PROBES, 1):
            self._make(name, seed, trajectories, base_S)

    def _make(self, name: str, seed: int, trajectories: Sequence[Trajectory], base_S: torch.Tensor) -> None:
        """Draw a probe that changes the log-probabilities of these completions clearly, and save it."""
        policy = self._subject.trainer
        expected = max(LEAST_CHANGE, SEPARATION * self._subject.mean_tolerance)
        folder = policy.folder(self._subject.scratch / name.replace(" ", "-"))
        change = 0.0
        for _ in range(MOST_STEPS):
            _randomize(policy, seed, self._scale)
            change = LogprobDifference.of(logprobs_under(self._subject, trajectories, Cut()), base_S).mean
            if change >= expected:
                break
            self._scale *= min(MOST_GROWTH, 1.5 * expected / max(change, 1e-9))  # the change is about proportional
        policy.save(folder)
        self.folders[name], self.changes[name] = folder, change

    @contextlib.contextmanager
    def loaded(self, name: str) -> Iterator[None]:
        """Compute with a probe, or with the base model, in the trainer within the context."""
        policy = self._subject.trainer
        if name == BASE:
            with policy.as_reference():
                yield
            return
        policy.load(self.folders[name])
        yield


def check_adapter(subject: Subject) -> PropertyCheck:
    """Deliver probes and the base model in turn, and name the weights that answer."""
    sampling = Sampling(max_tokens=subject.sampling.max_tokens)  # the whole distribution, so that only weights matter
    probes = Probes(subject, sample(subject, subject.deliver(None), sampling, samples=1, turns=1))
    failures: list[str] = []
    figures: dict[str, Any] = {"probe_change": min(probes.changes.values())}
    largest, others = 0.0, []
    for delivered in (*PROBES, BASE):
        folder = probes.folders.get(delivered)
        try:
            engine = subject.deliver(folder)
            trajectories = sample(subject, engine, sampling, samples=1, turns=1)
        except EspalierError as error:
            failures.append(f"{delivered} cannot be delivered: {error}")
            break
        version = BASE_POLICY if folder is None else trained_weights.digest(folder)
        if engine.policy != version:
            failures.append(f"the engine says that it holds {engine.policy} after {version} was delivered")
        sampled_S = sampled_logprobs(trajectories)
        differences = {}
        for name in (*PROBES, BASE):
            with probes.loaded(name):
                differences[name] = LogprobDifference.of(sampled_S, logprobs_under(subject, trajectories, Cut()))
        largest = max(largest, differences[delivered].largest)
        others += [difference.mean for name, difference in differences.items() if name != delivered]
        answering = [name for name in differences if differences[name].within(subject)]
        if answering != [delivered]:
            other = " and ".join(answering) or "none of the probes and the base model"
            failures.append(
                f"after {delivered} was delivered, the log-probabilities are those of {other} (they differ from those "
                f"of {delivered} by up to {differences[delivered].largest:.3g} nats)"
            )
    figures |= {"max_own": largest, "mean_others": min(others, default=None)}
    return check_result(NAME, failures, figures)


def _randomize(policy: Any, seed: int, scale: float) -> None:
    """Set a random change of the base model: the factor B of each adapter, or noise on all weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    base: dict[str, torch.Tensor] = {}
    if policy.adapter is None:
        with policy.as_reference():
            base = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    with torch.no_grad():
        for name, parameter in sorted(policy.parameters.items()):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if policy.adapter is None:
                spread = base[name].float().std(correction=0).item()
                parameter.copy_(base[name] + scale * spread * noise)
            elif ".lora_B." in name:
                parameter.copy_(scale * noise)
