"""Advantages, losses and gradients against those of verl and torchrl, on random responses of different lengths.

    python -m tests.conformance.algorithms --python PYTHON [--json]

PYTHON is that of an environment with verl and torchrl (`peers/rl_libraries.py`, which runs there). A case is one
formula: equal within `TOLERANCE` of the largest value. TRL is compared in tests/algorithms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from components.algorithms.policy_gradient import losses
from components.algorithms.policy_gradient.advantages import advantages
from components.algorithms.ppo.gae import gae
from tests.conformance.report import Case, Report, show

COMMAND = "python -m tests.conformance.algorithms --python PYTHON"
PEER = Path(__file__).parent / "peers" / "rl_libraries.py"
TOLERANCE = 1e-6
GROUPS, SIZE, LONGEST = 6, 4, 9
"""Groups, responses in each, and tokens of the longest response."""
CORRECTED = f"GRPO advantages, x sqrt({SIZE} / {SIZE - 1})"


def problem(seed: int = 0) -> dict[str, Any]:
    """Return random responses. Ratios of policies are from about 0.2 to 5, so that every clip removes some gradients;
    one group has equal rewards."""
    draw = torch.Generator().manual_seed(seed)
    count = GROUPS * SIZE

    def normal(scale: float, shift: float = 0.0) -> torch.Tensor:
        return scale * torch.randn(count, LONGEST, generator=draw, dtype=torch.float64) + shift

    lengths = torch.randint(1, LONGEST + 1, (count, 1), generator=draw)
    logprob = -normal(1.0).abs() - 0.1
    rewards = torch.rand(count, generator=draw, dtype=torch.float64)
    rewards[:SIZE] = 1.0
    columns = {
        "mask": (torch.arange(LONGEST) < lengths).double(),
        "logprob": logprob,
        "old": logprob + normal(0.5),
        "reference": logprob + normal(0.5),
        "advantage": normal(1.0, 0.1),
        "value": normal(1.0),
        "old_value": normal(1.0),
        "return": normal(1.0),
    }
    return {
        **{name: column.tolist() for name, column in columns.items()},
        "rewards": rewards.tolist(),
        "groups": [f"group-{number // SIZE}" for number in range(count)],
        "discount": 0.97,
        "lambda": 0.9,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "clip_value": 0.2,
    }


def ours(problem: dict[str, Any]) -> dict[str, Any]:
    """Return this project's results, with the names of the peer."""
    mask = torch.tensor(problem["mask"]).bool()
    tokens = mask.sum(1)
    result: dict[str, Any] = {}
    groups = [[[reward] for reward in problem["rewards"][i : i + SIZE]] for i in range(0, GROUPS * SIZE, SIZE)]

    def flat(baseline: Any, scale: Any) -> list[float]:
        return [row[0] for group in advantages(groups, baseline=baseline, scale=scale) for row in group]

    result[CORRECTED] = flat("group", "group")
    result["Dr. GRPO advantages"] = flat("group", "none")
    result["RLOO advantages"] = flat("leave_one_out", "none")
    rows = []
    for reward, value, count in zip(problem["rewards"], problem["value"], tokens.tolist(), strict=True):
        row = gae([0.0] * (count - 1) + [reward], value[:count], problem["discount"], problem["lambda"])
        rows.append(row + [0.0] * (LONGEST - count))
    result["GAE, verl"] = result["GAE, torchrl"] = rows

    column = {
        name: torch.tensor(problem[name], dtype=torch.float64)[mask]
        for name in ("logprob", "old", "reference", "advantage", "value", "old_value", "return")
    }
    sequence = torch.arange(len(tokens)).repeat_interleave(tokens)
    by_token = torch.full((len(sequence),), 1 / len(sequence), dtype=torch.float64)
    by_response = (1 / (tokens * len(tokens)).double()).repeat_interleave(tokens)
    low, high, dual = problem["clip_low"], problem["clip_high"], problem["dual_clip"]
    advantage = column["advantage"]

    def ratio(logprob: torch.Tensor) -> torch.Tensor:
        return losses.ratio(losses.log_ratio(logprob, column["old"]))

    def gspo(logprob: torch.Tensor) -> torch.Tensor:
        log_ratio = losses.log_ratio(logprob, column["old"])
        level = losses.sequence_log_ratio(log_ratio, sequence, tokens[sequence], "sequence_mean")
        return losses.clipped_policy_loss(losses.ratio(level), advantage, low, high)

    def ppo(logprob: torch.Tensor) -> torch.Tensor:
        return losses.clipped_policy_loss(ratio(logprob), advantage, low, high, dual)

    def cispo(logprob: torch.Tensor) -> torch.Tensor:
        return losses.cispo_loss(ratio(logprob), logprob, advantage, low, high)

    def add(name: str, loss: Callable[[torch.Tensor], torch.Tensor], by: torch.Tensor, weight: torch.Tensor) -> None:
        variable = by.clone().requires_grad_()
        total = (loss(variable) * weight).sum()
        (gradient,) = torch.autograd.grad(total, variable)
        padded = torch.zeros(mask.shape, dtype=torch.float64)
        padded[mask] = gradient
        result[name] = [total.item()]
        result[f"{name}, gradient"] = padded.tolist()

    add("PPO with dual clip", ppo, column["logprob"], by_token)
    add("PPO with dual clip, mean of responses", ppo, column["logprob"], by_response)
    add("GSPO", gspo, column["logprob"], by_response)
    add("CISPO", cispo, column["logprob"], by_token)

    def value_loss(value: torch.Tensor) -> torch.Tensor:
        return losses.clipped_value_loss(value, column["old_value"], column["return"], problem["clip_value"])

    add("clipped value loss", value_loss, column["value"], by_token)
    for estimator in ("k1", "k2", "k3"):

        def divergence(logprob: torch.Tensor, estimator: Any = estimator) -> torch.Tensor:
            return losses.kl(logprob, column["reference"], estimator)

        add(f"KL estimator {estimator}", divergence, column["logprob"], torch.ones_like(by_token))
    return result


