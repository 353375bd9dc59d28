"""The critic of PPO: what it learns beside its policy and carries from round to round.

A value says, at the node that predicts a token, what the rewards from that token on add up to. It is linear in the last
hidden state there: that of the policy (`value: head`), or that of an adapter of its own on the same base (`value:
model`), which begins as a copy of the policy's. The head begins at zero. So the first advantages are those of the
rewards themselves, and no random direction pulls at the hidden states that it shares with the policy.

The coefficient of the KL belongs to it too, where it is steered.

    FOLDER/critic.safetensors    head and adapter
    FOLDER/critic.json           kind of value, coefficient of the KL for the next round
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from components.algorithms.packing import Pack
from components.algorithms.policy import Policy
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

    def read(self, hidden_UD: torch.Tensor, row_S: torch.Tensor) -> torch.Tensor:
        """(S,) values off the hidden states of the nodes that predict."""
        return (hidden_UD.float() @ self._weight_D + self._bias)[row_S]

    @contextmanager
    def values(self, pack: Pack) -> Iterator[torch.Tensor]:
        """(S,) values by the value model; their gradient is to be taken inside."""
        assert not self.shared
        with self._policy.using(ADAPTER):
            yield self.read(self._policy.hidden(pack), pack.row_S.to(self._policy.device))

    def logprobs_and_values(self, pack: Pack, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """(S,) each: log-probabilities by the policy, values by the critic."""
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
        record = {"value": self.spec.value, "kl_coefficient": self.kl_coefficient}
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")

    def load(self, folder: Path) -> None:
        """Takes the tensors of a saved critic, and its coefficient where it is steered. Raises ArtifactError where they
        do not fit."""
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
        if self.spec.kl_target is not None:
            self.kl_coefficient = float(record["kl_coefficient"])
