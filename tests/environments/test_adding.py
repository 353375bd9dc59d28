"""An environment and a reward need their module and their YAML, and no other change (CONTRIBUTING.md)."""

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
    "components/rewards/rules/terse.py": '''"""Terse reward: success, minus a cost of each sampled token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.terse")
def terse(trajectory: Trajectory, *, token_cost: Annotated[float, Field(ge=0)] = 0.01) -> float:
    """Success, minus a cost of each sampled token.

    Args:
        token_cost: Cost of one token; 0 or more.
    """
    return float(trajectory.success) - token_cost * trajectory.metrics["sampled_tokens"]
''',
    "conf/reward/terse.yaml": """# Terse: success, minus a cost of each sampled token.
_target_: components.rewards.rules.terse.terse
token_cost: 0.01    # cost of one token
""",
}
PLAY = """
import json

from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.stages.base import Context
from flows.stages.execute import run_stage

spec = compose(
    ["+experiment=smoke", "environment=coins", "reward=terse", "reward.token_cost=0.5", "root={ROOT}"]
)
requests = Requests(spec)
context = Context.at(spec.root)
played, status = run_stage(requests.collect(None, 1), context)
shown, _ = run_stage(requests.demonstrate(), context)
judged, judged_status = run_stage(requests.judge(played), context)
tokens = played.metrics["sampled_tokens"] / played.metrics["episodes"]
from docs import environments, reference

pages = [reference.generated(), environments.content()]
print(json.dumps({
    "collected": [status, played.metrics["episodes"], played.metrics["failed"], shown.metrics["success"]],
    "judged": [judged_status, judged.metrics["unscored"]],
    "reward": [judged.metrics["reward"], played.metrics["success"] - 0.5 * tokens],
    "documented": [page.count("coins") for page in pages],
    "keys": pages[0].count("`reward.token_cost`"),
}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("adding") / "copy")
    checkout.add(FILES)
    return checkout


def test_the_tiny_model_plays_an_added_environment_for_an_added_reward_and_the_documentation_lists_them(checkout):
    result = checkout.run(PLAY.replace("{ROOT}", str(checkout.folder / "runs")))
    assert result["collected"] == ["ran", 4.0, 0.0, 1.0]
    assert result["judged"] == ["ran", 0.0]
    reward, expected = result["reward"]
    assert reward == pytest.approx(expected)
    assert all(result["documented"])
    assert result["keys"] == 1


COVERED = """
import json
from tests.test_configs import OPTIONS, keys_not_written_out
print(json.dumps([keys_not_written_out(file) for file in OPTIONS if file.name in ("coins", "terse")]))
"""


def test_the_tests_of_the_configuration_cover_both(checkout):
    """pytest fails if a named test does not exist. Of the options, only the new ones are composed."""
    configs = "tests/test_configs.py"
    checkout.test(
        f"{configs}::test_every_file_begins_with_a_comment_that_says_what_it_is",
        f"{configs}::test_every_file_is_plain_yaml_without_repeated_keys",
        f"{configs}::test_all_files_are_options_of_a_group",
        "tests/test_registered.py::test_every_component_of_the_configuration_has_a_registered_name_of_its_own",
    )
    assert checkout.run(COVERED) == [{}, {}]
