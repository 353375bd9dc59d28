"""Checks of the sampler against the trainer: log-probabilities, and the mass that the sampling cut keeps.

A cut (top_p, arXiv:1904.09751; top_k; min_p, arXiv:2407.01082) keeps a set K of tokens and renormalizes. With p the
distribution after the temperature, log p_K(t) = log p(t) - log sum_{k in K} p(k). So the kept mass of each position is
exp(log p(t) - log p_K(t)), of the trainer's distribution and of the sampler's alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from components.evaluation.checks import PropertyCheck, check_result
from components.inference.protocol import Engine
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory
from flows.certification.completions import (
    LogprobDifference,
    logprobs_under,
    sample,
    sampled_logprobs,
    trained_logprobs,
)
from flows.certification.subject import Subject

if TYPE_CHECKING:
    import torch

LOGPROBS, KEPT_MASS = "logprobs", "kept_mass"
LEAST_KEPT = 0.5
"""Mean kept mass below which the check fails."""
ENOUGH_KEPT = 0.9
"""Mean kept mass below which the check warns."""


@dataclass
class Measured:
    """Completions at the experiment's sampling settings, with the log-probabilities of sampler and trainer."""

    subject: Subject
    cut: Cut
    trajectories: Sequence[Trajectory]
    sampler_S: torch.Tensor
    trainer_S: torch.Tensor

    @classmethod
    def of(cls, subject: Subject, engine: Engine) -> Measured:
        """Sample and compute. Greedy decoding has no distribution; it is measured at temperature 1 without a cut."""
        sampling = subject.sampling
        if sampling.temperature == 0:
            sampling = replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        trajectories = sample(subject, engine, sampling)
        trainer_S = trained_logprobs(subject, trajectories, subject.scratch / "logprobs")
        cut = Cut(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        return cls(subject, cut, trajectories, sampled_logprobs(trajectories), trainer_S)

    @cached_property
    def whole_S(self) -> torch.Tensor:
        """Log-probabilities after the temperature, without a cut, by the trainer's policy."""
        return logprobs_under(self.subject, self.trajectories, Cut(self.cut.temperature))

    @cached_property
    def cut_S(self) -> torch.Tensor:
        """Log-probabilities after temperature and cut, by the trainer's policy."""
        return self.whole_S if self.cut.whole else logprobs_under(self.subject, self.trajectories, self.cut)

    @cached_property
    def raw_S(self) -> torch.Tensor:
        """Log-probabilities at temperature 1 without a cut, by the trainer's policy."""
        return logprobs_under(self.subject, self.trajectories, Cut())

    def distribution(self, values_S: torch.Tensor) -> str:
        """Return the distribution that log-probabilities are of, in words; empty if it is none of the known ones."""
        known: dict[str, Callable[[], torch.Tensor]] = {
            "the distribution of `collect`": lambda: self.cut_S,
            "the distribution without a cut": lambda: self.whole_S,
            "the distribution at temperature 1 without a cut": lambda: self.raw_S,
        }
        for name, expected in known.items():
            if LogprobDifference.of(values_S, expected()).within(self.subject):
                return name
        above_S = values_S - self.whole_S
        if bool((above_S >= -self.subject.tolerance).all()) and float(above_S.mean()) > self.subject.mean_tolerance:
            return "a distribution with another cut"
        return ""


def check_logprobs(measured: Measured) -> PropertyCheck:
    """Compare the log-probabilities of the sampled tokens."""
    subject = measured.subject
    difference = LogprobDifference.of(measured.sampler_S, measured.trainer_S)
    figures: dict[str, Any] = {"episodes": len(measured.trajectories)}
    figures["histories"] = sum(len(trajectory.histories) for trajectory in measured.trajectories)
    figures |= {"tokens": len(measured.sampler_S), "max": difference.largest, "mean": difference.mean}
    figures |= {"max_tolerance": subject.tolerance, "mean_tolerance": subject.mean_tolerance}
    failures = []
    if not difference.within(subject):
        sampler = measured.distribution(measured.sampler_S) or "none that the trainer's weights give"
        trainer = measured.distribution(measured.trainer_S) or "none of the known ones"
        failures.append(
            f"log-probabilities differ by up to {difference.largest:.3g} nats (mean {difference.mean:.3g}); expected "
            f"at most {subject.tolerance:g} (mean {subject.mean_tolerance:g}). Those of the sampler are of {sampler}, "
            f"those of the trainer of {trainer}"
        )
    return check_result(LOGPROBS, failures, figures)


def check_kept_mass(measured: Measured) -> PropertyCheck:
    """Compute the mass that the cut keeps, and compare the cuts of sampler and trainer."""
    kept_S = (measured.whole_S - measured.cut_S).exp().clamp(max=1.0)
    mean, least = float(kept_S.mean()), float(kept_S.min())
    cut = measured.cut
    cuts = {"top_p": cut.top_p, "top_k": cut.top_k, "min_p": cut.min_p}
    figures: dict[str, Any] = {"temperature": cut.temperature, **cuts, "mean_kept": mean, "min_kept": least}
    failures, warnings = [], []
    names = {"sampler": measured.sampler_S, "trainer": measured.trainer_S}
    labels = {name: measured.distribution(values_S) for name, values_S in names.items()}
    if all(labels.values()) and labels["sampler"] != labels["trainer"]:
        masses = {
            name: float((measured.whole_S - values_S).exp().clamp(max=1.0).mean()) for name, values_S in names.items()
        }
        figures |= {f"{name}_kept": value for name, value in masses.items()}
        failures.append(
            f"the sampler draws from {labels['sampler']}, which keeps {masses['sampler']:.3f} of the mass; the trainer "
            f"computes {labels['trainer']}, which keeps {masses['trainer']:.3f}"
        )
    shown = ", ".join(f"collect.{name}={value:g}" for name, value in cuts.items() if value != getattr(Cut(), name))
    text = (
        f"{shown} keeps {mean:.3f} of the mass on average: tokens outside are never sampled, so they are never learned"
    )
    if mean < LEAST_KEPT:
        failures.append(f"{text}; expected at least {LEAST_KEPT:g}")
    elif mean < ENOUGH_KEPT:
        warnings.append(f"{text}; expected at least {ENOUGH_KEPT:g}")
    return check_result(KEPT_MASS, failures, figures, warnings=warnings, note="" if shown else "no cut is set")
