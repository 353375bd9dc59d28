"""Checks of the environment, as `flows.qualify` does them: its solver succeeds, chance fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from components import aio
from components.errors import EspalierError
from components.evaluation.certificate_page import CertificateCheck, check_result, skipped_check
from components.evaluation.qualification_page import FAILED, SKIPPED, QualificationCheck
from flows.certification.subject import Subject
from flows.qualification.checks import Qualification, check_chance, check_solver
from flows.qualification.recording import TestedInstance

TURNS = 30
"""Maximum number of actions of chance, if `agent.max_turns` is larger."""
VACUOUS = 0.9
"""Success rate of chance from which the check fails: the reward then tells hardly anything. Below it, where `flows.
qualify` fails, the certificate warns: an easy game may be chosen on purpose."""


def check_environment(subject: Subject) -> list[CertificateCheck]:
    """Play the solver and chance."""
    make = subject.make_environment

    async def play() -> list[CertificateCheck]:
        world = TestedInstance(make())
        try:
            tested = Qualification(make, world, {}, list(subject.played), min(TURNS, subject.agent.max_turns))
            return [
                await _checked("solver", check_solver, tested, subject.timeout),
                await _checked("chance", check_chance, tested, subject.timeout),
            ]
        finally:
            await world.close()

    return aio.run(play())


async def _checked(
    name: str, check: Callable[[Qualification], Awaitable[QualificationCheck]], tested: Qualification, timeout: float
) -> CertificateCheck:
    try:
        async with asyncio.timeout(timeout):
            qualified = await check(tested)
    except TimeoutError as error:
        return check_result(name, [str(error) or f"took longer than collect.timeout = {timeout:g} s"], {})
    except EspalierError as error:
        return check_result(name, [str(error)[:500]], {})
    if qualified.status == SKIPPED:
        return skipped_check(name, qualified.reason)
    problems = [qualified.reason] if qualified.status == FAILED else []
    if name == "chance" and qualified.figures["success"] < VACUOUS:
        return check_result(name, [], qualified.figures, warnings=problems)
    return check_result(name, problems, qualified.figures)
