"""Import of LiteLLM without network access or console output.

By default LiteLLM fetches a price table when it is imported, prints advertisements at each error, and installs its own
log handlers. It also keeps connections for later calls, which outlive the event loop they were created on. Therefore
all calls share one event loop and one HTTP session, which end with the process. The package's own session is left
alone: agents of users may call LiteLLM in the same process, on event loops of their own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from components.bounded_reply import IDENTITY, LateReply, check_encoding, complete_parts

LOCAL = ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "LITELLM_LOCAL_BLOG_POSTS")
"""Variables that select the bundled tables instead of downloaded ones."""
LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
LAST = 5.0
"""Seconds that closing the connections may take at exit."""


@functools.cache
def litellm() -> Any:
    """Return the configured `litellm` package."""
    for name in LOCAL:
        os.environ.setdefault(name, "True")
    import litellm as package

    package.suppress_debug_info = True
    package.telemetry = False
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised as exceptions
    return package


async def completion(**sent: Any) -> Any:
    """Return the result of `acompletion`, run on the shared event loop. Raises LateReply after `timeout` seconds, which
    LiteLLM applies to each read."""

    async def ask() -> Any:
        try:
            async with asyncio.timeout(sent["timeout"]):
                return await litellm().acompletion(**sent, shared_session=_session())
        except TimeoutError:
            raise LateReply(f"timed out after {sent['timeout']:g} s") from None

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), _loop()))


@functools.cache
def _session() -> Any:
    """Return the HTTP session of all calls, which bounds replies. Called on the shared event loop."""
    import aiohttp

    async def bound(request: Any, handler: Any) -> Any:
        request.headers.update(IDENTITY)
        response = await handler(request)
        check_encoding(response.headers)
        response.content = _BoundedContent(response.content, response.headers)
        return response

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # callers limit their own concurrency
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        middlewares=(bound,),
    )


class _BoundedContent:
    """Body of a response, which LiteLLM reads in chunks."""

    def __init__(self, content: Any, headers: Any):
        self._content, self._headers = content, headers

    def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        return complete_parts(self._headers, self._content.iter_chunked(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="LiteLLM", daemon=True).start()

    async def close() -> None:
        await litellm().close_litellm_async_clients()
        await _session().close()

    def end() -> None:
        with contextlib.suppress(Exception):  # an unresponsive server must not delay the exit
            asyncio.run_coroutine_threadsafe(close(), loop).result(LAST)
        loop.call_soon_threadsafe(loop.stop)

    atexit.register(end)
    return loop


def listed(model: str) -> bool:
    """Return True if LiteLLM's table has a price. Models without a known price have 0 there."""
    prices = litellm().model_cost
    name, provider, *_ = litellm().get_llm_provider(model)
    name_row = prices.get(name, {})
    row = prices.get(model) or prices.get(f"{provider}/{name}") or name_row
    if row is name_row and name_row.get("litellm_provider") != provider:
        return False
    return all((row.get(f"{kind}_cost_per_token") or 0) > 0 for kind in ("input", "output"))
