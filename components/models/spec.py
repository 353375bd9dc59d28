"""Configuration of the trained model, its LoRA adapter, and teacher models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from components.errors import ArtifactError, Problem, SpecError
from components.models.chatml import CHATML, chatml_digest
from components.specs import Spec
from components.specs.marks import FILES, MODEL


class LoraSpec(Spec):
    """Low-rank adapter (LoRA)."""

    rank: int = Field(16, ge=1)
    """Rank r of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update: it is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input during training. Above 0, the trainer's log-probabilities differ from the
    sampler's."""
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter, by the end of their path (`[q_proj, v_proj]`), or `all-linear`: linear layers and experts
    of the language model, without routers and the output head. `[all-linear, gate]` adds the routers of that name."""
    roles: list[str] | None = Field(None, min_length=2)
    """Roles of the episode with an adapter of their own each, such as `[planner, worker]`: all that the agent has. The
    messages of a role are generated with its adapter, and train it alone. null: one adapter for all roles."""

    @field_validator("target_modules")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and not all(value)):
            raise ValueError("all-linear, or at least one name of a layer; model.lora=null trains all weights")
        return value

    @field_validator("roles")
    @classmethod
    def _folder_names(cls, value: list[str] | None) -> list[str] | None:
        for role in value or ():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", role):
                raise ValueError(f"names of letters, digits, _ and -, a letter first; {role!r} is none")
        if value is not None and len({role.casefold() for role in value}) < len(value):
            raise ValueError(f"each role once; {', '.join(value)} contains a duplicate")
        return value

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out null roles, so that they do not change stage keys."""
        data = serialize(self)
        return data if self.roles is not None else {k: v for k, v in data.items() if k != "roles"}


StoredDtype = Literal["float32", "bfloat16", "float16"]
Dtype = StoredDtype | Literal["auto"]


