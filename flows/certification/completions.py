"""Completions of an engine, and their log-probabilities as the trainer computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components import aio
from components.errors import ContextOverflow, EngineError, PromptRefused
from components.inference.protocol import Engine, Sampling
from components.rollout.agent import Conversation
from components.rollout.request import EpisodeRequest, derived_seed
from components.trajectories.schema import Trajectory
from flows.certification.subject import Opening, Subject

if TYPE_CHECKING:
    import torch

    from components.models.distribution import Cut

TURNS = 2
"""Responses of a conversation."""
MOST_TOKENS = 32
"""Maximum number of sampled tokens per response."""
PACK_TOKENS = 2048
GO_ON = "Go on."


@dataclass(frozen=True)
class LogprobDifference:
    """LogprobDifference of two series of log-probabilities, in nats."""

    largest: float
    mean: float

    @classmethod
    def of(cls, first_S: torch.Tensor, second_S: torch.Tensor) -> LogprobDifference:
        """Return the difference. A value that is not finite in only one of them is infinitely different."""
        difference_S = (first_S - second_S).abs().nan_to_num(nan=float("inf"))
        return cls(float(difference_S.max()), float(difference_S.mean()))

    def within(self, subject: Subject) -> bool:
        """Return True if both values are within the tolerance."""
        return self.largest <= subject.tolerance and self.mean <= subject.mean_tolerance


def sample(
    subject: Subject, engine: Engine, sampling: Sampling, *, samples: int | None = None, turns: int = TURNS
) -> list[Trajectory]:
    """Return conversations that the engine samples from the openings. samples: conversations per opening; None:
    `subject.samples`. turns: responses of each. Raises EngineError."""
    samples = subject.samples if samples is None else samples
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, MOST_TOKENS))

    def request(opening: Opening, number: int) -> EpisodeRequest:
        seed = derived_seed(0, f"{opening.scenario.id}/{number}")
        return EpisodeRequest(scenario=opening.scenario, sample=number, seed=seed, sampling=sampling, max_turns=turns)

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                _conversation(subject, engine, opening, request(opening, number))
                for opening in subject.openings
                for number in range(samples)
            )
        )

    trajectories = aio.run(all_of_them())
    if not any(history.token_ids for trajectory in trajectories for history in trajectory.histories):
        raise EngineError("the engine returned no token ids; model.max_length may be too short for the prompts")
    return trajectories


async def _conversation(subject: Subject, engine: Engine, opening: Opening, request: EpisodeRequest) -> Trajectory:
    talk = Conversation(engine, request)
    talk.messages, talk.tools = subject.opened(opening)
    for _ in range(request.max_turns):
        try:
            answer = await talk.answer()
        except (ContextOverflow, PromptRefused):
            break
        talk.messages += _reply(answer)
    return replace(request.trajectory(talk.policy), histories=talk.recorder.histories, tools=talk.tools)


def _reply(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return results of the answer's calls, or a message of the user."""
    calls = answer.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    return results or [{"role": "user", "content": GO_ON}]


def sampled_logprobs(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return the (S,) log-probabilities of the sampled tokens as the engine reported them."""
    import torch

    return torch.tensor(
        [
            history.logprobs[index]
            for trajectory in trajectories
            for history in trajectory.histories
            for index, is_sampled in enumerate(history.sampled_mask())
            if is_sampled
        ]
    )


def trained_logprobs(subject: Subject, trajectories: Sequence[Trajectory], scratch: Path) -> torch.Tensor:
    """Return the (S,) log-probabilities of the sampled tokens as a training computes them before its first step."""
    import torch

    from components.algorithms.policy.reference_logprobs import ReferenceLogprobs

    scratch.mkdir(parents=True, exist_ok=True)
    measured = ReferenceLogprobs(scratch)
    measured.measure(subject.trainer, trajectories, PACK_TOKENS, reference=False, first=True)
    return torch.tensor([value for trajectory in trajectories for value in measured.whole("old", trajectory)])


def logprobs_under(subject: Subject, trajectories: Sequence[Trajectory], cut: Cut) -> torch.Tensor:
    """Return the (S,) log-probabilities of the sampled tokens under a given distribution of the trainer's policy."""
    import torch

    from components.algorithms.policy.packing import TokenSequence, pack

    sequences, total = [], 0
    for trajectory in trajectories:
        for history in trajectory.histories:
            targets = [index for index, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
            sequences.append(TokenSequence(history.token_ids, targets, first=total))
            total += len(targets)
    values_S = torch.zeros(total)
    policy = subject.trainer
    with torch.no_grad(), policy.without_dropout():
        for packed in pack(sequences, PACK_TOKENS, padded=policy.padded):
            values_S[packed.number_S.cpu()] = policy.logprobs(packed, cut)[0].float().cpu()
    return values_S
