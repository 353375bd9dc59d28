"""Secrets in text, recognised by their form: tokens of known format, credentials in URLs and headers, `password=…`.

Randomness is not a criterion: digests, commits and ids are no secrets. Values of secret environment variables are
recognised as well.

The time is linear in the length of the text: a fixed number of patterns without backtracking inspect each character,
and a scan continues after the part it has consumed. `tests/redaction` verifies this.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from components.redaction.names import VARIABLE, begins_placeholder, is_harmless, is_placeholder, is_secret
from components.redaction.references import KNOWN

MASK = "***"
ASSIGNED = "a value of"
"""Start of the kind of a secret that is recognised by the name in front of it."""

_TOKENS = {
    "an API key": r"sk-[\w-]{16,}+",
    "a Stripe key": r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,}+",
    "a Hugging Face token": r"(?:hf|api_org)_[A-Za-z0-9]{16,}+",
    "a GitHub token": r"(?:gh[pousr]_[A-Za-z0-9]{16,}+|github_pat_\w{16,}+)",
    "a GitLab token": r"gl(?:pat|dt|rt|oas|cbt|ptt|ft|imt|agent|soat)-[\w-]{12,}+",
    "a Slack token": r"(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}+",
    "an AWS access key": r"(?:AKIA|ASIA)[A-Z0-9]{12,}+",
    "a Google API key": r"(?:AIza[\w-]{30,}+|ya29\.[\w-]{16,}+|GOCSPX-[\w-]{16,}+)",
    "a JSON Web Token": r"(?<![\w-])eyJ[\w-]{6,}+\.[\w-]{6,}+\.[\w-]*+",
    "a token": r"(?:npm_[A-Za-z0-9]{30,}+|pypi-[\w-]{24,}+|dop_v1_[0-9a-f]{32,}+|SG\.[\w-]{16,}+\.[\w-]{16,}+"
    r"|r8_[A-Za-z0-9]{20,}+|gsk_[A-Za-z0-9]{20,}+|nvapi-[\w-]{20,}+|dapi[0-9a-f]{32}|xai-[A-Za-z0-9]{20,}+"
    r"|pplx-[A-Za-z0-9]{20,}+|tgp_v1_[\w-]{20,}+|fw_[A-Za-z0-9]{20,}+|hvs\.[\w-]{20,}+|dckr_pat_[\w-]{16,}+"
    r"|(?:lsv2_(?:pt|sk)_|tvly-|rpa_|wandb_v1_|csk-|pcsk_|e2b_|jina_|whsec_|ATATT3|shp(?:at|ca|pa|ss)_|lin_api_|ntn_"
    r"|glsa_|sbp_|NRAK-)[\w-]{16,}+"
    r"|pn[ub]_[A-Za-z0-9]{20,}+|secret_[A-Za-z0-9]{30,}+|AGE-SECRET-KEY-1[A-Z0-9]{20,}+)",
}  # fmt: skip
_TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(f'({pattern})' for pattern in _TOKENS.values())})")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_HEADER = re.compile(r"(?<![A-Za-z0-9])(Bearer|Basic|Token)[ \t]{1,4}([\w.~+/=-]{6,}+)", re.IGNORECASE)
_WEBHOOK = re.compile(r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/[\w/-]{16,}+")
_CURL = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =]{1,4}[^\s:'\"]{1,100}+:(?=[^\s'\"$])([^\s'\"]++)")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}$")
_URL_REST = re.compile(r"[^\s\"'<>`|\\]*+")
_BARE = re.compile(r"(?<![\w.@:/+-])([\w.+-]{1,64}+):(?!//)([^\s\"'<>@:,;(){}\[\]]{3,200}+)@(?=[\w-]{1,63}[.:/])")
_NOT_USERS = {
    "acct", "address", "bcc", "cc", "contact", "e-mail", "email", "from", "git", "mail", "mailto", "reply-to", "sip",
    "ssh", "to", "user", "xmpp",
}  # fmt: skip
_DATABASES = ("amqp", "clickhouse", "mariadb", "mongodb", "mssql", "mysql", "oracle", "postgres", "redis", "snowflake")
_NAME = re.compile(r"[A-Za-z_][\w-]*+")
_HINT = re.compile(r"key|tok|pass|secret|auth|cred|cookie|pwd|dsn|pat|jwt|bearer|conn|sig|code|sas|session|id", re.I)
"""Pattern that matches part of every secret name, as a fast pre-check."""
_SEPARATOR = re.compile(r"(?P<quote>\\?[\"']?)(?:\[\])?(?P<sep>[ \t]{0,4}[=:][ \t]{0,4}|[ \t]{1,4})")
_BARE_VALUE = re.compile(r"[^\s\"'`,;&|}\])]++")
_QUERY = {"auth", "code", "key", "sig", "signature", "x-amz-signature", "x-amz-credential", "x-goog-signature"}
_QUERY |= {"x-goog-credential", "awsaccesskeyid", "googleaccessid", "sas", "session"}
_BREAK = re.compile(r"\\[nrt]")
"""Line break or tab as JSON in a text has it."""
_SHORTEST = 6
"""Length of the shortest text that can hold a secret: `sig=ab` includes its name."""
_SHORTEST_VALUE = 8
"""Minimum length of a variable's value that is searched for in text."""


