"""Random models: their size, their tokenizer, and what stage keys hold of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.environments.worlds.shop import TOOLS
from components.errors import SpecError
from components.models import random_weights
from components.models.spec import ArchitectureSpec, FrozenModelSpec, ModelSpec
from components.models.weights import folder, load_tokenizer, prepare
from components.specs import validate
from components.trajectories.chat import ChatFormat
from tests.deployment.tiny import TINY

SIZE = {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 600}
SMALL = ModelSpec(name="small", source="random", architecture=ArchitectureSpec(**SIZE), lora=None)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory):
    return prepare(SMALL, tmp_path_factory.mktemp("models"))


def test_the_architecture_sets_the_size(small_dir):
    config = json.loads((small_dir / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert (config["hidden_size"], config["num_attention_heads"], config["vocab_size"]) == (32, 2, 600)
    assert len(load_tokenizer(small_dir)) == 600


def test_equal_architectures_give_equal_files(small_dir, tmp_path):
    again = prepare(SMALL, tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (small_dir / name).read_bytes()


@given(st.text())
def test_every_text_can_be_tokenized_and_restored(small_dir, text):
    tokenizer = load_tokenizer(small_dir)
    escaped = text.replace("<|", "< |")
    assert tokenizer.decode(tokenizer(escaped, add_special_tokens=False).input_ids) == escaped


def test_digits_are_tokens_and_known_words_are_short(small_dir):
    tokenizer = load_tokenizer(small_dir)
    assert tokenizer.tokenize("4821") == ["4", "8", "2", "1"]
    assert len(tokenizer.tokenize("Call a tool like this")) < len("Call a tool like this") / 3


def test_the_chat_template_shows_tools(small_dir):
    chat = ChatFormat(load_tokenizer(small_dir))
    call = {"id": "call_0_0", "type": "function", "function": {"name": "find_order", "arguments": '{"order": "K482"}'}}
    messages = [{"role": "user", "content": "Order K482"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (stream,) = chat.streams(messages, TOOLS)
    start, end = stream.spans[0]
    assert chat.tokenizer.decode(stream.token_ids[start:end]) == '[find_order(order="K482")]<|im_end|>'
    assert "check_policy(item): what may be done with an item" in chat.tokenizer.decode(stream.token_ids[:start])


def test_keys_of_models_without_an_architecture_do_not_name_it():
    """Keys of earlier runs stay valid."""
    lora = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}
    common = {"name": "tiny", "source": "random", "revision": None, "dtype": "float32"}
    assert TINY.key_part() == {**common, "max_length": 512, "quantization": "none", "lora": lora}
    assert FrozenModelSpec(name="tiny", source="random").key_part() == {**common, "adapter": None}


def test_the_size_and_the_words_are_part_of_the_key(tmp_path, monkeypatch):
    before = SMALL.key_part(), folder(SMALL, tmp_path)
    assert before[0]["architecture"] == {**SIZE, "words": random_weights.words_digest()}
    larger = SMALL.model_copy(update={"architecture": ArchitectureSpec(**{**SIZE, "layers": 3})})
    assert larger.key_part() != before[0]
    assert folder(larger, tmp_path) != before[1]
    words = tmp_path / "words.json"
    words.write_text('{"the": 3}')
    monkeypatch.setattr(random_weights, "WORDS", words)
    assert SMALL.key_part() != before[0]
    assert folder(SMALL, tmp_path) != before[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "hub"}, "architecture: .*null, because source=hub determines the size; or source=random"),
        ({"architecture": {**SIZE, "hidden": 34}}, "heads: .*a number of which twice divides hidden=34; 2 does not"),
        ({"architecture": {**SIZE, "vocabulary": 100}}, "vocabulary"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    data = {"name": "small", "source": "random", "architecture": SIZE, **change}
    with pytest.raises(SpecError, match=message):
        validate(ModelSpec, data)


def test_a_teacher_can_have_an_architecture():
    teacher = FrozenModelSpec(name="small", source="random", architecture=ArchitectureSpec(**SIZE))
    assert teacher.model(max_length=64).architecture == SMALL.architecture