def cases(mine: dict[str, Any], theirs: dict[str, Any]) -> list[Case]:
    """Return one case for each result of the peer."""
    theirs = dict(theirs)
    # verl divides by the standard deviation of a sample + 1e-6, this project by that of a population + 1e-6: after the
    # correction a difference of at most 1e-6 / deviation remains.
    factor = math.sqrt(SIZE / (SIZE - 1))
    corrected = [factor * value for value in theirs.pop("GRPO advantages")]
    return [compared(CORRECTED, mine[CORRECTED], corrected, 1e-4)] + [
        compared(name, mine[name], value) for name, value in theirs.items()
    ]


def compared(name: str, mine: Any, theirs: Any, tolerance: float = TOLERANCE) -> Case:
    """Return the case of one result. tolerance: relative to the largest value."""
    first, second = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    difference, largest = float((first - second).abs().max()), float(second.abs().max())
    if difference <= tolerance * largest:
        return Case(name, "passed")
    return Case(name, "failed", f"largest difference {difference:.2g} of values up to {largest:.2g}")


def run(python: Path | None) -> Report:
    """Compare with the libraries of an environment."""
    if python is None or not python.is_file():
        text = (
            f"--python {python}: no such file" if python else "no --python PYTHON of an environment with verl, torchrl"
        )
        return Report("RL libraries", "", COMMAND, reason=text)
    posed = problem()
    done = subprocess.run(
        [python, PEER],
        input=json.dumps(posed),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Report("RL libraries", "", COMMAND, reason=f"{python} {PEER.name}: {last}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    versions = ", ".join(f"{name} {number}" for name, number in answer["versions"].items())
    return Report("RL libraries", versions, COMMAND, cases(ours(posed), answer["results"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, metavar="PYTHON", help="Python of an environment with verl and torchrl")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    return show(run(options.python), options.json)


if __name__ == "__main__":
    sys.exit(main())