@dataclass(frozen=True)
class Span:
    """Part of a text that is a secret."""

    start: int
    end: int
    kind: str
    """Type of secret, for errors: `a GitHub token`."""


def mask_text(text: str) -> str:
    """Return the text with every secret masked; a text without secrets is returned unchanged."""
    parts, last = [], 0
    for span in spans(text):
        parts += [text[last : span.start], MASK]
        last = span.end
    return "".join([*parts, text[last:]]) if parts else text


def spans(text: str) -> list[Span]:
    """Return the secrets in a text, in order and without overlaps."""
    if len(text) < _SHORTEST:
        return []
    words = _BREAK.sub("  ", text)  # so that a word begins after a break; positions stay
    ordered = sorted((*_all(words), *_of_environment(text)), key=lambda span: (span.start, -span.end))
    merged: list[Span] = []
    for span in ordered:
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end), last.kind)
        else:
            merged.append(span)
    return merged


def _all(text: str) -> Iterator[Span]:
    kinds = list(_TOKENS)
    for match in _TOKEN.finditer(text):
        if _is_mixed(match[0]):
            yield Span(match.start(), match.end(), kinds[(match.lastindex or 1) - 1])
    yield from _private_keys(text)
    for match in _HEADER.finditer(text):
        if _is_credential(match[1], match[2]):
            yield Span(match.start(2), match.end(2), f"a {match[1].capitalize()} credential")
    for match in _WEBHOOK.finditer(text):
        yield Span(match.start(), match.end(), "the address of a webhook")
    for match in _CURL.finditer(text):
        yield Span(match.start(1), match.end(1), "a password")
    if "://" in text:
        yield from _userinfo(text)
    if "@" in text:
        yield from _bare_userinfo(text)
    if "=" in text or ":" in text or "--" in text:
        yield from _assignments(text)


def _is_mixed(token: str) -> bool:
    """Return True if a token has digits or both cases after its prefix, unlike `sk-learn-pipeline-steps`."""
    suffix = token[3:]
    both_cases = suffix != suffix.lower() and suffix != suffix.upper()
    return any(map(str.isdigit, suffix)) or both_cases or token.startswith("AK")


def _private_keys(text: str) -> Iterator[Span]:
    position = 0
    while begin := _PEM.search(text, position):
        end = _PEM_END.search(text, begin.end())
        position = end.end() if end else len(text)
        yield Span(begin.start(), position, "a private key")


def _is_credential(scheme: str, value: str) -> bool:
    if scheme.lower() == "basic":
        try:
            return b":" in base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
        except (binascii.Error, ValueError):
            return False
    mixed = any(map(str.isdigit, value)) or (value[1:] != value[1:].lower() and value != value.upper())
    return len(value) >= 8 and mixed and (scheme.lower() == "bearer" or len(value) >= 20)


def _userinfo(text: str) -> Iterator[Span]:
    """Yield credentials in URLs: `https://TOKEN@host`, `postgresql://user:pass/with/slash@host/db`."""
    position = text.find("://")
    while position >= 0:
        start, following = position + 3, text.find("://", position + 3)
        remainder = text[start : following if following >= 0 else len(text)]
        if (url_part := _URL_REST.match(remainder)) is not None:
            remainder = url_part[0]
        head = _SCHEME.search(text[max(0, position - 31) : position])
        if head and (bounds := _secret_bounds(head[0].lower(), remainder)):
            begin, end = bounds
            yield Span(start + begin, start + end, "a credential in a URL")
        position = following


def _secret_bounds(scheme: str, remainder: str) -> tuple[int, int] | None:
    """Return start and end of the secret in the part of a URL after `://`, or None."""
    cut = re.search(r"[/?#]", remainder)
    authority = remainder[: cut.start()] if cut else remainder
    at = authority.rfind("@")
    if at < 0 and cut and "@" in remainder:  # a password may contain a slash
        user, colon, port = authority.partition(":")
        database = any(name in scheme for name in _DATABASES)
        if colon and not authority.startswith("[") and (database or not port.isdigit()):
            at = remainder.rfind("@")
            return (len(user) + 1, at) if not is_placeholder(remainder[len(user) + 1 : at]) else None
        return None
    if at < 0:
        return None
    user, colon, password = authority[:at].partition(":")
    if colon and password:
        return None if is_placeholder(password) else (len(user) + 1, at)
    web = scheme.endswith(("http", "https", "ws", "wss"))
    if not web or is_placeholder(user) or user.lower() in ("git", "anonymous", ""):
        return None
    return 0, at


