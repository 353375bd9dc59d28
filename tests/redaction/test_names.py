"""Keys that are secret by their name, and similar keys that are not."""

from __future__ import annotations

import pytest

from components.redaction import is_secret, secrets_in
from components.redaction.names import is_harmless, names_variable


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "token", "judge.password", "client-secret", "authorization",
     "aws_access_key_id", "private_key", "headers.Cookie", "OPENAI_KEY", "WANDB_KEY", "dsn", "pat", "github_pat",
     "--api-key", "X-Api-Key", "db_pass", "PGPASSWORD", "SharedAccessKey", "AccountKey", "access_tokens", "hftoken",
     "connection_string", "reward.model.extra.extra_headers.Authorization", "llm_key", "credentials", "DB_PWD"],
)  # fmt: skip
def test_names_of_secrets(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "tokenizer", "pack_tokens", "eos_token", "pad_token", "key", "keys", "stage_key", "stop_token",
     "auth.timeout", "secretary", "author", "monkey", "normalization", "key_variable", "api_key_env", "password_file",
     "token_budget", "secret_name", "num_key_value_heads", "answer_key", "tokens_per_minute", "pattern", "path",
     "on_pass", "pass_at_k", "compass", "session", "public_key", "sort_key", "Dashboard", "cookie_jar_size"],
)  # fmt: skip
def test_names_that_only_look_alike(key):
    assert not is_secret(key)


@pytest.mark.parametrize("key", ["key_variable", "api_key_env", "source_key_variable", "token_env_var"])
def test_names_of_variables(key):
    assert names_variable(key)


@pytest.mark.parametrize("key", ["variables", "env", "environment", "headers", "variable"])
def test_other_names(key):
    assert not names_variable(key)


@pytest.mark.parametrize(
    "value",
    [
        *("(x9kd93", "\\x9kd93", "***x9kd", "{{x9kd93", "{a}9kd93", "<a>9kd93", "%(9kd93", "%s-9kd93", ".*9kd93"),
        *("[^9kd93", "os.9kd93", "$A-9kd93", "$ABC9x", "${X}hunter", "$X hunter2", "<x9kd93", "$ecret"),
    ],
)
def test_placeholder_prefix_does_not_hide_a_secret(value):
    assert not is_harmless(value, "api_key")
    assert secrets_in({"db": {"password": value}})


@pytest.mark.parametrize(
    "value", ["$NAME", "${NAME}", "<token>", "{name}", "{{ key }}", "***", "%s", "%(key)s", "[KEY]"]
)
def test_a_whole_placeholder_is_none(value):
    assert is_harmless(value, "api_key")
