"""LangGraph: an agent of langchain 1, which is a graph of langgraph, with langchain-openai."""

import asyncio

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import KEY, MODEL, RESPONSES, STREAM, SYSTEM, URL, add, finish, multiply, question


async def main() -> None:
    model = ChatOpenAI(
        model=MODEL, base_url=URL, api_key=KEY, max_retries=0, streaming=STREAM, use_responses_api=RESPONSES
    )
    agent = create_agent(model, [multiply, add], system_prompt=SYSTEM)
    states = [state async for state in agent.astream({"messages": [("user", question())]}, stream_mode="values")]
    finish(states[-1]["messages"][-1].text)


asyncio.run(main())
