"""The critic of PPO: what it learns beside its policy and carries from round to round.

A value says, at the node that predicts a token, what the rewards from that token on add up to. It is linear in the last
hidden state there: that of the policy (`value: head`), or that of an adapter of its own on the same base (`value:
model`), which begins as a copy of the policy's. The head begins at zero, so no random direction pulls at the hidden
states that it shares with the policy. It reads normalised values, and keeps their statistics (`return_statistics`).

The coefficient of the KL belongs to it too, where it is steered.

    FOLDER/critic.safetensors    head and adapter
    FOLDER/critic.json           kind of value, rounds, statistics of their returns, coefficient of the KL for the next
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.ppo.return_statistics import ReturnStatistics
from components.algorithms.spec import PPOSpec
from components.errors import ArtifactError
from components.json_text import read_json
from components.models.distribution import Cut

ADAPTER = "critic"
"""Name of the value model's adapter in PEFT."""
TENSORS, RECORD = "critic.safetensors", "critic.json"


class Critic:
    """The values of `policy`, as it stands now."""

    def __init__(self, policy: Policy, spec: PPOSpec):
        self.spec = spec
        self.kl_coefficient = spec.kl_coefficient
        self.rounds = 0
        """Rounds that it has learned from, the present one among them once it has begun."""
        self.statistics = ReturnStatistics()
        """Of the returns of these rounds; values that are read are normalised by them."""
        self.shared = spec.value == "head"
        """Whether values are read off the policy's own hidden states."""
        self._policy = policy
        width = policy.model.config.get_text_config().hidden_size
        self._weight_D = torch.nn.Parameter(torch.zeros(width, device=policy.device))
        self._bias = torch.nn.Parameter(torch.zeros((), device=policy.device))
        self._adapter: dict[str, torch.nn.Parameter] = {}
        if not self.shared:
            policy.add_adapter(ADAPTER)
            with policy.using(ADAPTER) as self._adapter:
                pass

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name."""
        return {"critic.weight": self._weight_D, "critic.bias": self._bias, **self._adapter}

    def begin_round(self, returns: Sequence[float]) -> None:
        """Take the returns of a new round into the statistics."""
        self.rounds += 1
        decay = self.spec.value_norm_decay
        self.statistics = ReturnStatistics() if decay is None else self.statistics.updated(returns, decay)

    def read(self, hidden_UD: torch.Tensor, row_S: torch.Tensor) -> torch.Tensor:
        """(S,) normalised values off the hidden states of the nodes that predict."""
        return (hidden_UD.float() @ self._weight_D + self._bias)[row_S]

    def constants(self, pack: Pack) -> torch.Tensor | None:
        """(U, D) what values are read off where the policy does not move: its hidden states, kept off the device; None
        for a value model, which moves itself."""
        if not self.shared:
            return None
        with torch.no_grad(), self._policy.without_dropout():
            return self._policy.hidden(pack).cpu()

    @contextmanager
    def values(self, pack: Pack, constants_UD: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """(S,) normalised values; the gradient by the critic's own parameters is to be taken inside. The policy's
        hidden states get none. constants_UD: what `constants` gave for this pack; None computes it."""
        row_S = pack.row_S.to(self._policy.device)
        if self.shared:
            hidden_UD = self.constants(pack) if constants_UD is None else constants_UD
            assert hidden_UD is not None
            yield self.read(hidden_UD.to(self._policy.device), row_S)
        else:
            with self._policy.using(ADAPTER):
                yield self.read(self._policy.hidden(pack), row_S)

    def logprobs_and_values(self, pack: Pack, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """(S,) each: log-probabilities by the policy, normalised values by the critic."""
        logprob_S, _, hidden_UD = self._policy.logprobs_and_hidden(pack, cut)
        if self.shared:
            return logprob_S, self.read(hidden_UD, pack.row_S.to(self._policy.device))
        with self.values(pack) as value_S:
            return logprob_S, value_S

    def save(self, folder: Path) -> None:
        """Writes what `load` reads."""
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
        """Take the tensors of a saved critic, its statistics, and its coefficient where it is steered. Raises
        ArtifactError where they do not fit."""
        from safetensors.torch import load_file

        record = read_json(folder / RECORD)
        if record["value"] != self.spec.value:
            raise ArtifactError(
                f"the critic in {folder} is a value {record['value']}, algorithm.value is {self.spec.value}. Set "
                f"algorithm.value={record['value']}, or start from a checkpoint without a critic"
            )
        tensors, own = load_file(folder / TENSORS), self.parameters
        if set(own) != set(tensors) or any(own[name].shape != tensors[name].shape for name in own):
            raise ArtifactError(
                f"the critic in {folder} is for another model or another model.lora. Start from a checkpoint of this "
                "model, or from one without a critic"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        self.rounds, self.statistics = record["rounds"], ReturnStatistics(**record["returns"])
        if self.spec.kl_target is not None:
            self.kl_coefficient = float(record["kl_coefficient"])
