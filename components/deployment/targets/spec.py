"""Where a champion is put into use, told apart by `name`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from components.specs import Spec
from components.specs.served import check_address

if TYPE_CHECKING:
    from components.deployment.targets.protocol import Target

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class LocalTarget(Spec):
    """A server of our own on this machine, which outlives the run."""

    name: Literal["local"] = "local"
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free one, so that the server before it stays up until the new one has passed its canary. With a port of
    its own the server before it is stopped first, and started again where the canary fails."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds in which it must answer."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What answers: our own server, whose answers are the policy's token for token, or vLLM's."""
    python: str | None = None
    """Python of the environment that vLLM is installed in; null: `.venv-vllm/bin/python` beside the code
    (`make vllm`)."""
    arguments: dict[str, str | int | float | bool] = {}
    """Options of vLLM's server: `{tensor-parallel-size: 2}`; true is an option without a value."""

    def build(self) -> Target:
        from components.deployment.targets.local import Local

        return Local(self)


class TogetherTarget(Spec):
    """Together's dedicated endpoints. The model comes from a repository on the Hugging Face Hub, or a presigned URL."""

    name: Literal["together"] = "together"
    source: str = Field(min_length=1)
    """Repository on the Hugging Face Hub (`owner/name`) that holds the merged export, or the presigned URL of its
    archive, where Together fetches it: that URL is a secret, so `env:NAME` names the environment variable that holds
    it."""
    hardware: str = Field(min_length=1)
    """Id of the hardware, as Together lists them."""
    replicas: int = Field(1, ge=1)
    """How many answer."""
    url: str = "https://api.together.xyz/v1"
    """Of the API."""
    key_variable: str = Field("TOGETHER_API_KEY", pattern=VARIABLE)
    """Environment variable that holds the key."""
    source_key_variable: str | None = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable with the token for a private repository; null sends none."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that one request may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a request that the host fails is sent again."""
    ready_timeout: float = Field(3600.0, gt=0)
    """Seconds in which model and endpoint must be ready, each."""
    poll: float = Field(10.0, gt=0)
    """Seconds between two looks."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value, example="https://api.together.xyz/v1", key="deploy.target.key_variable")
        return value.rstrip("/")

    def build(self) -> Target:
        from components.deployment.targets.together import Together

        return Together(self)


class HubTarget(Spec):
    """A repository on the Hugging Face Hub; nothing answers there."""

    name: Literal["hub"] = "hub"
    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """`owner/name`; made where there is none."""
    private: bool = True
    """A repository that is made is private."""
    url: str | None = None
    """Of the hub; null takes HF_ENDPOINT, or huggingface.co."""
    key_variable: str = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable that holds the token, which must be allowed to write."""

    def build(self) -> Target:
        from components.deployment.targets.hub import Hub

        return Hub(self)


TargetSpec = Annotated[LocalTarget | TogetherTarget | HubTarget, Field(discriminator="name")]
