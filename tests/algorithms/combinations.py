"""Combinations of the policy gradients' settings, whose gradients `test_gradient_matrix` compares with the formulas.

Options are read from the specs, so a new option is included automatically. docs/reference/algorithms.md
shows which combinations are rejected (`docs.gradients`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations as subsets
from typing import Any, get_args

from components.algorithms.policy_gradient.spec import GRPOSpec, PolicyGradientSpec
from components.errors import Problem

ALGORITHMS: dict[str, type[GRPOSpec]] = {
    spec_class.model_fields["name"].default: spec_class for spec_class in (GRPOSpec, *GRPOSpec.__subclasses__())
}
COEFFICIENT = 0.1
"""Weight of the KL penalty, if there is one."""
NO_KL = "none"


def options(key: str, spec: type[PolicyGradientSpec] = GRPOSpec) -> tuple[str, ...]:
    return get_args(spec.model_fields[key].annotation)


FORMS: tuple[tuple[str, str], ...] = (("episode", "index"), *(("turns", form) for form in options("turn_baseline")))
"""Values of credit and turn_baseline; the latter has no effect without turns."""
KL_PLACES = (NO_KL, *options("kl_in"))


@dataclass(frozen=True)
class Combination:
    algorithm: str
    credit: str
    turn_baseline: str
    ratio: str
    kl_in: str
    """Place of the KL penalty; `none` sets its coefficient to 0."""
    estimator: str

    def __str__(self) -> str:
        form = self.credit if self.credit == "episode" else f"{self.credit} by {self.turn_baseline}"
        kl = "no KL" if self.kl_in == NO_KL else f"{self.estimator} in {self.kl_in}"
        return f"{self.algorithm}, {form}, {self.ratio}, {kl}"

    def spec(self, **more: Any) -> GRPOSpec:
        kl = {} if self.kl_in == NO_KL else {"kl_in": self.kl_in, "kl_estimator": self.estimator}
        return ALGORITHMS[self.algorithm](
            credit=self.credit,
            turn_baseline=self.turn_baseline,
            ratio=self.ratio,
            kl_coefficient=COEFFICIENT if kl else 0.0,
            **kl,
            **more,
        )


def combinations() -> Iterator[Combination]:
    """Yield every algorithm with each credit, ratio and place of the KL penalty; all turn baselines with grpo; all
    estimators with grpo and with the algorithms whose KL penalty is not in the loss. Other combinations are settings of
    the same code."""
    for name, algorithm in ALGORITHMS.items():
        default_estimator = algorithm.model_fields["kl_estimator"].default
        all_estimators = name == "grpo" or algorithm.model_fields["kl_in"].default != "loss"
        for credit, form in FORMS if name == "grpo" else FORMS[:2]:
            for ratio in options("ratio"):
                for kl_in in KL_PLACES:
                    for estimator in (
                        options("kl_estimator") if all_estimators and kl_in != NO_KL else (default_estimator,)
                    ):
                        yield Combination(name, credit, form, ratio, kl_in, estimator)


def covering(rows: Sequence[tuple[Hashable, ...]]) -> list[tuple[Hashable, ...]]:
    """Return rows that contain every pair of values that any row contains: a covering array of strength 2, greedily.
    Defects depend on the interaction of two settings far more often than of three (Kuhn, Wallace and Gallo, "Software
    fault interactions and implications for software testing", 2004)."""
    pairs = {row: set(subsets(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def problems(spec: GRPOSpec) -> list[Problem]:
    """Return the reasons why an experiment with these settings is rejected."""
    return list(spec.problems())


BASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "gspo, turns": {"algorithm": "gspo", "credit": "turns", "kl_coefficient": 0.1, "clip_low": 0.05, "clip_high": 0.05},
    "rloo": {"algorithm": "rloo"},
    "reinforce_pp, turns": {"algorithm": "reinforce_pp", "credit": "turns", "ratio": "sequence"},
}
"""Base settings that the `VARIATIONS` are combined with."""

VARIATIONS: dict[str, dict[str, Any]] = {
    **{
        f"baseline {baseline}, scale {scale}": {"baseline": baseline, "scale": scale}
        for baseline in options("baseline")
        for scale in options("scale")
    },
    **{f"by {form}, discounted": {"turn_baseline": form, "discount": 0.8} for form in options("turn_baseline")},
    "states weighted": {"turn_baseline": "state", "state_weight": 0.5},
    "states, baseline leave_one_out": {"turn_baseline": "state", "baseline": "leave_one_out", "scale": "none"},
    "states, baseline batch": {"turn_baseline": "state", "baseline": "batch", "scale": "batch"},
    "process, scale batch": {"turn_baseline": "process", "baseline": "group", "scale": "batch"},
    "mean over tokens": {"normalization": "tokens"},
    "mean over sequences": {"normalization": "sequences"},
    "constant length": {"normalization": "constant", "constant_length": 20},
    "entropy": {"entropy_coefficient": 0.05},
    "cispo": {"objective": "cispo"},
    "cispo, ratio sequence_mean": {"objective": "cispo", "ratio": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1},
    "no dual clip": {"dual_clip": None},
    "close dual clip": {"dual_clip": 1.2},
    "overlong": {"overlong": 9, "overlong_buffer": 4, "overlong_penalty": 0.5},
    "overlong without buffer": {"overlong": 8, "discount": 0.8},
    "cut-off episodes left out": {"mask_truncated": True},
    **{
        f"{method} by {level}": {"correction": method, "correction_level": level, "correction_limit": limit}
        for method in ("truncate", "mask")
        for level, limit in (("token", 1.3), ("sequence", 3.0))
    },
}


def factors(combination: Combination, histories: str) -> tuple[str, ...]:
    return (*astuple(combination), histories)


def varied(base: str, variation: str, **more: Any) -> GRPOSpec:
    settings = BASES[base] | VARIATIONS[variation] | more
    return ALGORITHMS[settings.pop("algorithm")](**settings)
