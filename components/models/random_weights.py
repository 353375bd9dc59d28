"""Models with random weights: a Llama model and its tokenizer, both reproducible.

Without an architecture the model is a tiny one with a token for each byte, for tests. An architecture sets its size and
trains a byte-level BPE tokenizer on `words.json`, the words of the built-in environments (`python -m docs.words`). Such
a model learns an environment from demonstrations, in minutes on a CPU. Digits are separate tokens, so that numbers can
be copied and compared digit by digit. Weights are drawn with the standard deviation sqrt(2 / (5 · hidden))
(arXiv:1910.05895): with transformers' default of 0.02, so small a model needs more than twice the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts.keys import file_digest
from components.json_text import read_json
from components.models.files import save

if TYPE_CHECKING:
    from components.models.spec import ArchitectureSpec

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens, in the order of their ids."""
WORDS = Path(__file__).with_name("words.json")
"""Words that tokenizers are trained on, with their counts. A word begins with the space before it."""
MAX_LENGTH = 4096
"""Maximum sequence length in tokens."""


def make(out: Path, architecture: ArchitectureSpec | None) -> None:
    """Write a model with random weights, and its tokenizer. architecture: None means the tiny model for tests."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if architecture is None:
        tokenizer, scale = _byte_tokenizer(), 0.02
        shape = _shape(hidden=64, intermediate=128, layers=2, heads=4, shared=2)
    else:
        hidden, heads = architecture.hidden, architecture.heads
        tokenizer, scale = _trained_tokenizer(architecture.vocabulary), math.sqrt(2 / (5 * hidden))
        shape = _shape(hidden=hidden, intermediate=3 * hidden, layers=architecture.layers, heads=heads, shared=heads)
    _save_tokenizer(tokenizer, out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            max_position_embeddings=MAX_LENGTH,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=True,
            initializer_range=scale,
            **shape,
        )
        model = LlamaForCausalLM(config)
    save(model, out)


def words_digest() -> str:
    """Return the SHA-256 of the words that tokenizers are trained on."""
    return file_digest(WORDS)


def split_words(text: str) -> list[str]:
    """Return the words of a text, in the byte-level alphabet, as tokenizers of an architecture split it."""
    return [word for word, _ in _splitter().pre_tokenize_str(text)]


def _shape(*, hidden: int, intermediate: int, layers: int, heads: int, shared: int) -> dict[str, int]:
    """Return the arguments of the model's configuration. shared: number of key-value heads."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
    }


def _byte_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate([*SPECIAL, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained_tokenizer(vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer of this many tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def words() -> Iterator[str]:
        for word, count in read_json(WORDS).items():
            yield from [word] * count

    tokenizer.train_from_iterator(words(), trainer)
    return tokenizer


def _splitter() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _save_tokenizer(tokenizer: Any, out: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.save_pretrained(out)
