"""What is masked, and what stays readable."""

from __future__ import annotations

import pytest

from components.redaction import is_secret, mask, mask_override


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "token", "judge.password", "client-secret", "authorization",
     "aws_access_key_id", "private_key", "headers.Cookie"],
)  # fmt: skip
def test_names_of_secrets(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokenizer", "pack_tokens", "eos_token", "pad_token", "key", "keys", "stage_key",
     "auth.timeout", "secretary", "author", "monkey", "normalization"],
)  # fmt: skip
def test_names_that_only_look_alike(key):
    assert not is_secret(key)


def test_masking_leaves_the_rest_alone():
    config = {
        "a": {"api_key": "s3cret", "password": None, "token": 3, "secrets": ["one", {"x": "two"}]},
        "url": "postgresql://user:s3cret@host/db",
        "plain": ["https://host/path@v1", 1.5, True, None],
    }
    assert mask(config) == {
        "a": {"api_key": "***", "password": None, "token": 3, "secrets": ["***", {"x": "two"}]},
        "url": "postgresql://user:***@host/db",
        "plain": ["https://host/path@v1", 1.5, True, None],
    }


def test_overrides():
    assert mask_override("+judge.api_key=abc") == "+judge.api_key=***"
    assert mask_override("algorithm.learning_rate=1e-4") == "algorithm.learning_rate=1e-4"
    assert mask_override("store=s3://me:abc@host/x") == "store=s3://me:***@host/x"
    assert mask_override("-m") == "-m"
