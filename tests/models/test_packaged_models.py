"""Models in packages of the extras `gemma` and `qwen-coder`, where these are installed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.models import packaged
from components.models.gguf_tokenizer import gemma_tokenizer
from components.models.spec import ModelSpec

REAL = Path(os.environ.get("ESPALIER_MODELS", "/nowhere"))
PIECES = ["a", "b", " ", "  ", "\n", "\t", "é", "ß", "日", "本", "🙂", "Z", "9", "_", "▁", "<b>", "the ", "ing", "\x00"]


@pytest.mark.models
def test_the_tokenizer_of_gemma_is_the_published_one(tmp_path):
    from transformers import AutoTokenizer

    try:
        paths, _ = packaged.files_of(ModelSpec(name="gemma-3-270m", source="package"))
    except ResourceError as error:
        pytest.skip(str(error))
    if not REAL.is_dir():
        pytest.skip("ESPALIER_MODELS names no folder of tokenizers")
    own = gemma_tokenizer(packaged.join(paths, tmp_path / "gemma.gguf"))
    published = AutoTokenizer.from_pretrained(REAL / "gemma3")
    draw = random.Random(0)
    texts = [
        "The capital of France is",
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos>",
        "   \t\t x\n\n\n  y",
        Path(__file__).read_text(),
        *("".join(draw.choices(PIECES, k=40)) for _ in range(500)),
    ]
    assert [text for text in texts if own(text).input_ids != published(text).input_ids] == []
    ids = [published(text).input_ids for text in texts]
    assert list(map(own.decode, ids)) == list(map(published.decode, ids))
