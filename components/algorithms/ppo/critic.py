"""The critic of PPO: value head, statistics and KL coefficient, which it carries from round to round.

A value estimates, at the node that predicts a token, the sum of the rewards from that token on. It is linear in the
last hidden state at that node: the policy's hidden state (`value: head`), or that of a separate adapter on the same
base (`value: model`), which starts as a copy of the policy's adapter. The head starts at zero, so that its gradient
does not push the shared hidden states in a random direction. It learns normalised values and keeps their running mean
and standard deviation (value normalisation of MAPPO, arXiv:2103.01955, section 5.1), see below.

The critic also keeps the adaptive KL coefficient.

    FOLDER/critic.safetensors    head and adapter
    FOLDER/critic.json           value function, rounds, statistics of the returns, KL coefficient of the next round

A critic learns (R - mean) / deviation, which is of order one for any unit of the rewards. Its outputs are denormalised
before advantages are estimated: V = mean + deviation · v. So the values of a new critic, whose head is zero, start at
the mean of the returns.

Unlike PopArt (arXiv:1602.07714), the head is not rescaled when the statistics change: all values follow the mean at
once, whereas a head that preserves its outputs would have to learn the new mean with a small learning rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.errors import ArtifactError
from components.json_text import read_json
from components.models.distribution import Cut

if TYPE_CHECKING:
    from components.algorithms.ppo.spec import PPOSpec

ADAPTER = "critic"
"""Name of the value model's adapter in PEFT."""
TENSORS, RECORD = "critic.safetensors", "critic.json"


class ValueCritic:
    """Value function of `policy` in its current state."""

    def __init__(self, policy: Policy, spec: PPOSpec):
        self.spec = spec
        self.kl_coefficient = spec.kl_coefficient
        self.rounds = 0
        """Number of rounds that it has learned from, including the current one once it has begun."""
        self.statistics = ReturnStatistics()
        """Statistics of the returns of these rounds, which normalise the values."""
        self.shared = spec.value == "head"
        """True if values are computed from the policy's own hidden states."""
        self._policy = policy
        width = policy.model.config.get_text_config().hidden_size
        self._weight_D = torch.nn.Parameter(torch.zeros(width, device=policy.device))
        self._bias = torch.nn.Parameter(torch.zeros((), device=policy.device))
        self._adapter: dict[str, torch.nn.Parameter] = {}
        if not self.shared:
            policy.add_adapter(ADAPTER)
            with policy.activate(ADAPTER) as self._adapter:
                pass

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name."""
        return {"critic.weight": self._weight_D, "critic.bias": self._bias, **self._adapter}

    def begin_round(self, returns: Sequence[float]) -> None:
        """Update the statistics with the returns of a new round."""
        self.rounds += 1
        decay = self.spec.value_norm_decay
        self.statistics = ReturnStatistics() if decay is None else self.statistics.updated(returns, decay)

    def read(self, hidden_UD: torch.Tensor, row_S: torch.Tensor) -> torch.Tensor:
        """Return the (S,) normalised values from the hidden states of the predicting nodes."""
        return (hidden_UD.float() @ self._weight_D + self._bias)[row_S]

    def constants(self, pack: Pack) -> torch.Tensor | None:
        """Return the (U, D) inputs of the value head, which are constant while the policy is: the policy's hidden
        states, stored on the CPU. Return None for a value model, whose hidden states change during training."""
        if not self.shared:
            return None
        with torch.no_grad(), self._policy.without_dropout():
            return self._policy.hidden(pack).cpu()

    @contextmanager
    def values(self, pack: Pack, constants_UD: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield the (S,) normalised values; the caller runs the backward pass inside the context. The policy's hidden
        states get no gradient. constants_UD: result of `constants` for this pack; None computes it."""
        row_S = pack.row_S.to(self._policy.device)
        if self.shared:
            hidden_UD = self.constants(pack) if constants_UD is None else constants_UD
            assert hidden_UD is not None
            yield self.read(hidden_UD.to(self._policy.device), row_S)
        else:
            with self._policy.activate(ADAPTER):
                yield self.read(self._policy.hidden(pack), row_S)

    def logprobs_and_values(self, pack: Pack, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (S,) log-probabilities of the policy and the (S,) normalised values of the critic."""
        logprob_S, _, hidden_UD = self._policy.logprobs_and_hidden(pack, cut)
        if self.shared:
            return logprob_S, self.read(hidden_UD, pack.row_S.to(self._policy.device))
        with self.values(pack) as value_S:
            return logprob_S, value_S

    def save(self, folder: Path) -> None:
        """Write the files that `load` reads."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: p.detach().cpu().contiguous() for name, p in self.parameters.items()}, folder / TENSORS)
        record = {
            "value": self.spec.value,
            "kl_coefficient": self.kl_coefficient,
            "rounds": self.rounds,
            "returns": asdict(self.statistics),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")

    def load(self, folder: Path) -> None:
        """Load the tensors of a saved critic, its statistics, and its KL coefficient if `kl_target` is set. Raises
        ArtifactError if they do not fit."""
        from safetensors.torch import load_file

        record = read_json(folder / RECORD)
        if record["value"] != self.spec.value:
            raise ArtifactError(
                f"algorithm.value = {self.spec.value}, but the critic in {folder} is a value {record['value']}. Set "
                f"algorithm.value={record['value']}, or start from a checkpoint without a critic"
            )
        tensors, own = load_file(folder / TENSORS), self.parameters
        if set(own) != set(tensors) or any(own[name].shape != tensors[name].shape for name in own):
            raise ArtifactError(
                f"the critic in {folder} does not fit: it was trained with another model or another model.lora. Start "
                "from a checkpoint of this model, or from one without a critic"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        self.rounds, self.statistics = record["rounds"], ReturnStatistics(**record["returns"])
        if self.spec.kl_target is not None:
            self.kl_coefficient = float(record["kl_coefficient"])


SMALLEST = 1e-4
"""Lower limit of the standard deviation, because constant returns have none."""


@dataclass(frozen=True)
class ReturnStatistics:
    """Mean and variance of the returns of past rounds, with exponential decay. Before the first round they are 0 and
    1."""

    mean: float = 0.0
    variance: float = 1.0
    rounds: int = 0
    """Number of rounds whose returns are included."""

    @property
    def deviation(self) -> float:
        """Return the standard deviation, at least `SMALLEST`."""
        return max(math.sqrt(self.variance), SMALLEST)

    def updated(self, returns: Sequence[float], decay: float) -> ReturnStatistics:
        """Return the statistics with the returns of another round: weighted means over the rounds, each with `decay`
        times the weight of the next one. If the variance of the returns is not finite, the statistics stay unchanged;
        the guard `non_finite` then strikes on the loss."""
        share = (1 - decay) / (1 - decay ** (self.rounds + 1))
        return_A = torch.tensor(returns, dtype=torch.float64)
        mean = (1 - share) * self.mean + share * return_A.mean().item()
        shift = self.mean - mean
        spread = (return_A - mean).square().mean().item()
        variance = (1 - share) * (self.variance + shift * shift) + share * spread
        return ReturnStatistics(mean, variance, self.rounds + 1) if math.isfinite(variance) else self

    def normalised(self, values: Sequence[float]) -> list[float]:
        """Return the normalised values, as the critic learns them."""
        return [(value - self.mean) / self.deviation for value in values]

    def denormalised(self, values: Sequence[float]) -> list[float]:
        """Return values of the critic in the unit of the rewards."""
        return [self.mean + self.deviation * value for value in values]
