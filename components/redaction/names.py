"""Keys whose value is a secret by their name, and harmless values under such keys.

Names are compared word by word, so `max_tokens`, `tokenizer` and `eos_token` are no secrets. The last word decides:
`api_key_variable`, `password_file` and `token_budget` describe a secret and do not hold one.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from components.redaction.references import reference

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LONGEST = 200
"""Maximum number of characters of a name that are inspected, from its end."""

_SECRET = {
    "apikey", "apikeys", "auth", "authorization", "bearer", "cookie", "cookies", "cred", "credential", "credentials",
    "creds", "dsn", "htpasswd", "jwt", "otp", "passcode", "passphrase", "passphrases", "passwd", "password",
    "passwords", "pat", "pw", "pwd", "secret", "secrets", "sessionid",
}  # fmt: skip
_SUFFIXES = (
    "accesskey", "accesstoken", "apikey", "apitoken", "authtoken", "bearertoken", "hftoken", "passphrase", "passwd",
    "password", "privatekey", "refreshtoken", "secretkey",
)  # fmt: skip
"""Suffixes of words that are written without a separator."""
_PASSWORDS = {"passcode", "passphrase", "passwd", "password", "passwords", "pwd", "secret"}
"""Words under which even a number is a secret."""
_METADATA_WORDS = {
    "budget", "class", "column", "count", "dir", "directory", "enabled", "env", "envvar", "expiry", "factory", "field",
    "file", "files", "folder", "format", "header", "hint", "kind", "length", "level", "limit", "location", "manager",
    "max", "method", "min", "mode", "name", "names", "number", "path", "paths", "pattern", "policy", "position",
    "prefix", "prompt", "provider", "question", "ref", "reference", "regex", "required", "rule", "rules", "scheme",
    "size", "source", "strategy", "target", "template", "timeout", "ttl", "type", "types", "var", "variable",
    "variables", "vars",
}  # fmt: skip
"""Last words of names that only describe a secret."""
_BEFORE_TOKENS = {"access", "api", "auth", "bearer", "hf", "id", "personal", "refresh", "secret", "session"}
_NO_TOKEN = {
    "added", "additional", "answer", "assistant", "begin", "blank", "bos", "by", "class", "cls", "control", "each",
    "end", "eos", "extra", "first", "image", "last", "mask", "max", "middle", "min", "new", "newline", "next", "no",
    "oov", "out", "pad", "per", "prefix", "previous", "prompt", "reserved", "role", "sep", "separator", "special",
    "start", "stop", "suffix", "system", "text", "think", "thinking", "tool", "turn", "unk", "unknown", "user",
    "vocab", "word",
}  # fmt: skip
"""Words before `token` that mark a tokenizer's token."""
_NO_KEY = {
    "accept", "answer", "any", "arrow", "artifact", "by", "cache", "checkpoint", "column", "config", "data", "dataset",
    "dict", "down", "enter", "evaluation", "feature", "field", "foreign", "from", "full", "gold", "group", "hash", "id",
    "image", "index", "input", "item", "json", "key", "label", "left", "lookup", "map", "metadata", "metric", "name",
    "no", "object", "of", "option", "output", "parent", "partition", "per", "policy", "primary", "prompt", "public",
    "query", "question", "record", "request", "result", "reward", "right", "row", "run", "score", "sort", "stage",
    "state", "step", "sub", "table", "tag", "target", "task", "text", "the", "to", "tree", "unique", "up", "value",
    "with", "yaml",
}  # fmt: skip
"""Words before `key` that mark a key of a table or of data."""
_BEFORE_KEY = {
    "access", "account", "anthropic", "api", "auth", "aws", "azure", "client", "cohere", "encryption", "gemini",
    "google", "groq", "hf", "license", "master", "mistral", "openai", "openrouter", "private", "secret", "service",
    "sharedaccess", "shared", "signing", "ssh", "storage", "subscription", "together", "wandb",
}  # fmt: skip
"""Words before `key` or `keys` that mark a secret anywhere in the name."""
_BEFORE_PASS = {"admin", "db", "ftp", "git", "http", "imap", "mail", "mysql", "pg", "proxy", "redis", "root", "smtp"}
_AFTER = {"id", "secret", "string", "text"}
"""Words that may follow `key` and `token`: `aws_access_key_id`."""

