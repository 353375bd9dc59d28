"""OpenAI Agents SDK, with chat completions or responses."""

import asyncio

import agents
from openai import AsyncOpenAI
from task import KEY, MODEL, RESPONSES, STREAM, SYSTEM, URL, add, finish, multiply, question


async def main() -> None:
    kind = agents.OpenAIResponsesModel if RESPONSES else agents.OpenAIChatCompletionsModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    tools = [agents.function_tool(multiply), agents.function_tool(add)]
    agent = agents.Agent(name="calculator", instructions=SYSTEM, tools=tools, model=model)
    config = agents.RunConfig(tracing_disabled=True)
    if STREAM:
        run = agents.Runner.run_streamed(agent, question(), run_config=config)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(agent, question(), run_config=config)
    finish(run.final_output)


asyncio.run(main())
