"""Tokenizer of Gemma 3 from a GGUF file, which holds SentencePiece's vocabulary and scores.

transformers 5.17 reads such a file with other merges and another treatment of spaces. Here the merges follow from the
vocabulary: a piece is merged from every pair of pieces that make it up, in the order of the scores. Runs of spaces,
tabs and line breaks have no score and are merged first, the longest ones before the others. The vocabulary, the set of
merges and the tokens of texts are those of the published `tokenizer.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPACE = "▁"
"""SentencePiece's character for a space; GGUF writes runs of it as spaces."""
_CONTROL, _DEFINED = 3, 4
"""Types of tokens that match whole in a text."""
_NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_SPECIAL = {*_NAMED.values(), "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"}
_UNSCORED = -1000.0
"""Score of tokens that SentencePiece did not learn."""


def gemma_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file of Gemma 3 as one of transformers."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(path).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    tokens = [token.replace(" ", SPACE) for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary, scores)
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=_NAMED["unk_token"], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    begin = _NAMED["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, vocabulary[begin])]
    )
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=token in _SPECIAL, normalized=False) for token in whole])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **_NAMED)


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs that are merged, in the order of their ranks."""
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]

    def rank(pair: tuple[str, str]) -> tuple[float, int, int]:
        piece = "".join(pair)
        score = scores[vocabulary[piece]]
        run = score == _UNSCORED
        return (-1.0 if run else -score, -len(piece) if run else 0, -len(pair[0]))

    return sorted(pairs, key=rank)
