"""GGUF export: the merged model as one file for llama.cpp and the software based on it (Ollama, LM Studio).

llama.cpp's package `gguf` provides the format and the names of tensors; the conversion itself is a script in
llama.cpp's repository, without a maintained package. This module is that conversion for one architecture, Llama (Llama,
SmolLM2), with a byte-level BPE tokenizer: names from the package, query and key rows reordered from halves to pairs,
matrices in float32 or float16, vectors in float32. Any other model is rejected by name: a file that loads and computes
something else would be worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.deployment.spec import Precision
from components.errors import ArtifactError, ResourceError
from components.models.files import Weights
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat

if TYPE_CHECKING:
    import numpy as np
    import torch

ARCHITECTURE = "LlamaForCausalLM"
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
"""Token types of the format (`gguf.TokenType`)."""


def check_architecture(model_dir: Path) -> None:
    """Raise ResourceError, with the reason, if the model or its tokenizer cannot be written as GGUF."""
    config = json.loads((model_dir / "config.json").read_text())
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    biased = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
    tokenizer = model_dir / "tokenizer.json"
    if architecture != ARCHITECTURE:
        reason = f"its architecture is {architecture}"
    elif rope != "default":
        reason = f"its rotary embedding is scaled ({rope})"
    elif biased:
        reason = f"its linear layers have biases ({', '.join(biased)})"
    elif not tokenizer.is_file():
        reason = "it has no tokenizer.json"
    elif (kind := json.loads(tokenizer.read_text())["model"]["type"]) != "BPE":
        reason = f"its tokenizer has the type {kind}"
    elif not json.loads(tokenizer.read_text())["model"]["merges"]:
        reason = "its tokenizer has no merges"
    elif _pre_tokenizer(json.loads(tokenizer.read_text())) is None:
        reason = "GGUF has no name here for the way in which its tokenizer splits text"
    else:
        return
    raise ResourceError(
        f"deploy.formats: gguf: {model_dir.name} cannot be written as GGUF: {reason}; expected {ARCHITECTURE} (Llama, "
        "SmolLM2) with byte-level BPE. Leave gguf out of deploy.formats, or convert the merged export with llama.cpp"
    )


def write_gguf(model_dir: Path, out: Path, *, name: str, precision: Precision) -> int:
    """Write the model in `model_dir` (safetensors, merged) to the file `out`; return its size in bytes.

    One tensor is in memory at a time. Raises ResourceError for an unsupported model, ArtifactError for a tensor that
    the architecture does not have.
    """
    from gguf import MODEL_ARCH, GGUFWriter, LlamaFileType, get_tensor_name_map

    check_architecture(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    writer = GGUFWriter(out, "llama")
    _describe(writer, config, name, LlamaFileType.ALL_F32 if precision == "f32" else LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, model_dir, config["vocab_size"])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with Weights(model_dir) as weights:
        stored = {}
        for source in sorted(weights.where):
            if source.endswith(".rotary_emb.inv_freq") or (
                source == "lm_head.weight" and config["tie_word_embeddings"]
            ):
                continue
            target = names.get_name(source, try_suffixes=(".weight",))
            if target is None:
                raise ArtifactError(f"{model_dir}: the tensor {source} does not exist in a GGUF of {ARCHITECTURE}")
            stored[source] = target
            shape = weights.where[source].get_slice(source).get_shape()
            kind = _dtype(len(shape), precision)
            size = kind.itemsize
            for length in shape:
                size *= length
            writer.add_tensor_info(target, shape, kind, size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in _arrays(weights, list(stored), config, precision):
            writer.write_tensor_data(array)
    writer.close()
    return out.stat().st_size


def _arrays(weights: Weights, names: list[str], config: dict[str, Any], precision: Precision) -> Iterator[np.ndarray]:
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    for name in names:
        tensor = weights.get(name).float()
        if name.endswith("self_attn.q_proj.weight"):
            tensor = paired(tensor, heads)
        elif name.endswith("self_attn.k_proj.weight"):
            tensor = paired(tensor, key_heads)
        yield tensor.numpy().astype(_dtype(tensor.dim(), precision))


def paired(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key projection in the order of GGUF.

    transformers rotates row i of a head together with row i + D/2, GGUF's Llama rows 2i and 2i + 1 (D: rows of a head).
    """
    rows, columns = weight_OI.shape
    return weight_OI.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()


def _dtype(dimensions: int, precision: Precision) -> np.dtype:
    import numpy as np

    return np.dtype(np.float16 if precision == "f16" and dimensions > 1 else np.float32)


def _describe(writer: Any, config: dict[str, Any], name: str, file_type: int) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, model_dir: Path, vocabulary: int) -> None:
    """Write tokens, merges and chat template. vocabulary: rows of the embedding; those without a token are marked as
    unused."""
    data = json.loads((model_dir / "tokenizer.json").read_text())
    tokens = {index: token for token, index in data["model"]["vocab"].items()}
    token_types = dict.fromkeys(tokens, _NORMAL)
    for added in data.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        token_types[added["id"]] = _CONTROL if added["special"] else _USER
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(data))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(vocabulary)])
    writer.add_token_types([token_types.get(index, _UNUSED) for index in range(vocabulary)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]])
    tokenizer = load_tokenizer(model_dir)
    writer.add_chat_template(tokenizer.chat_template)
    end = ChatFormat(tokenizer).end_id
    writer.add_eos_token_id(end)  # the end of an answer in training
    writer.add_bos_token_id(end if tokenizer.bos_token_id is None else tokenizer.bos_token_id)  # readers require one
    writer.add_unk_token_id(end if tokenizer.unk_token_id is None else tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    # The chat template writes the start of the prompt.
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the tokenizer's text splitting; None if it has none here."""
    split = tokenizer.get("pre_tokenizer") or {}
    if (tokenizer.get("normalizer") or {}).get("type") not in (None, "Sequence"):
        return None
    if (tokenizer.get("normalizer") or {}).get("normalizers"):
        return None
    parts = split.get("pretokenizers", [split])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"] and not parts[0]["add_prefix_space"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    return None
