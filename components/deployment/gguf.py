"""GGUF: the merged model as one file for llama.cpp and what stands on it (Ollama, LM Studio).

The package `gguf` of llama.cpp knows the format and the names of tensors; the conversion itself is a script of
llama.cpp's repository, of which no maintained package exists. So this is that conversion, for one architecture, Llama
(Llama, SmolLM2), with a byte-level BPE tokenizer: names from the package, query and key rows reordered from halves to
pairs, matrices in float32 or float16, vectors in float32. Any other model is refused by name: a file that loads and
answers something else would be worse than none.
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
"""Kinds of tokens in the format (`gguf.TokenType`)."""


def check_architecture(model_dir: Path) -> None:
    """Raises ResourceError, naming what, where the model or its tokenizer cannot be written as GGUF here."""
    config = json.loads((model_dir / "config.json").read_text())
    named = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    biased = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
    tokenizer = model_dir / "tokenizer.json"
    if named != ARCHITECTURE:
        why = f"its architecture is {named}"
    elif rope != "default":
        why = f"its rotary embedding is scaled ({rope})"
    elif biased:
        why = f"its linear layers have biases ({', '.join(biased)})"
    elif not tokenizer.is_file():
        why = "it has no tokenizer.json"
    elif (kind := json.loads(tokenizer.read_text())["model"]["type"]) != "BPE":
        why = f"its tokenizer is of the kind {kind}"
    elif not json.loads(tokenizer.read_text())["model"]["merges"]:
        why = "its tokenizer merges nothing"
    elif _splitting(json.loads(tokenizer.read_text())) is None:
        why = "its tokenizer splits text in a way that has no name in GGUF here"
    else:
        return
    raise ResourceError(
        f"deploy.formats: gguf: {model_dir.name} cannot be written as GGUF, as {why}; expected {ARCHITECTURE} (Llama, "
        "SmolLM2) with byte-level BPE. Leave gguf out of deploy.formats, or convert the merged export with llama.cpp"
    )


def write_gguf(model_dir: Path, out: Path, *, name: str, precision: Precision) -> int:
    """Writes the model in `model_dir` (safetensors, merged) to the file `out`; returns its size in bytes.

    One tensor is in memory at a time. Raises ResourceError for a model that is no such Llama, ArtifactError for a
    tensor that the architecture does not have.
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
                raise ArtifactError(f"{model_dir}: the tensor {source} has no place in a GGUF of {ARCHITECTURE}")
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
    grouped = config.get("num_key_value_heads") or heads
    for name in names:
        tensor = weights.get(name).float()
        if name.endswith("self_attn.q_proj.weight"):
            tensor = paired(tensor, heads)
        elif name.endswith("self_attn.k_proj.weight"):
            tensor = paired(tensor, grouped)
        yield tensor.numpy().astype(_dtype(tensor.dim(), precision))


def paired(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of GGUF: transformers rotates row i of a head together with row
    i + D/2, GGUF's Llama rows 2i and 2i + 1 (D: rows of a head)."""
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
    """vocabulary: rows of the embedding; those without a token are marked as unused."""
    data = json.loads((model_dir / "tokenizer.json").read_text())
    tokens = {index: token for token, index in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, _NORMAL)
    for added in data.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(data))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(vocabulary)])
    writer.add_token_types([kinds.get(index, _UNUSED) for index in range(vocabulary)])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]])
    tokenizer = load_tokenizer(model_dir)
    writer.add_chat_template(tokenizer.chat_template)
    end = ChatFormat(tokenizer).end_id
    writer.add_eos_token_id(end)  # where an answer ends, as the policy was trained
    writer.add_bos_token_id(end if tokenizer.bos_token_id is None else tokenizer.bos_token_id)  # readers want one
    writer.add_unk_token_id(end if tokenizer.unk_token_id is None else tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    # The chat template writes everything that a prompt begins with.
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _splitting(tokenizer: dict[str, Any]) -> str | None:
    """The name in llama.cpp of how a tokenizer splits text before it merges; None where it has none here."""
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
