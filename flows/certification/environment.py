"""Checks of the environment, as `flows.qualify` does them: its solver succeeds, chance fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from components import aio
from components.environments.protocol import Environment
from components.errors import EspalierError
from components.evaluation.certificate_page import CertificateCheck, check_result, skipped_check
from components.evaluation.qualification_page import FAILED, SKIPPED, QualificationCheck
from components.trajectories.schema import Scenario
from flows.qualification.checks import Qualification, check_chance, check_solver
from flows.qualification.recording import TestedInstance

TURNS = 30
"""Maximum number of actions of chance, if `agent.max_turns` is larger."""


def check_environment(
    make: Callable[[], Environment], scenarios: Sequence[Scenario], max_turns: int
) -> list[CertificateCheck]:
    """Play the solver and chance on these scenarios."""

    async def play() -> list[CertificateCheck]:
        world = TestedInstance(make())
        try:
            tested = Qualification(make, world, {}, list(scenarios), min(TURNS, max_turns))
            return [
                await _checked("solver", check_solver, tested),
                await _checked("chance", check_chance, tested),
            ]
        finally:
            await world.close()

    return aio.run(play())


async def _checked(
    name: str, check: Callable[[Qualification], Awaitable[QualificationCheck]], tested: Qualification
) -> CertificateCheck:
    try:
        qualified = await check(tested)
    except EspalierError as error:
        return check_result(name, [str(error)[:500]], {})
    if qualified.status == SKIPPED:
        return skipped_check(name, qualified.reason)
    return check_result(name, [qualified.reason] if qualified.status == FAILED else [], qualified.figures)
