"""A reward needs its module and its YAML, and no other change (CONTRIBUTING.md)."""

from __future__ import annotations

import pytest

from tests.scratch_copy import Checkout

pytestmark = pytest.mark.timeout(1800)

FILES = {
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
JUDGE = """
import json

from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.stages.base import Context
from flows.stages.execute import run_stage

spec = compose(["+experiment=smoke", "reward=terse", "reward.token_cost=0.5", "root={ROOT}"])
requests = Requests(spec)
context = Context.at(spec.root)
played, _ = run_stage(requests.collect(None, 1), context)
judged, status = run_stage(requests.judge(played), context)
tokens = played.metrics["sampled_tokens"] / played.metrics["episodes"]
expected = played.metrics["success"] - 0.5 * tokens
from docs import reference

documented = reference.generated().count("`reward.token_cost`")
print(json.dumps([status, judged.metrics["unscored"], judged.metrics["reward"], expected, documented]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("adding") / "copy")
    checkout.add(FILES)
    return checkout


def test_an_added_reward_judges_episodes_of_the_tiny_model_and_the_documentation_lists_it(checkout):
    status, unscored, reward, expected, documented = checkout.run(
        JUDGE.replace("{ROOT}", str(checkout.folder / "runs"))
    )
    assert (status, unscored) == ("ran", 0.0)
    assert reward == pytest.approx(expected)
    assert documented == 1


def test_the_tests_of_the_configuration_cover_an_added_reward(checkout):
    """pytest fails if a named test does not exist."""
    configs = "tests/test_configs.py"
    checkout.test(
        f"{configs}::test_options_compose_into_valid_experiments_with_every_key_written_out[reward]",
        f"{configs}::test_every_file_begins_with_a_comment_that_says_what_it_is",
        f"{configs}::test_every_file_is_plain_yaml_without_repeated_keys",
        f"{configs}::test_all_files_are_options_of_a_group",
        "tests/test_registered.py::test_every_component_of_the_configuration_has_a_registered_name_of_its_own",
    )
