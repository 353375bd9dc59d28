"""An environment needs its module and its YAML, and no other change (CONTRIBUTING.md)."""

from __future__ import annotations

import pytest

from tests.scratch_copy import Checkout

pytestmark = pytest.mark.timeout(1800)

FILES = {
    "components/environments/worlds/coins.py": '''"""Coins: count the coins in a box."""

from __future__ import annotations

import random
from typing import Any

from components.environments.protocol import Messages, Step
from components.environments.seeded import Count
from components.specs.registered import registered
from components.trajectories.schema import Scenario


@registered("environment.coins")
class Coins:
    """Count coins. Success is the right number.

    Args:
        seed: Generator seed.
        train: Scenarios for training.
        heldout: Scenarios held out.
    """

    def __init__(self, seed: int = 0, train: Count = 32, heldout: Count = 16):
        draw = random.Random(seed)
        coins = [draw.randrange(100) for _ in range(train + heldout)]
        rows = [(f"box-{number}", {"coins": count}) for number, count in enumerate(coins)]
        self.rows = {"train": rows[:train], "heldout": rows[train:]}

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(name, task, split) for name, task in self.rows.get(split, [])]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> Messages:
        self.coins = scenario.input["coins"]
        return [{"role": "user", "content": f"{self.coins} coins lie in the box. How many?"}]

    def step(self, action: dict[str, Any]) -> Step:
        return Step([], done=True, info={"success": str(action["content"]).strip() == str(self.coins)})

    def solve(self, scenario: Scenario) -> Messages:
        return [{"role": "assistant", "content": str(scenario.input["coins"])}]

    def close(self) -> None:
        pass
''',
    "conf/environment/coins.yaml": """# Coins: count the coins in a box.
_target_: components.environments.worlds.coins.Coins
seed: 0        # seed of the generated scenarios
train: 32      # scenarios
heldout: 16
""",
}
COLLECT = """
import json

from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.stages.base import Context
from flows.stages.execute import run_stage

spec = compose(["+experiment=smoke", "environment=coins", "root={ROOT}"])
requests = Requests(spec)
context = Context.at(spec.root)
played, status = run_stage(requests.collect(None, 1), context)
shown, _ = run_stage(requests.demonstrate(), context)
from docs import environments, reference

pages = [reference.generated(), environments.content()]
print(json.dumps({
    "collected": [status, played.metrics["episodes"], played.metrics["failed"], shown.metrics["success"]],
    "documented": [page.count("coins") for page in pages],
}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("adding") / "copy")
    checkout.add(FILES)
    return checkout


def test_the_tiny_model_plays_an_added_environment_and_the_documentation_lists_it(checkout):
    result = checkout.run(COLLECT.replace("{ROOT}", str(checkout.folder / "runs")))
    assert result["collected"] == ["ran", 4.0, 0.0, 1.0]
    assert all(result["documented"])


def test_the_tests_of_the_configuration_cover_an_added_environment(checkout):
    """pytest fails if a named test does not exist."""
    configs = "tests/test_configs.py"
    checkout.test(
        f"{configs}::test_options_compose_into_valid_experiments_with_every_key_written_out[environment]",
        f"{configs}::test_every_file_begins_with_a_comment_that_says_what_it_is",
        f"{configs}::test_every_file_is_plain_yaml_without_repeated_keys",
        f"{configs}::test_all_files_are_options_of_a_group",
        "tests/test_registered.py::test_every_component_of_the_configuration_has_a_registered_name_of_its_own",
    )
