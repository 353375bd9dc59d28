"""Address of a remote store."""

from __future__ import annotations

import re

PROTOCOL_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file"}
"""Protocol aliases and their canonical names."""


def store_uri(text: str) -> str:
    """Return the URI in canonical form, without a trailing slash.

    Raises ValueError, whose message says what was expected, for anything but PROTOCOL://PLACE with a protocol that
    fsspec supports. Credentials (user and password, or a query) are rejected.
    """
    import fsspec

    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^\s/?#]*)(/[^\s?#]*)?", text)
    if match is None:
        raise ValueError("a URI such as s3://BUCKET/PREFIX, without a query")
    protocol, place, path = match.groups()
    protocol = PROTOCOL_ALIASES.get(protocol, protocol)
    if "@" in place:
        raise ValueError("a URI without user and password: credentials come from the environment")
    if protocol not in fsspec.available_protocols():
        raise ValueError(f"a URI such as s3://BUCKET/PREFIX; fsspec does not support the protocol {protocol}")
    if protocol == "file" and (place or not path):
        raise ValueError("an absolute path after file://, as in file:///srv/artifacts")
    if not place and not path:
        raise ValueError("a URI such as s3://BUCKET/PREFIX")
    return f"{protocol}://{place}{path or ''}".rstrip("/")
