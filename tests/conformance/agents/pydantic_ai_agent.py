"""Pydantic AI, with chat completions or responses."""

import asyncio
from collections.abc import AsyncIterable

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import KEY, MODEL, RESPONSES, STREAM, SYSTEM, URL, add, finish, multiply, question


async def read(context: object, events: AsyncIterable) -> None:
    """Read the events of a streamed answer. (`run_stream` would take the words beside a call for the final output.)"""
    async for _ in events:
        pass


async def main() -> None:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    model = (OpenAIResponsesModel if RESPONSES else OpenAIChatModel)(MODEL, provider=provider)
    agent = Agent(model, system_prompt=SYSTEM)
    agent.tool_plain(multiply)
    agent.tool_plain(add)
    run = await agent.run(question(), event_stream_handler=read if STREAM else None)
    finish(run.output)


asyncio.run(main())
