"""What is done with the trained policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from components.deployment.targets.spec import TargetSpec
from components.errors import Problem
from components.specs import Spec

Format = Literal["merged", "adapter", "gguf"]
Precision = Literal["f32", "f16"]


class CanarySpec(Spec):
    """Held-out prompts through an endpoint that was just deployed."""

    prompts: int = Field(4, ge=1)
    """How many, of those that exports are compared on."""
    agreement: float = Field(1.0, ge=0, le=1)
    """Share of them that it has to answer as the policy does; all have to be answered. Hosts that compute in other
    types than `model.dtype` need less than 1."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one answer, and for which an endpoint that fails is asked again."""


class DeploySpec(Spec):
    mode: Literal["none", "export", "serve"] = "export"
    """`export`: the policy in each of `formats`, with tokenizer and model card; each must answer held-out prompts like
    the trained policy, and is then registered in MLflow. `serve`: the same, and a local OpenAI-compatible server on the
    merged model must answer token for token. `none`: the checkpoint stays as it is."""
    formats: list[Format] = Field(["merged"], min_length=1)
    """`merged`: safetensors with LoRA in the base weights. `adapter`: PEFT's LoRA folder. `gguf`: one file for
    llama.cpp, of Llama architectures only."""
    gguf: Precision = "f16"
    """Type of the matrices in a GGUF: `f32` is exact, `f16` half as large."""
    policy: Literal["last", "best"] = "last"
    """Which policy is the final one, evaluated and exported as such. `last`: that of the last round. `best`: of those
    evaluated since the start of the rounds the one with the highest held-out success (or `early_stopping.metric`), of
    equals the earliest."""
    prompts: int = Field(8, ge=1)
    """Held-out prompts on which exports and policy are compared."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name in the model registry, and of files; None takes the experiment's."""
    margin: float = Field(0.0, ge=0, lt=1)
    """Held-out success by which the policy has to beat the present champion, on the same scenarios, to become it; with
    0 any gain does. A name's first version becomes champion without a comparison."""
    approve: bool = False
    """A person is asked before the policy is deployed: in Prefect's UI, or in the terminal."""
    approve_timeout: float = Field(86400.0, gt=0)
    """Seconds to wait for that; then the run ends, and the same run asks again."""

    target: TargetSpec | None = None
    """Where a champion is put into use after the run; None nowhere."""
    canary: CanarySpec = CanarySpec()
    """What a deployment has to pass; else the one before it stays, or comes back."""

    @field_validator("formats")
    @classmethod
    def _once(cls, value: list[Format]) -> list[Format]:
        if len(set(value)) < len(value):
            raise ValueError(f"each format once; {', '.join(value)} says one twice")
        return value

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        if parts.get("mode") == "serve" and "merged" not in parts.get("formats", ["merged"]):
            formats = ", ".join(parts["formats"])
            yield Problem(
                "formats", f"{formats}: deploy.mode=serve serves the merged model; expected merged among them"
            )
