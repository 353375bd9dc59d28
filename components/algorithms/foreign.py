"""Episodes of other models, converted to the tokens of the model in training.

`sampling["tokenizer"]` of a trajectory identifies the tokenizer of its token ids, if that was not the model in training
(`weights.tokenizer_digest`). If it is the same tokenizer, including the chat template, the sampled tokens are kept;
those of a served policy need the same vocabulary only (`digests.vocabulary_digest`). Otherwise the ids have no meaning
here: they are removed, and the messages are tokenized with the model's own chat template (`ChatFormat.streams`), like
any written conversation. An episode with a truncated answer is left out: tokenized again, the answer would end with the
end-of-turn token and teach the model to stop in the middle.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from components.errors import ArtifactError
from components.trajectories.schema import VOCABULARY, History, Message, Trajectory

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
"""Key of `Trajectory.sampling`."""
UNKNOWN = "unknown"
"""Value of `TOKENIZER` for a server that does not report its tokenizer."""


class OwnTokens:
    """Conversion of episodes to the tokens of the model in `base_dir`. sampled: the episodes must be the policy's own
    samples."""

    def __init__(self, base_dir: Path, *, sampled: bool):
        self._sampled = sampled
        self._own = cache(partial(_digest, base_dir))

    def __call__(self, trajectory: Trajectory) -> Trajectory | None:
        """Return the episode without token ids of another tokenizer; None if it is left out because an answer was
        truncated. Raises ArtifactError if it must be the policy's own sample and is not."""
        digest = trajectory.sampling.get(TOKENIZER)
        if digest is None or digest == self._own(digest.startswith(VOCABULARY)):
            return trajectory
        if self._sampled:
            raise ArtifactError(
                f"trajectory {trajectory.id} was sampled from a model with another tokenizer: a policy gradient needs "
                "the policy's own tokens. Train on such episodes with sft, distill or a preference algorithm"
            )
        if any(message.finish_reason == "length" for history in trajectory.histories for message in history.messages):
            return None
        return replace(trajectory, histories=[_without_tokens(history) for history in _longest(trajectory.histories)])


def convert_foreign_tokens(trajectories: Sequence[Trajectory], base_dir: Path, *, sampled: bool) -> list[Trajectory]:
    """Return the trajectories as `OwnTokens` converts them. A warning counts those that it leaves out."""
    converted = list(filter(None, map(OwnTokens(base_dir, sampled=sampled), trajectories)))
    if len(converted) < len(trajectories):
        log.warning(
            "episodes of another model left out of training because an answer was truncated: %d of %d",
            *(len(trajectories) - len(converted), len(trajectories)),
        )
    return converted


def _digest(base_dir: Path, vocabulary: bool) -> str:
    from components.models.digests import vocabulary_digest
    from components.models.weights import load_tokenizer, tokenizer_digest

    return vocabulary_digest(load_tokenizer(base_dir)) if vocabulary else tokenizer_digest(base_dir)


def _longest(histories: Sequence[History]) -> list[History]:
    """Return the histories that are not a prefix of a later one: if the other model's template rewrites the past, each
    of its turns has its own history with all earlier messages."""
    return [
        history
        for index, history in enumerate(histories)
        if not any(
            later.agent == history.agent and _messages(later)[: len(history.messages)] == _messages(history)
            for later in histories[index + 1 :]
        )
    ]


def _messages(history: History) -> list[Message]:
    return [replace(message, span=None, finish_reason=None) for message in history.messages]


def _without_tokens(history: History) -> History:
    return History(_messages(history), agent=history.agent)
