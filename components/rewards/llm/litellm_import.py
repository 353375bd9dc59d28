"""LiteLLM, told to keep to itself before it is imported for the first time.

Left alone it fetches a table of prices from the network when it is imported, writes advertisements to the console at
each error, and logs there by handlers of its own. It also keeps connections for later calls, which outlive the loop
that they were made on: so all its calls have one loop, which ends with the process.
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

LOCAL = ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "LITELLM_LOCAL_BLOG_POSTS")
"""Tables that come with it, in place of those that it would fetch."""
LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
LAST = 5.0
"""Seconds that closing its connections may take when the process ends."""


@functools.cache
def litellm() -> Any:
    """The package."""
    for name in LOCAL:
        os.environ.setdefault(name, "True")
    import litellm as found

    found.suppress_debug_info = True
    found.telemetry = False
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails is raised
    return found


async def completion(**sent: Any) -> Any:
    """Its `acompletion`, on the loop that all calls share."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(litellm().acompletion(**sent), _loop()))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="LiteLLM", daemon=True).start()

    def end() -> None:
        with contextlib.suppress(Exception):  # a server that does not let go holds nobody up
            asyncio.run_coroutine_threadsafe(litellm().close_litellm_async_clients(), loop).result(LAST)
        loop.call_soon_threadsafe(loop.stop)

    atexit.register(end)
    return loop


def listed(model: str) -> bool:
    """Whether LiteLLM's table has a price. It has 0 where it knows of the model and not of its price."""
    known = litellm().model_cost
    name, provider, *_ = litellm().get_llm_provider(model)
    of_name = known.get(name, {})
    row = known.get(model) or known.get(f"{provider}/{name}") or of_name
    if row is of_name and of_name.get("litellm_provider") != provider:
        return False
    return all((row.get(f"{way}_cost_per_token") or 0) > 0 for way in ("input", "output"))
