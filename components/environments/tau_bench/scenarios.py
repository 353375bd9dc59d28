"""Scenarios of the published tasks, and the database that their gold actions lead to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from components.environments.tau_bench.data import DOMAINS, DomainData, PublishedTask
from components.environments.tau_bench.database import EpisodeDatabase
from components.environments.tools import InvalidAction, run_tool
from components.errors import SpecError
from components.trajectories.schema import Scenario

HARDEST = 5
"""Highest difficulty."""


def scenarios(data: DomainData, domain: str, heldout: Sequence[str], train_share: float) -> list[Scenario]:
    """Return the scenarios of both splits.

    heldout: published splits that are held out. train_share: share of them for training, if no split is published for
    it. Raises SpecError if a split is not published.
    """
    missing = [split for split in heldout if split not in data.tasks]
    if missing or not heldout:
        message = f"{list(heldout)}: {domain} has the published splits {', '.join(data.tasks)}"
        raise SpecError.at("environment.heldout", message)
    drawn = [_scenario(domain, "train", *item, "train") for item in enumerate(data.tasks.get("train", ()))]
    share = 0.0 if drawn else train_share
    others = [(published, *item) for published in heldout for item in enumerate(data.tasks[published])]
    for place, task in enumerate(others):
        is_training = int((place + 1) * share) > int(place * share)
        drawn.append(_scenario(domain, *task, "train" if is_training else "heldout"))
    return drawn


def _scenario(domain: str, published: str, number: int, task: PublishedTask, split: str) -> Scenario:
    changing = [action.name for action in task.actions if action.name in DOMAINS[domain].changing]
    kind = "none" if not changing else changing[0] if len(set(changing)) == 1 else "several"
    input = task.model_dump(include={"user_id", "instruction", "actions", "outputs"})
    return Scenario(f"{domain}-{published}-{number}", input, split, kind, min(max(len(changing), 1), HARDEST))


def gold_database(data: DomainData, domain: str, scenario: Scenario) -> EpisodeDatabase:
    """Return a fresh database after the gold actions; those that fail change nothing."""
    tools = DOMAINS[domain](EpisodeDatabase(data.tables))
    for action in scenario.input["actions"]:
        with suppress(InvalidAction):
            run_tool(tools, action["name"], action["kwargs"])
    return tools.database


def requires(data: DomainData, domain: str, scenario: Scenario) -> bool:
    """Return True if a scenario requires a change of the database or an output."""
    return bool(scenario.input["outputs"]) or any(gold_database(data, domain, scenario).changes().values())
