"""Reading of replies from servers that are not trusted, in bounded memory and time: the reader of every client.

A reply is read as it was sent: compressed replies are refused, because a few bytes of gzip or zstd become gigabytes.
Bytes are counted as they arrive, the deadline covers the whole reply and not one read, and JSON is limited in values
and levels before any object is created: `[[],[],…]` takes 30 times its size as Python objects. `typed` then checks the
form, so that no later line meets a list in place of an object, a NaN, or `"no"` in place of false.

Everything that breaks a limit raises InvalidReply, with a text that continues "the server …".
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pydantic

from components import strict_json

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

IDENTITY = {"Accept-Encoding": "identity"}
"""Headers of every request."""
CONNECT = 10.0
"""Time limit of establishing a connection, in seconds."""
_EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LINE_END = re.compile(rb"[\r\n]+")


class InvalidReply(ValueError):
    """Reply that breaks a limit, or has another form than expected."""


class LateReply(InvalidReply):
    """Reply that was not complete by its deadline."""


@dataclass(frozen=True)
class ReplyLimits:
    """Limits of one reply. With these values it takes at most some 50 MB of memory."""

    size: int = 4 << 20
    """Maximum number of bytes."""
    values: int = strict_json.MAX_VALUES
    """Maximum number of JSON values."""


LIMITS = ReplyLimits()
TOKEN_BYTES, TOKEN_VALUES = 512, 16
"""Size of a sampled token in a reply: its id, its log-probability and text, with the bytes of the text."""
ID_BYTES = 10
"""Size of a token id of the prompt in a reply, with its comma and space."""


def limits_with_tokens(sampled: int, alternatives: int = 0, *, prompt: int) -> ReplyLimits:
    """Return the limits of a reply with token ids and log-probabilities. sampled: maximum number of tokens that were
    requested. alternatives: other tokens at each of them. prompt: upper bound of the number of tokens of the prompt."""
    parts = sampled * (1 + alternatives)
    return ReplyLimits(
        LIMITS.size + parts * TOKEN_BYTES + prompt * ID_BYTES, LIMITS.values + parts * TOKEN_VALUES + prompt
    )


class RawReply(NamedTuple):
    status: int
    content: bytes


async def bounded(
    headers: Mapping[str, str], chunks: AsyncIterator[bytes], limits: ReplyLimits
) -> AsyncIterator[bytes]:
    """Yield the chunks of a body as they arrive. Raises InvalidReply."""
    check_encoding(headers)
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limits.size:
            raise InvalidReply(f"returned more than {limits.size} bytes")
        yield chunk


async def read_body(headers: Mapping[str, str], chunks: AsyncIterator[bytes], limits: ReplyLimits = LIMITS) -> bytes:
    """Return a body. Raises InvalidReply."""
    return b"".join([chunk async for chunk in bounded(headers, chunks, limits)])


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raise InvalidReply for a compressed body."""
    encoding = headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        raise InvalidReply(f"compressed its reply ({encoding[:40]!r}), although the request accepts no encoding")


async def request(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    limits: ReplyLimits = LIMITS,
) -> RawReply:
    """Return the reply to one request, whatever its status. seconds: limit from the connection to the last byte.
    Raises LateReply, InvalidReply, and httpx.HTTPError."""
    import httpx

    sent = {**(headers or {}), **IDENTITY}
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(
                method, url, content=content, headers=sent, timeout=httpx.Timeout(None, connect=min(seconds, CONNECT))
            ) as response,
        ):
            return RawReply(response.status_code, await read_body(response.headers, response.aiter_raw(), limits))
    except TimeoutError:
        raise LateReply(f"timed out after {seconds:g} s") from None


def parse(content: bytes | str, limits: ReplyLimits = LIMITS, *, surrogates: bool = False) -> Any:
    """Return the value of a JSON text. Raises InvalidReply. surrogates: accept lone surrogates, for callers that
    replace them."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if len(data) > limits.size:
        raise InvalidReply(f"returned more than {limits.size} bytes")
    try:
        return strict_json.parse(data, limits.values, surrogates=surrogates)
    except ValueError as error:
        raise InvalidReply(f"returned invalid JSON: {error}") from None


def typed(kind: type[T], value: Any) -> T:
    """Return a value as `kind`, a type that pydantic validates, without conversions. Raises InvalidReply."""
    try:
        validated: T = _adapter(kind).validate_python(value, strict=True)  # type: ignore[arg-type]
        return validated
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise InvalidReply(
            f"returned {first['input']!r:.200}{f' as {place}' if place else ''}; {first['msg'].lower()}"
        ) from None


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def bound_response(package: Any, response: Any, limits: ReplyLimits = LIMITS) -> None:
    """Bound the body of a response that a library will read. Raises InvalidReply for a compressed one.

    package: httpx or httpx2."""
    check_encoding(response.headers)
    response.stream = _bounded_stream(package)(response.stream, response.headers, limits)


@functools.cache
def _bounded_stream(package: Any) -> Any:
    class BoundedStream(package.AsyncByteStream):
        """Body whose parts are passed on when they are complete and within the limits."""

        def __init__(self, stream: Any, headers: Mapping[str, str], limits: ReplyLimits):
            self._stream, self._headers, self._limits = stream, headers, limits

        def __aiter__(self) -> AsyncIterator[bytes]:
            return complete_parts(self._headers, self._stream, self._limits)

        async def aclose(self) -> None:
            await self._stream.aclose()

    return BoundedStream


async def complete_parts(
    headers: Mapping[str, str], chunks: AsyncIterator[bytes], limits: ReplyLimits = LIMITS
) -> AsyncIterator[bytes]:
    """Yield a JSON body once it is complete, or server-sent events as each is complete. Raises InvalidReply.

    A stream of events may be endless: its limits hold for each event."""
    events = headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"
    pending = bytearray()
    async for chunk in chunks:
        pending += chunk
        if len(pending) > limits.size:
            raise InvalidReply(f"returned {'an event' if events else 'a reply'} of more than {limits.size} bytes")
        if not events:
            continue
        start = max(0, len(pending) - len(chunk) - 3)  # what is before was searched already
        while (end := _EVENT_END.search(pending, start)) is not None:
            yield _checked(bytes(pending[: end.end()]), limits, events)
            del pending[: end.end()]
            start = 0
    if pending:
        yield _checked(bytes(pending), limits, events)


def _checked(data: bytes, limits: ReplyLimits, events: bool) -> bytes:
    text = data
    if events:
        text = b"\n".join(line[5:] for line in _LINE_END.split(data) if line.startswith(b"data:"))
    try:
        strict_json.check_structure(text, limits.values)
    except ValueError as error:
        raise InvalidReply(f"returned invalid JSON: {error}") from None
    return data
