"""Keys that are secret by their name, and similar keys that are not."""

from __future__ import annotations

from components.redaction import is_secret, secrets_in
from components.redaction.names import is_harmless, names_variable

SECRETS = [
    "api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "token", "judge.password", "client-secret", "authorization",
    "aws_access_key_id", "private_key", "headers.Cookie", "OPENAI_KEY", "WANDB_KEY", "dsn", "pat", "github_pat",
    "--api-key", "X-Api-Key", "db_pass", "PGPASSWORD", "SharedAccessKey", "AccountKey", "access_tokens", "hftoken",
    "connection_string", "reward.model.extra.extra_headers.Authorization", "llm_key", "credentials", "DB_PWD",
]  # fmt: skip
ALIKE = [
    "max_tokens", "tokenizer", "pack_tokens", "eos_token", "pad_token", "key", "keys", "stage_key", "stop_token",
    "auth.timeout", "secretary", "author", "monkey", "normalization", "key_variable", "api_key_env", "password_file",
    "token_budget", "secret_name", "num_key_value_heads", "answer_key", "tokens_per_minute", "pattern", "path",
    "on_pass", "pass_at_k", "compass", "session", "public_key", "sort_key", "Dashboard", "cookie_jar_size",
]  # fmt: skip
VARIABLES = ["key_variable", "api_key_env", "source_key_variable", "token_env_var"]
PREFIXED = [
    "(x9kd93", "\\x9kd93", "***x9kd", "{{x9kd93", "{a}9kd93", "<a>9kd93", "%(9kd93", "%s-9kd93", ".*9kd93",
    "[^9kd93", "os.9kd93", "$A-9kd93", "$ABC9x", "${X}hunter", "$X hunter2", "<x9kd93", "$ecret",
]  # fmt: skip
PLACEHOLDERS = ["$NAME", "${NAME}", "<token>", "{name}", "{{ key }}", "***", "%s", "%(key)s", "[KEY]"]


def test_names_of_secrets_and_names_that_only_look_alike():
    assert [key for key in (*SECRETS, *ALIKE) if is_secret(key)] == SECRETS


def test_names_of_variables():
    others = ["variables", "env", "environment", "headers", "variable"]
    assert [key for key in (*VARIABLES, *others) if names_variable(key)] == VARIABLES


def test_a_placeholder_is_no_secret_and_its_prefix_hides_none():
    values = [*PREFIXED, *PLACEHOLDERS]
    assert [value for value in values if is_harmless(value, "api_key")] == PLACEHOLDERS
    assert [value for value in PREFIXED if not secrets_in({"db": {"password": value}})] == []
