"""Import of LiteLLM without network access or console output.

By default LiteLLM fetches a price table when it is imported, prints advertisements at each error, and installs its own
log handlers. It also keeps connections for later calls, which outlive the event loop they were created on. Therefore
all its calls share one event loop, which ends with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import threading
from typing import Any

from components.bounded_reply import IDENTITY, LateReply, bound_response

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
    package.aclient_session = _bounded_session()
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised as exceptions
    return package


async def completion(**sent: Any) -> Any:
    """Return the result of `acompletion`, run on the shared event loop. Raises LateReply after `timeout` seconds, which
    LiteLLM applies to each read."""

    async def ask() -> Any:
        try:
            async with asyncio.timeout(sent["timeout"]):
                return await litellm().acompletion(**sent)
        except TimeoutError:
            raise LateReply(f"timed out after {sent['timeout']:g} s") from None

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), _loop()))


def _bounded_session() -> Any:
    """Return the HTTP session of the providers with OpenAI's API, whose addresses users set: it bounds replies."""
    import httpx

    async def bound(response: Any) -> None:
        bound_response(httpx, response)

    return httpx.AsyncClient(
        headers=IDENTITY,
        event_hooks={"response": [bound]},
        timeout=None,
        limits=httpx.Limits(max_connections=None),  # callers limit their own concurrency
        follow_redirects=True,
    )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="LiteLLM", daemon=True).start()

    def end() -> None:
        with contextlib.suppress(Exception):  # an unresponsive server must not delay the exit
            asyncio.run_coroutine_threadsafe(litellm().close_litellm_async_clients(), loop).result(LAST)
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
