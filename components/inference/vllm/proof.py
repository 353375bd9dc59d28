"""Proof that a server computes with the weights of a policy: log-probabilities of known tokens against transformers.

A server that lists an adapter under the right name and folder may still compute with another one: with an adapter that
it did not read again, or with memory that its sleep has discarded. The tokens are those of a fixed prompt, and their
log-probabilities (`prompt_logprobs`, which vLLM computes without its prefix cache) follow from the weights alone.

The reference is computed in float32 on the CPU, so that it takes no memory of the GPU and its own rounding does not
count, and a layer at a time, so that the host never has the whole model. It is computed once for each policy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.errors import StalePolicy
from components.inference.vllm.client import VllmClient

logger = logging.getLogger(__name__)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
"""Largest mean difference of log-probabilities in nats, by dtype of the server."""
DISTINCT = 1e-3
"""Mean difference in nats between two policies from which a server that rounds to 16 bits cannot answer for both with
the same numbers."""


@dataclass(frozen=True)
class _Answer:
    """Log-probabilities of the known tokens under a policy: of the server and of the reference."""

    policy: tuple[str, str | None]
    """Served name and folder."""
    served: list[float]
    expected: list[float]


class ContentProof:
    """Comparison of servers with the reference. base_dir: folder of the model. prompt: known tokens, at least two.
    dtype: of the server."""

    def __init__(self, base_dir: Path, prompt: list[int], dtype: str):
        self._base_dir = base_dir
        self._prompt = prompt
        self._tolerance = TOLERANCE[dtype]
        self._expected: dict[tuple[str, str | None], list[float]] = {}
        """Reference by served name and folder."""
        self._last: dict[str, _Answer] = {}
        """Last answer of each server, by its address."""

    def check(self, client: VllmClient, name: str, folder: str | None) -> None:
        """Raise StalePolicy if a server computes `name` with other weights than those of the base model with the
        trained ones in `folder` (None: without). Raises the client's errors."""
        key = name, folder
        if key not in self._expected:
            self._expected[key] = reference_logprobs(self._base_dir, folder, self._prompt)
        answer = _Answer(key, client.prompt_logprobs(name, self._prompt), self._expected[key])
        difference = _mean_difference(answer.served, answer.expected)
        logger.info("%s: log-probabilities of %s differ by %.1e nats in the mean", client.url, name, difference)
        if not difference <= self._tolerance:
            raise StalePolicy(
                f"{client.url} computes {name} with other weights than those of {folder or self._base_dir}: its "
                f"log-probabilities of {len(answer.served)} known tokens differ from transformers' by "
                f"{difference:.2g} nats in the mean; expected at most {self._tolerance:g}"
            )
        self._check_changed(client.url, answer)
        self._last[client.url] = answer

    def _check_changed(self, url: str, answer: _Answer) -> None:
        """Raise StalePolicy if a server answers for a policy with the very numbers of another one."""
        last = self._last.get(url)
        if last is None or last.policy == answer.policy or last.served != answer.served:
            return
        between = _mean_difference(last.expected, answer.expected)
        if between >= DISTINCT:
            (name, folder), (other, other_folder) = answer.policy, last.policy
            if name == other:
                name, other = folder or name, other_folder or other
            raise StalePolicy(
                f"{url} computes {name} with the weights of {other}: its log-probabilities of known tokens "
                f"are equal, but those of the two policies differ by {between:.2g} nats in the mean"
            )


def reference_logprobs(base_dir: Path, folder: str | None, prompt: Sequence[int]) -> list[float]:
    """Return the log-probability of each token of a prompt but the first by transformers, in float32 on the CPU. One
    layer is in memory at a time."""
    import torch
    from peft import PeftModel

    from components.models.streamed import StreamedModel
    from components.models.trained_weights import is_whole

    whole = Path(folder) if folder is not None and is_whole(Path(folder)) else None
    streamed = StreamedModel(base_dir, dtype="float32", device="cpu", trained=whole)
    model = streamed.model
    if folder is not None and whole is None:
        model = PeftModel.from_pretrained(model, folder).eval()
    with torch.inference_mode(), streamed.computing():
        tokens_T = torch.tensor(prompt)
        logits_TV = model(input_ids=tokens_T[None]).logits[0, :-1].float()
        logprobs_TV = logits_TV.log_softmax(-1)
        return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0].tolist()


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
