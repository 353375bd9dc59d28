"""Check that the first prompts fit the context, and that answers end before `agent.max_tokens`."""

from __future__ import annotations

import asyncio

from components import aio
from components.errors import ContextOverflow
from components.evaluation.certificate_page import CertificateCheck, check_result
from components.inference.protocol import Engine
from components.rollout.agent import Conversation
from components.rollout.request import EpisodeRequest
from components.trajectories.truncation import KEYS, MESSAGES
from flows.certification.subject import Opening, Subject

NAME = "limits"
MOST_CUT = 0.5
"""Share of cut answers from which the check warns."""


def check_limits(subject: Subject, engine: Engine) -> CertificateCheck:
    """Sample one answer to each opening. A prompt that exceeds the context fails, many cut answers warn: a model that
    is not trained yet may not end its answers, but one that can answer is cut in every turn."""

    async def sampled() -> list[Conversation | None]:
        return await asyncio.gather(*(_answered(subject, engine, opening) for opening in subject.openings))

    answered = aio.run(sampled())
    fitting = [talk for talk in answered if talk is not None]
    cut = sum(talk.truncated for talk in fitting)
    figures = {"answers": len(fitting), "cut": cut, "too_long": len(answered) - len(fitting)}
    failures, warnings = [], []
    if figures["too_long"]:
        failures.append(
            f"{figures['too_long']} of {len(answered)} first prompts exceed model.max_length={subject.model.max_length}"
        )
    if fitting and cut >= MOST_CUT * len(fitting):
        warnings.append(
            f"{cut} of {len(fitting)} first answers were cut off at {KEYS[MESSAGES]}={subject.sampling.max_tokens}, or "
            f"at the end of model.max_length={subject.model.max_length}"
        )
    return check_result(NAME, failures, figures, warnings=warnings)


async def _answered(subject: Subject, engine: Engine, opening: Opening) -> Conversation | None:
    """Return the conversation with one answer; None if the prompt exceeds the context."""
    request = EpisodeRequest(scenario=opening.scenario, sample=0, seed=0, sampling=subject.sampling, max_turns=1)
    talk = Conversation(engine, request)
    talk.messages, talk.tools = subject.opened(opening)
    try:
        await talk.answer()
    except ContextOverflow:
        return None
    return talk
