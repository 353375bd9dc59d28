"""A new engine and a new judge model are a module and a config file each; nothing else changes."""

from __future__ import annotations

import pytest

from tests.scratch_copy import Checkout

ENGINE = '''
"""Engine of a test."""

from collections.abc import Iterator
from typing import Any, Literal

from components.errors import Problem, ResourceError
from components.inference.engine_spec import EngineSpec
from components.inference.protocol import EngineHost, ModelEngine
from components.models.spec import ModelSpec


class EchoSpec(EngineSpec):
    """Echo of the last message."""

    name: Literal["echo"] = "echo"
    volume: int = 1
    """Loudness."""

    def key_part(self) -> dict[str, Any]:
        return {"inference": {"name": self.name}}

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        raise ResourceError("no wall")

    def check_prerequisites(self) -> None:
        raise ResourceError("inference.volume: no wall to echo from")

    def problems(self, *, rounds: int, lora_rank: int, min_p: float, top_p: float, overlap: int) -> Iterator[Problem]:
        if self.volume > 10:
            yield Problem("inference.volume", f"{self.volume}: louder than {rounds} rounds bear")
'''

JUDGE = '''
"""Judge model of a test."""

from typing import Any, ClassVar, Literal

from components.errors import ResourceError
from components.rewards.llm.judge_model import JudgeModelSpec
from components.rewards.llm.protocol import ModelClient
from components.rewards.protocol import RewardResources


class OracleJudge(JudgeModelSpec):
    """Oracle."""

    paid: ClassVar[bool] = True

    name: Literal["oracle"] = "oracle"
    temple: str = "Delphi"
    """Place."""

    @property
    def label(self) -> str:
        return self.temple

    def key_part(self) -> dict[str, Any]:
        return {"name": self.name, "temple": self.temple}

    def build(self, means: RewardResources) -> ModelClient:
        raise ResourceError("closed")

    def check_prerequisites(self, budget: float | None) -> None:
        if budget is not None:
            raise ResourceError("an oracle names no price")
'''

FILES = {
    "components/inference/engines/echo.py": ENGINE,
    "conf/inference/echo.yaml": "# An echo.\nname: echo\nvolume: 1  # loudness\n",
    "components/rewards/llm/models/oracle.py": JUDGE,
    "conf/judge_model/oracle.yaml": "# An oracle.\nname: oracle\ntemple: Delphi  # place\n",
}

USE = """
import json
from components.errors import SpecError
from flows.experiment.compose import compose
from flows.experiment.prerequisites import lacking
from flows.experiment.requests import Requests

def problems(*overrides):
    try:
        compose(["+experiment=quickstart", *overrides])
    except SpecError as error:
        return [str(problem) for problem in error.problems]

judged = ("reward=ruler", "judge_model@reward.model=oracle")
spec = compose(["+experiment=quickstart", "inference=echo", "inference.volume=3", *judged, "judge.budget=1"])
print(json.dumps({
    "dump": [spec.model_dump(mode="json")["inference"], spec.model_dump(mode="json")["reward"]["model"]["temple"]],
    "request": Requests(spec).evaluate(None).spec["inference"],
    "key": [spec.reward.resolved()["model"], spec.inference.key_part()],
    "lacking": list(lacking(spec)),
    "engine": problems("inference=echo", "inference.name=ekho"),
    "judge": problems(*judged, "reward.model.name=orakle")[:1],
    "volume": problems("inference=echo", "inference.volume=11", "rounds=2"),
}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("copy"))
    checkout.add(FILES)
    return checkout.run(USE)


def test_they_are_composed_checked_and_part_of_keys_like_any_other(outcome):
    assert outcome["dump"] == [{"name": "echo", "volume": 3}, "Delphi"]
    assert outcome["request"] == {"name": "echo", "volume": 3}
    assert outcome["key"] == [[{"name": "oracle", "temple": "Delphi"}], {"inference": {"name": "echo"}}]
    assert outcome["lacking"] == ["inference.volume: no wall to echo from", "an oracle names no price"]


def test_their_mistakes_are_reported_like_those_of_any_other(outcome):
    (engine,) = outcome["engine"]
    assert engine.endswith("'ekho': expected one of echo, embedded, litellm, remote, vllm. Did you mean 'echo'?")
    (judge,) = outcome["judge"]
    assert judge.endswith("expected one of embedded, litellm, oracle, policy, served. Did you mean 'oracle'?")
    assert "inference.volume: 11: louder than 2 rounds bear" in outcome["volume"]
