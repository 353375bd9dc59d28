"""Specs of deployment targets, selected by `name`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from components.specs import Spec
from components.specs.served import check_address

if TYPE_CHECKING:
    from components.deployment.targets.protocol import DeploymentTarget

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class LocalTarget(Spec):
    """Espalier's own server on this machine, which outlives the run."""

    name: Literal["local"] = "local"
    port: int = Field(0, ge=0, le=65535)
    """Port of the server. 0 takes a free one, so the previous server stays up until the new one has passed its canary.
    With a fixed port the previous server is stopped first, and restarted if the canary fails."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds in which the server must respond."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Serving engine: `transformers`, our own server, which matches the policy token for token, or `vllm`."""
    python: str | None = None
    """Python of the environment in which vLLM is installed; null: `.venv-vllm/bin/python` beside the code
    (`make vllm`)."""
    arguments: dict[str, str | int | float | bool] = {}
    """Options of vLLM's server: `{tensor-parallel-size: 2}`; true sets an option without a value."""

    def build(self) -> DeploymentTarget:
        from components.deployment.targets.local import Local

        return Local(self)


class TogetherTarget(Spec):
    """Together's dedicated endpoints. Together fetches the model from the Hugging Face Hub or a presigned URL."""

    name: Literal["together"] = "together"
    source: str = Field(min_length=1)
    """Repository on the Hugging Face Hub (`owner/name`) with the merged export, or a presigned URL of its archive. Such
    a URL is a secret, so give it as `env:NAME`, the environment variable that holds it."""
    hardware: str = Field(min_length=1)
    """Hardware id, as listed by Together."""
    replicas: int = Field(1, ge=1)
    """Number of replicas."""
    url: str = "https://api.together.xyz/v1"
    """Base URL of the API."""
    key_variable: str = Field("TOGETHER_API_KEY", pattern=VARIABLE)
    """Environment variable that holds the API key."""
    source_key_variable: str | None = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable with the token for a private repository; null sends none."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that one request may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a failed request is retried."""
    ready_timeout: float = Field(3600.0, gt=0)
    """Seconds in which the model must be ready, and again the endpoint."""
    poll: float = Field(10.0, gt=0)
    """Seconds between two status requests."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value, example="https://api.together.xyz/v1", key="deploy.target.key_variable")
        return value.rstrip("/")

    def build(self) -> DeploymentTarget:
        from components.deployment.targets.together import Together

        return Together(self)


class HubTarget(Spec):
    """Repository on the Hugging Face Hub; upload only, without an endpoint."""

    name: Literal["hub"] = "hub"
    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository as `owner/name`; created if it does not exist."""
    private: bool = True
    """Create the repository as private."""
    url: str | None = None
    """Base URL of the hub; null uses HF_ENDPOINT, or huggingface.co."""
    key_variable: str = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable that holds the token, which needs write permission."""

    def build(self) -> DeploymentTarget:
        from components.deployment.targets.hub import Hub

        return Hub(self)


TargetSpec = Annotated[LocalTarget | TogetherTarget | HubTarget, Field(discriminator="name")]