_NULL_VALUES = {
    "", "-", "...", "anonymous", "basic", "bearer", "digest", "dummy", "empty", "false", "n/a", "no-key", "none",
    "not-needed", "null", "oauth", "oauth2", "true", "unused", "…", "???",
}  # fmt: skip
_PLACEHOLDER = re.compile(
    r"[*]{3}|\$(?:\{|\(|[A-Z_][A-Z0-9_]*\b)|<[^<>]{1,60}>|\{\{|\{[\w.]{0,40}\}|%[({]|%s(?!\w)|\\|\(|\.\*|\[[A-Z_]{0,30}\]$|\[\^|os\.|env\[|getenv|process\.env"
)
"""Prefixes of placeholders: `$NAME`, `<token>`, `{name}`, `\\w+`."""
_WHOLE_PLACEHOLDER = re.compile(
    r"[*]{3,20}|\$[A-Z_][A-Z0-9_]*+|\$\{[^{}]{1,200}\}|\$\([^()]{1,200}\)|<[^<>]{1,60}>|\{\{[^{}]{0,200}\}\}|\{[\w.]{0,40}\}"
    r"|%\(\w{1,40}\)s|%s|\[[A-Z_]{0,30}\]|(?:os\.|process\.)?(?:environ|getenv|env)(?:[.\[(][\w.\[\]()\"']{0,100})?"
)
VARIABLE = re.compile(
    r"(?<![A-Z0-9])[A-Z][A-Z0-9]*+(?:_[A-Z0-9]++)++|(?:API)?(?:KEY|TOKEN)|PASSWORD|SECRET|AUTHORIZATION"
)
"""Names of environment variables in capitals."""
_ANY_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}|[a-z_][a-z0-9_]{0,99}|[A-Za-z_]{1,100}")


def words(key: str) -> list[str]:
    """Return the words of a key's last part, in lower case."""
    last = re.split(r"[./@ ]", key[-_LONGEST:])[-1]
    return [word.lower() for word in _WORDS.findall(last)]


def is_secret(key: str) -> bool:
    """Return True if a key is a secret by its name. Only its last part counts: `auth.timeout` is none.

    A path such as `reward.model.api_key`, an option such as `--api-key` and a variable such as `OPENAI_KEY` are keys.
    """
    return _is_secret(key[-_LONGEST:])


@functools.lru_cache(maxsize=4096)
def _is_secret(key: str) -> bool:
    name_words = words(key)
    if not name_words or name_words[-1] in _METADATA_WORDS:
        return False
    pairs = list(zip(["", *name_words], name_words, [*name_words[1:], ""], strict=False))[: len(name_words)]
    return any(_secret_word(before, word, after) for before, word, after in pairs)


def _secret_word(before: str, word: str, after: str) -> bool:
    last = after in _AFTER | {""}
    if word in ("key", "keys"):
        return before in _BEFORE_KEY or (word == "key" and last and before != "" and before not in _NO_KEY)
    if word == "token":
        return last and before not in _NO_TOKEN
    if word == "tokens":
        return last and before in _BEFORE_TOKENS
    if word == "pass":
        return last and before in _BEFORE_PASS
    if word in ("string", "str"):
        return before in ("connection", "conn")
    return word in _SECRET or word.endswith(_SUFFIXES)


def takes_password(key: str) -> bool:
    """Return True if even a number is a secret under this key."""
    name_words = words(key)
    password = any(word in _PASSWORDS or word.endswith(("password", "apikey")) for word in name_words)
    return password or name_words[-2:] == ["api", "key"]


def names_variable(key: str) -> bool:
    """Return True if a key's value is the name of the variable that holds a secret: `api_key_env`, `key_variable`."""
    name_words = words(key)
    if len(name_words) < 2 or name_words[-1] not in ("env", "envvar", "var", "variable"):
        return False
    name_words = name_words[:-1] if name_words[-1] != "var" or name_words[-2] != "env" else name_words[:-2]
    return bool(name_words) and (name_words[-1] == "key" or is_secret("_".join(name_words)))


def could_be_variable(value: str) -> bool:
    """Return True if a text could be the name of a variable and is unlikely to be its value."""
    digits = sum(map(str.isdigit, value))
    return bool(_ANY_VARIABLE.fullmatch(value)) and ("_" in value or not (digits and len(value) >= 16))


def is_harmless(value: Any, key: str = "") -> bool:
    """Return True if a value is no secret even under a secret key: a placeholder, a reference, a count."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return not takes_password(key) and abs(value) < 1_000_000
    text = value.strip().rstrip(".")
    if text.isdigit() and not takes_password(key) and len(text) < 7:
        return True
    return (len(text) <= 16 and text.lower() in _NULL_VALUES) or reference(text) is not None or is_placeholder(text)


def is_placeholder(value: str) -> bool:
    """Return True if a whole value is a placeholder."""
    return not value or bool(_WHOLE_PLACEHOLDER.fullmatch(value))


def begins_placeholder(text: str) -> bool:
    """Return True if a text begins with a placeholder, in prose or code whose end is unknown."""
    return not text or bool(_PLACEHOLDER.match(text))