def _bare_userinfo(text: str) -> Iterator[Span]:
    """Yield passwords in `user:pass/with/slash@host`, without a scheme."""
    for match in _BARE.finditer(text):
        password = match[2]
        if (
            match[1].lower() not in _NOT_USERS
            and not is_placeholder(password)
            and not re.fullmatch(r"[A-Za-z._+-]*|\d{1,5}(?:/.*)?", password)
        ):
            yield Span(match.start(2), match.end(2), "a password")


def _assignments(text: str) -> Iterator[Span]:
    """Yield values in `password=…`, `?token=…`, `AccountKey=…`, `--api-key …`, `{"secret": "…"}`, `X-Api-Key: …`."""
    position = depth = counted = 0
    while name := _NAME.search(text, position):
        position = name.end()
        if not _HINT.search(name[0]):
            continue
        query = text[name.start() - 1 : name.start()] in ("?", "&", "#") and name[0].lower() in _QUERY
        if not query and not is_secret(name[0]):
            continue
        depth += text.count("{", counted, name.start()) - text.count("}", counted, name.start())
        counted = name.start()
        separator = _SEPARATOR.match(text, name.end())
        if separator is None or not _assigns(text, name, separator, depth > 0):
            continue
        begin, end = _value(text, separator.end())
        value = text[begin : min(end, begin + 200)]
        code = _is_code(value, name[0], text, end, separator["sep"])
        if end > begin and not is_harmless(value, name[0]) and not code:
            position = end
            yield Span(begin, end, f"{ASSIGNED} {name[0][:60]}")


def _assigns(text: str, name: re.Match[str], separator: re.Match[str], in_braces: bool) -> bool:
    """Return True if the text after a name is its value."""
    before = text[max(0, name.start() - 2) : name.start()]
    sep = separator["sep"]
    if "=" in sep:
        ini = not text[text.rfind("\n", max(0, name.start() - 200), name.start()) + 1 : name.start()].strip()
        return not separator["quote"] and (sep == "=" or ini) and text[separator.end() : separator.end() + 1] != "="
    if ":" in sep:
        quoted = bool(separator["quote"]) and before.endswith(separator["quote"][-1])
        header = "-" in name[0] and not before.endswith("-") and _has_digit(text, separator.end())
        return (not separator["quote"] and (in_braces or header)) or quoted
    return not separator["quote"] and before == "--"


def _has_digit(text: str, place: int) -> bool:
    value = _BARE_VALUE.match(text, place)
    return value is not None and len(value[0]) >= 8 and any(map(str.isdigit, value[0]))


def _value(text: str, place: int) -> tuple[int, int]:
    """Return start and end of a value; an unterminated quote ends with the text."""
    quote = text[place : place + 1]
    if quote and quote in "\"'":
        if begins_placeholder(text[place + 1 : place + 60].lstrip(quote)):
            return place, place
        end = text.find(quote, place + 1)
        return place + 1, len(text) if end < 0 else end
    if text[place : place + 2] in ('\\"', "\\'"):
        end = text.find(text[place : place + 2], place + 2)
        return place + 2, len(text) if end < 0 else end
    match = _BARE_VALUE.match(text, place)
    return (place, match.end()) if match else (place, place)


def _is_code(value: str, name: str, text: str, end: int, separator: str) -> bool:
    """Return True if a value is an expression, the name of a variable, or a word of prose."""
    if "(" in value or "[" in value[:40] or value == name or value.startswith("self."):
        return True
    if separator != "=" and VARIABLE.fullmatch(value):
        return True
    return " " in separator and "=" in separator and text[end : end + 1] not in ("", "\n", '"', "'")


def _of_environment(text: str) -> Iterator[Span]:
    """Yield occurrences of values of secret environment variables."""
    if len(text) < _SHORTEST_VALUE:
        return
    names = tuple(os.environ)
    secrets = KNOWN | _secret_names(names)  # KNOWN grows
    for name in (name for name in names if name in secrets):
        value = os.environ.get(name, "")
        if len(value) < _SHORTEST_VALUE or value not in text:
            continue
        if name not in KNOWN and not _is_distinct(value):
            continue
        start = text.find(value)
        while start >= 0:
            end = start + len(value)
            if not (text[start - 1 : start] + text[end : end + 1]).isalnum():
                yield Span(start, end, f"the value of the environment variable {name}")
            start = text.find(value, end)


@functools.lru_cache(maxsize=16)
def _secret_names(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of environment variables that look like those of secrets."""
    return frozenset(name for name in names if is_secret(name))


def _is_distinct(value: str) -> bool:
    """Return True if a variable's value can be distinguished from an ordinary word or a path."""
    mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return (mixed or len(value) >= 16) and not (value.startswith(("/", "~", "http://127.")) and os.path.exists(value))
