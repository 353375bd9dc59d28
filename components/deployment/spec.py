"""Spec of the deployment of the trained policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from components.deployment.targets.spec import TargetSpec
from components.errors import Problem
from components.models.spec import ModelSpec
from components.specs import Spec
from components.specs.marks import SERVER

Format = Literal["merged", "adapter", "gguf"]
Precision = Literal["f32", "f16"]


class CanarySpec(Spec):
    """Canary check: held-out prompts sent to a newly deployed endpoint."""

    prompts: int = Field(4, ge=1)
    """Number of prompts, taken from those on which exports are compared."""
    agreement: float = Field(1.0, ge=0, le=1)
    """Minimum share of prompts on which the endpoint must answer as the policy does; it must answer all of them. Hosts
    that compute in other types than `model.dtype` need less than 1."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one response, and for which a failing endpoint is retried."""


class DeploySpec(Spec):
    mode: Literal["none", "export", "serve"] = "export"
    """`export`: write the policy in each of `formats`, with tokenizer and model card; each export must answer held-out
    prompts like the trained policy and is then registered in MLflow. `serve`: as `export`, and a local
    OpenAI-compatible server of the merged model must answer token for token. `none`: write no export."""
    formats: list[Format] = Field(["merged"], min_length=1)
    """`merged`: safetensors with LoRA merged into the base weights. `adapter`: PEFT's LoRA folder. `gguf`: one file for
    llama.cpp, for Llama architectures only."""
    gguf: Precision = "f16"
    """Data type of the matrices in a GGUF: `f32` is exact, `f16` half as large."""
    policy: Literal["last", "best"] = "last"
    """Policy that is evaluated and exported as the final one. `last`: that of the last round. `best`: of the policies
    evaluated since the start of the rounds, the one with the highest held-out success (or `early_stopping.metric`);
    on a tie, the earliest."""
    prompts: int = Field(8, ge=1)
    """Number of held-out prompts on which exports and policy are compared."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name in the model registry and of files; None uses the experiment's name."""
    register_model: bool | None = None
    """Register the export in MLflow's model registry, where it can become champion. null: unless the model is the one
    for tests (`model=tiny`). false: never, as with `size=tiny`. true: also the model for tests."""
    margin: float = Field(0.0, ge=0, lt=1)
    """Minimum gain in held-out success over the current champion, on the same scenarios, for the policy to replace it;
    with 0 any gain suffices. The first version of a name becomes champion without a comparison."""
    approve: bool = False
    """Require a person's approval before deployment, in Prefect's UI or in the terminal."""
    approve_timeout: float = Field(86400.0, gt=0)
    """Seconds to wait for approval. Then the run ends; running it again asks again."""

    target: Annotated[TargetSpec | None, SERVER] = None
    """Target to which a champion is deployed after the run; None deploys to none."""
    canary: CanarySpec = CanarySpec()
    """Check that a deployment must pass; otherwise the previous deployment stays or is restored."""

    def registers(self, model: ModelSpec) -> bool:
        """Return True if the export of a model is registered. Test runs register nothing unless asked to."""
        return not model.for_tests if self.register_model is None else self.register_model

    @field_validator("formats")
    @classmethod
    def _once(cls, value: list[Format]) -> list[Format]:
        if len(set(value)) < len(value):
            raise ValueError(f"each format once; {', '.join(value)} contains a duplicate")
        return value

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        if parts.get("mode") == "serve" and "merged" not in parts.get("formats", ["merged"]):
            formats = ", ".join(parts["formats"])
            yield Problem(
                "formats", f"{formats}: deploy.mode=serve serves the merged model; expected merged among them"
            )
