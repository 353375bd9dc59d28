"""What is done with the trained policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.specs import Spec


class DeploySpec(Spec):
    mode: Literal["none", "export", "serve"] = "export"
    """`export`: LoRA merged into the base, safetensors with tokenizer and model card, registered in MLflow.
    `serve`: the same, then a local OpenAI-compatible server is started on it and must answer held-out prompts
    exactly as the trained policy does. `none`: the checkpoint stays an adapter."""
    policy: Literal["last", "best"] = "last"
    """Which policy is the final one, evaluated and exported as such. `last`: that of the last round. `best`: of those
    evaluated since the start of the rounds the one with the highest held-out success (or `early_stopping.metric`), of
    equals the earliest."""
    prompts: int = Field(8, ge=1)
    """Held-out prompts on which export and policy are compared in `serve`."""
    name: str | None = None
    """Name in the model registry; None takes the experiment's."""
    approve: bool = False
    """A person is asked before the policy is deployed: in Prefect's UI, or in the terminal."""
    approve_timeout: float = Field(86400.0, gt=0)
    """Seconds to wait for that; then the run ends, and the same run asks again."""
