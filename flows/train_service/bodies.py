"""Bodies of requests of the Tinker API (tinker 0.38), as JSON. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.specs import Spec

Number = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=128, pattern=r"^[\w@=+-][\w.@=+-]*(/[\w@=+-][\w.@=+-]*)*$")]
"""Name of a checkpoint."""
Lifetime = Annotated[int, Field(ge=3600, le=315_360_000)] | None
"""Time to live of a checkpoint in seconds; None: without limit."""


class Body(Spec):
    """Body of a request."""

    type: str | None = None
    """Name of the request, which its route repeats."""


class OfSession(Body):
    """A request that names a session only."""

    session_id: str


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class LoraConfig(Spec):
    """Adapter of a model."""

    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamConfig(Spec):
    """The optimizer of all models."""

    type: Literal["adamw"] = "adamw"


class NewModel(OfSession):
    """A request that creates a model."""

    model_seq_id: Number
    user_metadata: dict[str, Any] | None = None


class CreateModel(NewModel):
    base_model: str
    lora_config: LoraConfig
    optimizer_config: AdamConfig = AdamConfig()


class OfModel(Body):
    """A request that names a model only."""

    model_id: str


class AdamParams(Spec):
    """Parameters of an optimizer step."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)
    """Largest norm of the gradient; 0: no limit."""


class Training(OfModel):
    """A request to a model. Requests run in the order of their numbers."""

    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class OptimStep(Training):
    adam_params: AdamParams


class Save(Training):
    """A request that saves a checkpoint."""

    path: Name | None
    ttl_seconds: Lifetime = None
    user_metadata: dict[str, str] | None = None


class SaveWeights(Save):
    path: Name
    overwrite: bool = False


class SaveForSampler(Save):
    path: Name | None = None
    """None: a sampling session of the current weights, without a name."""
    sampling_session_seq_id: Number | None = None
    """Number of that session."""
    kind: Literal["snapshot"] = "snapshot"
    overwrite: Literal[True] = True


class FromState(Body):
    """A request that reads a saved state."""

    path: str
    optimizer: bool
    optimizer_config: AdamConfig | None = None
    weights_access_token: None = None


class LoadWeights(Training, FromState):
    """Load a state into a model."""

    session_id: None = None


class CreateFrom(NewModel, FromState):
    """Create a model from a state."""

    base_model: str | None = None


class CreateSampler(OfSession):
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(Spec):
    tokens: list[Number]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Spec):
    chunks: list[TextChunk]


class SamplingParams(Spec):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: str | list[str] | list[Number] | None = None
    """Strings or tokens that end a sample; None: the model's own end, an empty list: nothing but `max_tokens`."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Body):
    """Samples of a prompt."""

    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0)]
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=20)
    topk_sample_logprobs: int = Field(0, ge=0, le=20)
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class Checkpoint(Body):
    """A request that names a checkpoint."""

    tinker_path: str


class SetLifetime(Body):
    ttl_seconds: Lifetime
