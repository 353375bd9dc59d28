"""Judge model that is the policy itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from components.rewards.llm.judge_model import JudgeModelSpec

if TYPE_CHECKING:
    from components.rewards.llm.protocol import ModelClient
    from components.rewards.protocol import Means


class PolicyJudge(JudgeModelSpec):
    """The policy whose episodes are judged, with the weights that generated them."""

    name: Literal["policy"] = "policy"

    asks_policy: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "policy"

    def build(self, means: Means) -> ModelClient:
        from components.rewards.llm.local_model import LocalModelClient

        return LocalModelClient(self, means)

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