class ArchitectureSpec(Spec):
    """Size of a Llama model with random weights, and of its tokenizer."""

    layers: int = Field(3, ge=1, le=64)
    """Number of transformer layers."""
    hidden: int = Field(128, ge=16, le=4096)
    """Dimension of the hidden states. That of the feed-forward layers is three times as large."""
    heads: int = Field(4, ge=1, le=64)
    """Number of attention heads, each of dimension hidden / heads."""
    vocabulary: int = Field(1024, ge=259, le=2048)
    """Number of tokens of the byte-level BPE tokenizer, which is trained on the words of the built-in environments. At
    least one for each byte and three special ones."""

    @field_validator("heads")
    @classmethod
    def _dividing(cls, value: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden")
        if hidden and hidden % (2 * value):
            raise ValueError(f"a number of which twice divides hidden={hidden}; {value} does not")
        return value

    def key_part(self) -> dict[str, Any]:
        """Return the settings and the digest of the tokenizer's words, for stage keys."""
        from components.models.random_weights import words_digest

        return {**self.model_dump(mode="json"), "words": words_digest()}


LONGEST_TEMPLATE = 1 << 20
"""Maximum size of a chat template in bytes. Published ones have up to 30 kB."""
TEMPLATE = ("chat_template", "chat_template_kwargs", "call_form", "keep_reasoning")
"""Fields that change the chat template of a model's folder."""
OF_MACHINE = {"device", "cuda_graphs"}
"""Fields that depend on the machine, and are left out of stage keys."""
_LATER = ("architecture", *TEMPLATE)
"""Fields that are left out while they are null or empty, so that they do not change stage keys."""


def _template_of(path: Path, value: str) -> str:
    """Return the template of a Jinja file. value: the setting. Raises ValueError for a file without a usable one."""
    from components.trajectories.chat_template import defect

    reason: str | None = "is no file"
    text = ""
    if path.is_file():
        size = path.stat().st_size
        reason = f"has {size} bytes; at most {LONGEST_TEMPLATE} are read" if size else "is empty"
        if 0 < size <= LONGEST_TEMPLATE:
            text = path.read_text(encoding="utf-8")
            reason = defect(text) if "{{" in text else "renders no messages: it has no {{ }}"
    if reason is not None:
        raise ValueError(f"{CHATML}, or the path of a Jinja template that renders messages; {value!r} {reason}")
    return text


class LocalModelSpec(Spec):
    """A model that computes on this machine."""

    name: Annotated[str, MODEL]
    """Hugging Face name, local folder, or (by source) name of a packaged or random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """Source of the weights. `hub`: Hugging Face name or local folder. `package`: weights in Python packages
    (`components.models.packaged`). `random`: seeded random weights."""
    architecture: ArchitectureSpec | None = None
    """Size of a model of `source: random`; null: a tiny model with a token for each byte, for tests."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None means the default branch."""
    dtype: Dtype = "float32"
    """Precision of the weights and of computation. bfloat16 and float16 are slower by orders of magnitude on hardware
    without native support. float16 has eight times the resolution of bfloat16 and a maximum of 65504; training uses
    loss scaling with it. `auto`: that of the stored weights on a GPU, float32 on a CPU without bfloat16 instructions.
    The place of a stage (`compute`) determines it, and stage keys and exports state the result."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Compute device; `auto` uses CUDA if available."""
    chat_template: Annotated[str | None, FILES] = None
    """Chat template in place of the model's own: the path of a Jinja file, which is read at once, or `chatml` for a
    base model without one. null: that of the model."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Values of variables that the chat template reads, such as `{enable_thinking: false}` or `{reasoning_effort:
    low}`. They hold in training, generation and evaluation, and are the defaults of an exported model."""
    call_form: str | None = None
    """Form of tool calls, such as `tagged_json`, `json_text` or `pythonic`; null: the one that the chat template
    writes, or `pythonic`, with the tools in the system message, for a template without a known one."""
    keep_reasoning: bool | None = None
    """True: prompts keep the reasoning of all earlier answers as it was sampled, so that an episode is one history,
    also where the chat template drops it. It holds in training, generation, evaluation and for an exported model on
    Espalier's server; other servers drop it. null: as the model was exported, false for others."""

    @field_validator("chat_template")
    @classmethod
    def _text(cls, value: str | None) -> str | None:
        if value is None or value == CHATML or "{{" in value:
            return value  # the text is that of an earlier validation
        return _template_of(Path(value).expanduser(), value)

    @field_validator("call_form")
    @classmethod
    def _known_form(cls, value: str | None) -> str | None:
        from components.trajectories.call_forms import FORMS
        from components.trajectories.native_calls import PYTHONIC

        if value is not None and value not in (names := [PYTHONIC, *FORMS]):
            raise ValueError(f"one of {', '.join(names)}")
        return value

    @field_validator("architecture")
    @classmethod
    def _of_random_models(cls, value: ArchitectureSpec | None, info: ValidationInfo) -> ArchitectureSpec | None:
        if value is not None and info.data.get("source") in ("hub", "package", "run"):
            raise ValueError(f"null, because source={info.data['source']} determines the size; or source=random")
        return value

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = serialize(self)
        return {name: value for name, value in data.items() if name not in _LATER or value not in (None, {})}

    @property
    def changes_template(self) -> bool:
        """Tell whether the chat template of the model's folder differs from that of the original."""
        return bool(self.template_settings)

    @property
    def template_settings(self) -> dict[str, Any]:
        """The set fields that change the chat template."""
        return {name: value for name in TEMPLATE if (value := getattr(self, name)) not in (None, {})}

    @property
    def for_tests(self) -> bool:
        """Tell whether it is the tiny model with random weights, which only tests a flow."""
        return self.source == "random" and self.architecture is None

    def content(self) -> dict[str, Any]:
        """Return what else determines the model, for stage keys: the digest of a local folder, whose files may change
        at any time, an architecture with its words, the text of ChatML. Raises SpecError for `dtype: auto`."""
        if self.dtype == "auto":
            text = f"auto: a stage key states what it computes in; expected one of {', '.join(get_args(StoredDtype))}"
            raise SpecError([Problem("model.dtype", text)])
        part: dict[str, Any] = {}
        if self.chat_template == CHATML:
            part["chat_template"] = chatml_digest()
        if self.architecture is not None:
            part["architecture"] = self.architecture.key_part()
        elif self.source == "hub" and Path(self.name).is_dir():
            from components.models.digests import folder_digest

            part["content"] = folder_digest(Path(self.name))
        return part  # other weights are created or downloaded once, recorded and verified: `weights.prepare`


class ModelSpec(LocalModelSpec):
    """The model that is trained."""

    max_length: int = Field(2048, ge=16)
    """Maximum sequence length in tokens: prompts and responses of one history."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: linear layers are quantized to 4-bit NormalFloat and stored in 4 bits while an adapter on them trains
    (QLoRA, arXiv:2305.14314). Every stage computes with the quantized weights. Requires bitsandbytes."""
    lora: LoraSpec | None = LoraSpec()
    """LoRA adapter; null trains all weights (full fine-tuning)."""
    cuda_graphs: bool = False
    """Start the kernels of a training step's decoder, and of a decoding pass of the embedded engine, as CUDA graphs, by
    one call of the host each. Requires a GPU, and an adapter without dropout on a model that is not quantized, trains
    on packs (not on padded rows), without sharding and `gradient_checkpointing`. false by default, because it was
    tested on a simulated GPU only."""

    @field_validator("cuda_graphs")
    @classmethod
    def _recordable(cls, value: bool, info: ValidationInfo) -> bool:
        lora = info.data.get("lora")
        if value and info.data.get("device") == "cpu":
            raise ValueError("false with device=cpu: graphs need a GPU")
        if value and (lora is None or lora.dropout or info.data.get("quantization") != "none"):
            raise ValueError("false: graphs need an adapter (lora), lora.dropout=0 and quantization=none")
        return value

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = self._without_default(serialize)
        return data if self.cuda_graphs else {name: value for name, value in data.items() if name != "cuda_graphs"}

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results of stages that train the model, for stage keys."""
        return {**self.model_dump(mode="json", exclude=OF_MACHINE), **self.content()}

    def base(self) -> ModelSpec:
        """Return the spec with the default of `lora`, for stages that do not train."""
        return self.model_copy(update={"lora": LoraSpec()})

    def of_server(self) -> ModelSpec:
        """Return the spec for an engine whose server has another model: without variables of this one's template."""
        return self.model_copy(update={"chat_template_kwargs": {}})


class FrozenModelSpec(LocalModelSpec):
    """A model that is not trained: a judge or a teacher. Keys shared with `model` have the same meaning."""

    source: Literal["hub", "package", "random", "run"] = "hub"  # type: ignore[assignment]  # one more than its base
    """Source of the weights, as of `model`; or `run`: the exported policy of an earlier run below the same root. `name`
    is then an experiment, of which the latest finished run counts, the id of a run, or `latest`."""
    adapter: Annotated[str | None, FILES] = None
    """Folder of a LoRA adapter: a PEFT folder or a checkpoint of a run. None means no adapter."""

    @field_validator("adapter")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())

    def adapter_dir(self) -> Path | None:
        """Return the PEFT folder, None without an adapter. Raises ArtifactError if `adapter` contains no adapter."""
        if self.adapter is None:
            return None
        for folder in (Path(self.adapter), Path(self.adapter) / "adapter"):
            if (folder / "adapter_config.json").is_file() and (folder / "adapter_model.safetensors").is_file():
                return folder
        raise ArtifactError(
            f"{self.adapter} contains no adapter; expected a folder with adapter_config.json and "
            "adapter_model.safetensors, or a checkpoint with such a folder in it"
        )

    def model(self, max_length: int, lora: LoraSpec | None = None) -> ModelSpec:
        """Return it as a ModelSpec. max_length: maximum sequence length in tokens."""
        shared = self.model_dump(exclude={"adapter"})
        return ModelSpec(**shared, max_length=max_length, lora=lora or LoraSpec())

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys: the adapter's digest, not its path."""
        from components.models import trained_weights

        folder = self.adapter_dir()
        digest = None if folder is None else trained_weights.digest(folder)
        own = self.model_dump(mode="json", exclude={"device"})
        return {**own, **self.content(), "adapter": digest}
