"""Families of models that docs/reference/models.md shows: model type, examples, tokenizer and chat template of the
published models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from components.models.chatml import chatml
from tests.trajectories import trl_templates
from tests.trajectories.families import FAMILIES as SHORTENED
from tests.trajectories.families import Family, tokenizer_of

WINDOW = 32
"""Sliding window of the tiny models in tokens: less than their sequences."""


@dataclass(frozen=True)
class Row:
    """A family: models with the same layers and the same chat template."""

    type: str
    """Model type of transformers."""
    models: str
    """Examples of published models."""
    template: str | None
    """Template of TRL; None for that of the published tokenizer, or of `shortened`."""
    published: str | None = None
    """Folder of the published tokenizer."""
    shortened: str | None = None
    """Name in `tests.trajectories.families`: a shortened form of the family's template."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the tiny configuration."""


def _row(type: str, models: str, template: str | None = None, published: str | None = None, **options: Any) -> Row:
    return Row(type, models, template, published, options=options)


def _short(type: str, models: str, shortened: str, **options: Any) -> Row:
    return Row(type, models, None, shortened=shortened, options=options)


ROWS: dict[str, Row] = {
    "Qwen2.5": _row("qwen2", "Qwen2.5-0.5B-Instruct to 72B, Qwen2.5-Coder", "qwen2_5", "qwen3"),
    "Qwen3": _row("qwen3", "Qwen3-0.6B to 32B", None, "qwen3"),
    "Qwen3-2507": _row("qwen3_moe", "Qwen3-30B-A3B-Instruct-2507", "qwen3_instruct_2507", "qwen3"),
    "Qwen3-Next": _row("qwen3_next", "Qwen3-Next-80B-A3B-Instruct", "qwen3_instruct_2507", "qwen3"),
    "Qwen3.5": _row("qwen3_5_text", "Qwen3.5-4B, 27B", "qwen3_5_think"),
    "Qwen3.6": _row("qwen3_5_moe_text", "Qwen3.6-35B-A3B", "qwen3_6"),
    "Llama 3": _row("llama", "Meta-Llama-3-8B-Instruct", "llama3", "llama3_1"),
    "Llama 3.1": _row("llama", "Llama-3.1-8B-Instruct, Llama-3.3-70B-Instruct", "llama3_1", "llama3_1"),
    "Llama 3.2": _row("llama", "Llama-3.2-1B-Instruct, 3B", "llama3_2", "llama3_1"),
    "SmolLM2": _short("llama", "SmolLM2-135M-Instruct to 1.7B", "smollm2"),
    "SmolLM3": _short("smollm3", "SmolLM3-3B", "smollm3", no_rope_layers=[1, 0]),
    "Gemma 2": _row("gemma2", "gemma-2-2b-it to 27b", "gemma"),
    "Gemma 3": _row("gemma3_text", "gemma-3-270m-it, 1b; text of 4b to 27b", None, "gemma3"),
    "Gemma 3n": _row("gemma3n_text", "text of gemma-3n-E2B-it", "gemma3", "gemma3"),
    "Gemma 4": _row("gemma4_text", "text of gemma-4-E4B-it, 31B", "gemma4_v5", num_experts=None),
    "gpt-oss": _row("gpt_oss", "gpt-oss-20b, 120b", "gptoss", "gptoss"),
    "DeepSeek-V3": _row("deepseek_v3", "DeepSeek-V3, V3-0324", None, "deepseek_v3"),
    "DeepSeek-R1 distillates": _row("qwen2", "DeepSeek-R1-Distill-Qwen-1.5B to 32B", "deepseek_r1_distill"),
    "GLM 4.5": _row("glm4_moe", "GLM-4.5-Air, GLM-4.6", "glm4moe"),
    "Mistral": _short("mistral", "Mistral-7B-Instruct-v0.3, Mistral-Nemo", "nemo"),
    "Mistral Small 3": _short("mistral", "Mistral-Small-24B-Instruct-2501", "mistral", sliding_window=None),
    "Mixtral": _short("mixtral", "Mixtral-8x7B-Instruct", "nemo"),
    "Phi-3": _row("phi3", "Phi-3-mini-4k-instruct", "phi3", sliding_window=WINDOW),
    "Phi-3.5": _row("phimoe", "Phi-3.5-MoE-instruct", "phi3_5"),
    "Phi-4": _short("phi3", "phi-4", "phi4"),
    "Command R": _row("cohere", "c4ai-command-r-v01", "cohere"),
    "Aya Expanse, Command R7B": _row("cohere2", "c4ai-command-r7b-12-2024", "cohere2"),
    "LFM2": _row("lfm2", "LFM2-1.2B", "lfm2_v2"),
    "LFM2.5": _row("lfm2_moe", "LFM2.5-8B-A1B", "lfm2_2_5_v2"),
    "Nemotron 3": _row(
        "nemotron_h",
        "Nemotron-3-Nano-30B-A3B",
        "nemotron_3_nano",
        layer_types=["linear_attention", "moe", "full_attention"],
    ),
    "Granite 3": _short("granite", "granite-3.3-2b-instruct", "granite"),
    "Granite 4 hybrid": _short("granitemoehybrid", "granite-4.0-h-tiny", "granite"),
    "OLMo 3": _row("olmo3", "base models of OLMo 3, with ChatML", "chatml"),
    "OLMoE": _row("olmoe", "OLMoE-1B-7B base, with ChatML", "chatml"),
    "Falcon-H1": _row("falcon_h1", "Falcon-H1 base models, with ChatML", "chatml"),
    "Mamba 2": _row("mamba2", "mamba2 base models, with ChatML", "chatml"),
    "BLOOM": _row("bloom", "bloom base models, with ChatML", "chatml"),
}


def tokenizer_and_training(row: Row, tokenizers: Path) -> tuple[Any, str | None]:
    """Return the tokenizer with the chat template, and TRL's training template if there is one."""
    if row.shortened:
        return tokenizer_of(SHORTENED[row.shortened]), None
    if row.template == "chatml":
        tokenizer = tokenizer_of(Family("", "-", ("<|im_start|>", "<|im_end|>")))
        tokenizer.chat_template = chatml(tokenizer)
        return tokenizer, None
    path = trl_templates.TEMPLATES / f"{row.template or row.published}_training.jinja"
    own = row.template is None and row.published == "deepseek_v3"  # TRL's is a later template
    training = path.read_text() if path.is_file() and not own else None
    if row.published:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers / row.published)
        if row.template:
            tokenizer.chat_template = trl_templates.TEMPLATES.joinpath(f"{row.template}.jinja").read_text()
        return tokenizer, training
    return trl_templates.published(str(row.template)), training


def origin(row: Row) -> dict[str, str | None]:
    return {"published": row.published, "template": row.template, "shortened": row.shortened}
