"""Llama with a tokenizer that has merges, as GGUF needs it; created in a second, without training."""

from __future__ import annotations

from pathlib import Path

from components.models.random_weights import CHATML


def write_llama(out: Path, *, digits: bool = False) -> Path:
    """Create a model folder with random weights. digits: the tokenizer splits digits, as SmolLM2's does."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if digits:
        alone = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["where is my order of the shop, the customer asks in a system message, 12 1212 12"] * 9, trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    fast.save_pretrained(out)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=400, num_key_value_heads=2, max_position_embeddings=1024, **shape, **special)
    LlamaForCausalLM(config).save_pretrained(out)
    return out
