"""The address of a remote store."""

from __future__ import annotations

import re

SAME = {"s3a": "s3", "gcs": "gs", "local": "file"}
"""Protocols with two names."""


def store_uri(text: str) -> str:
    """The URI in its one form, without a slash at the end.

    Raises ValueError, whose message says what was expected, for anything but PROTOCOL://PLACE with a protocol that
    fsspec knows. Credentials do not belong into it: neither a user and password, nor a query.
    """
    import fsspec

    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^\s/?#]*)(/[^\s?#]*)?", text)
    if found is None:
        raise ValueError("a URI such as s3://BUCKET/PREFIX, without a query")
    protocol, place, path = found.groups()
    protocol = SAME.get(protocol, protocol)
    if "@" in place:
        raise ValueError("a URI without user and password: credentials come from the environment")
    if protocol not in fsspec.available_protocols():
        raise ValueError(f"a URI such as s3://BUCKET/PREFIX; {protocol} is no protocol that fsspec knows")
    if protocol == "file" and (place or not path):
        raise ValueError("an absolute path after file://, as in file:///srv/artifacts")
    if not place and not path:
        raise ValueError("a URI such as s3://BUCKET/PREFIX")
    return f"{protocol}://{place}{path or ''}".rstrip("/")
