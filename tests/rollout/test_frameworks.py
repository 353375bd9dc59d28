"""Agents written with the frameworks that people write them with: each plays an episode with a tool, and what it said
is one exact history. Those that are not installed are skipped."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from components.environments.tools import ToolEnvironment, tool
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.rollout.players.player import Player
from components.trajectories.schema import Scenario
from tests.rollout.worlds import collect, discard_litellm_clients, endpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
    pytest.mark.timeout(1800),
]
SYSTEM = "You keep a stock. Look up what you are asked for, then say the numbers."


class Stock(ToolEnvironment):
    """How many of two parts are there?"""

    system = SYSTEM

    def scenarios(self, split):
        return [Scenario(f"{split}-{n}", {"bolts": n + 2, "nuts": 7 * n}, split) for n in range(2)]

    def begin(self, scenario):
        self.looked = 0
        return "How many bolts and nuts?"

    @tool
    def count(self, part: str) -> str:
        """how many of a part are in stock"""
        self.looked += 1
        return str(self.scenario.input.get(part, 0))

    def outcome(self, answer):
        wanted = f"{self.scenario.input['bolts']} and {self.scenario.input['nuts']}"
        return {"success": answer == wanted and self.looked == 2}

    def look(self, part: str) -> str:
        """The tool, for agents that call functions."""
        function = {"name": "count", "arguments": json.dumps({"part": part})}
        action = {"role": "assistant", "content": "", "tool_calls": [{"id": "", "function": function}]}
        return self.step(action).observation[0]["content"]

    def answered(self, text: str) -> dict:
        return self.step({"role": "assistant", "content": text}).info


class Clerk:
    """Calls the tool for both parts at once, then says what it heard. A token is a character, and the prompt is what
    the conversation says to the letter: an agent that hands an answer back otherwise than it was given begins a new
    history."""

    policy = BASE_POLICY

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.requests.append(request)
        heard = [message["content"] for message in request.messages if message["role"] == "tool"]
        message: dict = {"role": "assistant", "content": " and ".join(heard)}
        if not heard:
            assert [tool["function"]["name"] for tool in request.tools] == ["count"]
            message = {"role": "assistant", "content": "I look."}
            message["tool_calls"] = [
                {
                    "id": f"call_0_{n}",
                    "type": "function",
                    "function": {"name": "count", "arguments": f'{{"part": "{p}"}}'},
                }
                for n, p in enumerate(("bolts", "nuts"))
            ]
        prompt = [ord(letter) for message in request.messages for letter in _written(message)]
        ids = [ord(letter) for letter in _written(message)]
        reason = "tool_calls" if not heard else "stop"
        return ChatCompletion(message, reason, prompt, ids, [-0.25] * len(ids), self.policy)

    def load_policy(self, version: str, folder: str | None) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def _written(message: dict) -> str:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    return f"{message['role']}: {message['content']} {calls or ''}\n"


COUNT = {
    "name": "count",
    "description": "how many of a part are in stock",
    "parameters": {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
}


async def openai_chat(scenario, environment, client, model):
    talk: list = environment.reset(scenario)
    while True:
        answer = await client.chat.completions.create(
            model=model, messages=talk, tools=[{"type": "function", "function": COUNT}]
        )
        said = answer.choices[0].message
        talk.append(said)
        if not said.tool_calls:
            return environment.answered(said.content)
        for call in said.tool_calls:
            told = environment.look(**json.loads(call.function.arguments))
            talk.append({"role": "tool", "tool_call_id": call.id, "content": told})


async def openai_responses(scenario, environment, client, model):
    _, first = environment.reset(scenario)
    given: list = [first]
    while True:
        answer = await client.responses.create(
            model=model, instructions=SYSTEM, input=given, tools=[{"type": "function", **COUNT}]
        )
        given = [*given, *answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return environment.answered(answer.output_text)
        for call in calls:
            told = environment.look(**json.loads(call.arguments))
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": told})


async def litellm_chat(scenario, environment, base_url, api_key, model):
    litellm = pytest.importorskip("litellm")
    talk: list = environment.reset(scenario)
    while True:
        answer = await litellm.acompletion(
            model=f"openai/{model}",
            messages=talk,
            tools=[{"type": "function", "function": COUNT}],
            api_base=base_url,
            api_key=api_key,
        )
        said = answer.choices[0].message
        talk.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return environment.answered(said.content)
        for call in said.tool_calls:
            told = environment.look(**json.loads(call.function.arguments))
            talk.append({"role": "tool", "tool_call_id": call.id, "content": told})


async def langgraph_react(scenario, environment, base_url, api_key, model, **options):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def count(part: str) -> str:
        """how many of a part are in stock"""
        return environment.look(part)

    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, max_retries=0, **options)
    agent = create_react_agent(chat, [count])
    found = await agent.ainvoke({"messages": environment.reset(scenario)})
    return environment.answered(found["messages"][-1].text)


async def langgraph_responses(scenario, environment, base_url, api_key, model):
    return await langgraph_react(scenario, environment, base_url, api_key, model, use_responses_api=True)


async def langgraph_streaming(scenario, environment, base_url, api_key, model):
    return await langgraph_react(scenario, environment, base_url, api_key, model, streaming=True)


async def agents_sdk(scenario, environment, client, model, kind="OpenAIResponsesModel", streamed=False):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def count(part: str) -> str:
        """how many of a part are in stock"""
        return environment.look(part)

    system, first = environment.reset(scenario)
    spoken = getattr(agents, kind)(model=model, openai_client=client)
    clerk = agents.Agent(name="clerk", instructions=system["content"], tools=[count], model=spoken)
    config = agents.RunConfig(tracing_disabled=True)
    if streamed:
        run = agents.Runner.run_streamed(clerk, first["content"], run_config=config)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(clerk, first["content"], run_config=config)
    return environment.answered(run.final_output)


async def agents_sdk_chat(scenario, environment, client, model):
    return await agents_sdk(scenario, environment, client, model, "OpenAIChatCompletionsModel")


async def agents_sdk_streaming(scenario, environment, client, model):
    return await agents_sdk(scenario, environment, client, model, streamed=True)


AGENTS = {
    openai_chat: "openai",
    openai_responses: "openai",
    litellm_chat: "litellm",
    langgraph_react: "langgraph",
    langgraph_responses: "langgraph",
    langgraph_streaming: "langgraph",
    agents_sdk: "openai-agents",
    agents_sdk_chat: "openai-agents",
    agents_sdk_streaming: "openai-agents",
}


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_an_agent_of_a_framework_is_one_exact_history(agent):
    package = AGENTS[agent]
    pytest.importorskip({"openai-agents": "agents"}.get(package, package))
    engine = Clerk()
    with endpoint(engine, agent) as (own, _, _):
        found = collect(engine, Stock, Stock().scenarios("train"), player=Player(own), timeout=200.0, group_size=1)
    if package == "litellm":
        discard_litellm_clients()
    for trajectory in found:
        assert trajectory.failure is None, f"{package} {version(package)}: {trajectory.failure}"
        assert trajectory.success, f"{package} {version(package)}"
        (history,) = trajectory.histories
        assert [message.role for message in history.messages] == [
            *("system", "user", "assistant", "tool", "tool", "assistant")
        ]
        said = [
            "".join(map(chr, history.token_ids[slice(*message.span)])) for message in history.messages if message.span
        ]
        assert said[0].startswith("assistant: I look. [('count', {'part': 'bolts'}), ('count', {'part': 'nuts'})]")
        assert len(said) == 2
        assert trajectory.metrics["turns"] == 2
        assert [tool["function"]["name"] for tool in trajectory.tools] == ["count"]
