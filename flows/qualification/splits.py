"""Check that the held-out split is disjoint from the training split in substance.

Equal inputs under different ids are one task. Nearly equal prompts alone are none: a game whose prompt states only its
rules has the same prompt in every scenario. Therefore the solution of the training scenario with the most similar
prompt is played in the held-out scenario. If it succeeds, a policy that memorizes solves the held-out scenario.
"""

from __future__ import annotations

import json
import random
import time

from components.data.fingerprints import SimilarTexts
from components.evaluation.checks import PropertyCheck
from components.evaluation.proportions import wilson
from components.trajectories.schema import Scenario
from flows.qualification.checks import Qualification, result
from flows.qualification.recording import Recording, TestedInstance

MOST_MEMORIZED = 0.25
"""Share of held-out scenarios that training solutions solve; the lower end of its 95 % interval must not exceed it."""
SECONDS = 30.0
"""Time limit for reading prompts; the figures then cover the scenarios so far."""
PLAYED = 64
"""Maximum number of held-out scenarios in which another scenario's solution is played."""
SLOTS = 2**18


async def check_splits(tested: Qualification) -> PropertyCheck:
    """Check ids, inputs, and whether solutions of similar training scenarios solve held-out scenarios."""
    train, heldout = tested.scenarios["train"], tested.scenarios["heldout"]
    if not train or not heldout:
        empty = "train" if not train else "heldout"
        return result("splits", [f"the split {empty} has no scenarios"], {"train": len(train), "heldout": len(heldout)})
    ids = [scenario.id for scenario in [*train, *heldout]]
    failures = [f"{len(ids) - len(set(ids))} scenarios repeat an id"] if len(set(ids)) < len(ids) else []
    inputs = {_content(scenario): scenario.id for scenario in train}
    equal = [scenario for scenario in heldout if _content(scenario) in inputs]
    failures += [f"{scenario.id} is the same task as {inputs[_content(scenario)]}" for scenario in equal]
    texts = await _prompts(tested.world, train, heldout)
    similar = _similar(train, heldout, texts)
    figures: dict[str, float] = {"train": len(train), "heldout": len(heldout), "equal": len(equal)}
    figures["compared"] = len(texts)
    figures["similar_prompts"] = len(similar)
    examples: list[Recording] = []
    if tested.has_solver and similar:
        attempts = [await _memorized(tested.world, known, scenario) for scenario, known in _draw(similar)]
        examples = [attempt for attempt in attempts if attempt.success]
        compared = sum(scenario.id in texts for scenario in heldout)
        reached = len(similar) / compared
        figures["memorized"] = share = len(examples) / len(attempts) * reached
        if wilson(len(examples), len(attempts))[0] * reached > MOST_MEMORIZED:
            failures.append(
                f"solutions of training scenarios solve {share:.0%} of the held-out scenarios with nearly equal prompts"
            )
    return result("splits", failures, figures, examples)


def _content(scenario: Scenario) -> str:
    return json.dumps([scenario.type, scenario.input], sort_keys=True, default=str)


async def _prompts(world: TestedInstance, train: list[Scenario], heldout: list[Scenario]) -> dict[str, str]:
    """Return the user's part of the prompts by scenario id, held-out ones first."""
    texts, end = {}, time.monotonic() + SECONDS
    for scenario in [*heldout, *train]:
        first = (await world.reset(scenario, "prompt")).first
        texts[scenario.id] = "\n".join(str(message["content"]) for message in first if message["role"] != "system")
        if time.monotonic() > end:
            break
    return texts


def _similar(train: list[Scenario], heldout: list[Scenario], texts: dict[str, str]) -> list[tuple[Scenario, Scenario]]:
    """Return the held-out scenarios that have a training scenario with a nearly equal prompt, each with it."""
    memory = SimilarTexts(SLOTS)
    exact: dict[str, int] = {}
    for number, scenario in enumerate(train):
        if scenario.id in texts:
            memory.add(texts[scenario.id], number)
            exact.setdefault(texts[scenario.id], number)
    pairs = []
    for scenario in heldout:
        text = texts.get(scenario.id)
        if text is None:
            continue
        similar = exact.get(text, memory.add(text, len(train)))
        if similar is not None and similar < len(train):
            pairs.append((scenario, train[similar]))
    return pairs


def _draw(pairs: list[tuple[Scenario, Scenario]]) -> list[tuple[Scenario, Scenario]]:
    return random.Random(0).sample(pairs, min(PLAYED, len(pairs)))


async def _memorized(world: TestedInstance, known: Scenario, scenario: Scenario) -> Recording:
    """Play the solution of a training scenario in another scenario."""
    await world.reset(known, "solver")
    actions = await world.solve(known)
    recording = await world.reset(scenario, f"solution of {known.id}")
    for action in actions:
        if (await world.step(recording, action)).done:
            break
    return recording
