"""Secrets are masked before a configuration is logged, stored or shown.

A key says by its name that its value is a secret (`api_key`, `hf_token`, `db.password`); a URL says it by a password
between `//` and `@`. Both are replaced, everything else is left as it is. Names are compared word by word, so that
`max_tokens`, `tokenizer` and `eos_token` stay readable.

This is the second line of defence. The first one: secrets come from environment variables, never from a config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd",
    "password", "pwd", "secret", "secrets",
}  # fmt: skip
_BEFORE_KEY = {"access", "account", "api", "auth", "encryption", "private", "secret", "signing", "ssh"}
_BEFORE_TOKEN = {"additional", "bos", "cls", "end", "eos", "image", "mask", "pad", "sep", "special", "start", "unk"}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_URL_PASSWORD = re.compile(r"(?P<head>\b[a-z][a-z0-9+.-]{0,30}://[^\s/:@]*):[^\s/@]+@", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value is a secret. Only its last part counts: `auth.timeout` is none."""
    words = [word.lower() for word in _WORDS.findall(key.rsplit(".", 1)[-1])]
    pairs = list(zip(["", *words], words, strict=False))
    return (
        any(word in _SECRET_WORDS for word in words)
        or any(word == "key" and before in _BEFORE_KEY for before, word in pairs)
        or any(word == "token" and before not in _BEFORE_TOKEN for before, word in pairs)
    )


def mask_text(text: str) -> str:
    """The text with passwords in URLs masked."""
    return _URL_PASSWORD.sub(rf"\g<head>:{MASK}@", text)


def mask(value: Any, key: str = "") -> Any:
    """A copy of plain data (mappings, sequences, scalars) without its secrets. Numbers, booleans and None under a
    secret-looking key are kept: `token: 3` is a count, and an absent password is worth seeing."""
    if isinstance(value, Mapping):
        return {name: mask(item, str(name)) for name, item in value.items()}
    if isinstance(value, str):
        return MASK if value and is_secret(key) else mask_text(value)
    if isinstance(value, Sequence):
        return [mask(item, key) for item in value]
    return value


def mask_override(override: str) -> str:
    """A command-line override such as `judge.api_key=abc` without its secret."""
    key, equals, value = override.partition("=")
    if not equals:
        return mask_text(override)
    return f"{key}={MASK}" if value and is_secret(key.lstrip("+~")) else f"{key}={mask_text(value)}"
