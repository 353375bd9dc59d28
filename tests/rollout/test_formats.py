"""Tests of formats: presentation of tools, parsing of responses, and round trips of demonstrations."""

from __future__ import annotations

import asyncio
import json

import pytest

from components.environments.tools import TextEnvironment, acts
from components.environments.worlds.shop import Shop
from components.errors import ResourceError, SpecError
from components.inference.conversations import Conversations
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.rollout import formats
from components.rollout.action_format import is_invalid_call
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.sandbox.bubblewrap import check
from components.trajectories.schema import Scenario
from tests.rollout.worlds import play
from tests.trajectories.families import FAMILIES, LOOK_UP, chat_format


class Door(TextEnvironment):
    """Opens when it is told to."""

    def scenarios(self, split):
        return [Scenario(f"{split}-0", {"split": split}, split)]

    def begin(self, scenario):
        self.open = False
        return "There is a door."

    def act(self, action):
        self.open = self.done = action == "open the door"
        return "It opens." if self.open else "Nothing happens."

    def outcome(self, answer):
        return {"success": self.open}

    def solve(self, scenario):
        return acts(["look", "open the door"])


def opened(name: formats.Name, environment) -> tuple[formats.Format, list, list]:
    made = formats.make(name)
    return made, *made.opening(environment.reset(environment.scenarios("train")[0]), environment.tools())


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_native_changes_nothing():
    shop = Shop(train=2, heldout=1)
    native, messages, tools = opened("native", shop)
    assert tools == shop.tools()
    assert [message["role"] for message in messages] == ["system", "user"]
    assert native.read(messages[1]) is messages[1]


def test_react_shows_every_tool_and_reads_calls_and_answers():
    react, messages, tools = opened("react", Shop(train=2, heldout=1))
    assert tools == []
    assert "- change_address(address: string, order: string): send it elsewhere" in messages[0]["content"]
    assert 'Action: tool {"argument": "value"}' in messages[0]["content"]
    action = react.read(said('Thought: hm\nAction: find_order {"order": "K1"}\nObservation: made up\nAction: refund'))
    function = action["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("find_order", {"order": "K1"})
    assert react.read(said("Thought: done\nAnswer: It is\non its way.")) == said("It is\non its way.")
    assert react.show([{"role": "tool", "tool_call_id": "call_1", "content": "lamp"}]) == [
        {"role": "user", "content": "Observation: lamp"}
    ]
    first, second = (react.read(said("Action: look"))["tool_calls"][0] for _ in range(2))
    assert first["id"] != second["id"]
    assert first["function"] == {"name": "look", "arguments": "{}"}


def test_what_cannot_be_read_is_told():
    react, *_ = opened("react", Shop(train=2, heldout=1))
    for text, message in {
        "I think so.": 'no action: end with a line "Action: ..." or "Answer: ..."',
        "": "no action",
        "Action:": "no tool",
        "Action: refund order K1": "expected arguments as JSON",
        'Action: refund {"order": ': "expected arguments as JSON",
    }.items():
        with pytest.raises(formats.UnparsedAction, match=message):
            react.read(said(text))


TAGGED = '<tool_call>{"name": look_up}</tool_call>'
HARMONY = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
ATTEMPTS = [
    ("qwen3", TAGGED, True),
    ("qwen3", "Mistral writes [TOOL_CALLS] before calls.", False),
    ("gpt_oss", f"{HARMONY} to=functions.look_up<|channel|>commentary json<|message|>{{bad}}", True),
    ("gpt_oss", f"{HARMONY}<|channel|>commentary to=functions.look_up", True),
    ("gpt_oss", f"{HARMONY}<|channel|>final<|message|>to=me", False),
    ("llama3", '{"name": "look_up", "parameters": {"word": "a"', True),
    ("llama3", '{"name": "look_up", "parameters": {"word": "a"}} done', True),
    ("llama3", '{"name": "Bob", "age": 3}', False),
    ("smollm2", "[look_up(word=K1)]", True),
    ("smollm2", 'Well.\n[look_up(word="K1"', True),
    ("smollm2", "I called [look_up] and [find(1)].\n[find(1)]", False),
]
"""Family, response without a call that can be read, and True if it is meant as a call."""


def test_an_invalid_call_is_no_answer():
    """Whatever the form of the model's calls is; if it is unknown, in any form. Without tools, nothing is a call."""
    chats = {name: chat_format(FAMILIES[name]) for name, *_ in ATTEMPTS}
    for name, text, invalid in ATTEMPTS:
        chat, conversations = chats[name], Conversations(chats[name], 10**6)
        for tools in ([LOOK_UP], []):
            request = ChatRequest([{"role": "user", "content": "Go."}], tools)
            tokens = [*chat.encode(text), chat.end_id]
            logprobs = [0.0] * len(tokens)
            completion = conversations.completion(
                request, conversations.prompt(request), tokens, logprobs, frozenset(chat.end_ids)
            )
            assert "tool_calls" not in completion.message
            assert is_invalid_call(completion, tools) == bool(invalid and tools), (text, completion.message)
    unknown = ChatCompletion(said(TAGGED), "stop", [], [], [], "base")
    assert [is_invalid_call(unknown, tools) for tools in ([LOOK_UP], [])] == [True, False]


@pytest.mark.parametrize("name", ["native", "react", "chat", "code"])
def test_every_format_tells_and_counts_what_it_cannot_read(name):
    texts = {"native": "[act(look", "react": "Hm.", "chat": " ", "code": "```python"}

    class Speaker:
        policy = "base"
        said: list = [texts[name], {"react": "Action: open the door"}.get(name, "open the door")]

        async def chat(self, request):
            asked.append(request.messages)
            return ChatCompletion({"role": "assistant", "content": self.said.pop(0)}, "stop", [], [], [], "base")

    asked: list = []
    if name == "code":
        try:
            check()
        except ResourceError as error:
            pytest.skip(str(error))
    (scenario,) = Door().scenarios("train")
    how: dict = {"sample": 0, "sampling": Sampling(), "max_turns": 2, "seed": 0, "presentation": Presentation(name)}
    found = asyncio.run(play(Speaker(), Door(), scenario, **how))
    assert found.failure is None
    assert found.success
    assert found.metrics["parse_errors"] == 1
    assert found.step_rewards == [0.0, 0.0]
    mark = "Observation: error: " if name in ("react", "code") else "error: "
    assert asked[1][-1]["content"].startswith(mark)


def test_arguments_that_are_no_object_are_left_to_the_environment():
    react, *_ = opened("react", Shop(train=2, heldout=1))
    assert react.read(said("Action: refund [1]"))["tool_calls"][0]["function"]["arguments"] == "[1]"


def test_where_the_only_tool_is_text_the_line_is_the_action():
    react, messages, _ = opened("react", Door())
    assert "Action: your action" in messages[0]["content"]
    action = react.read(said("Thought: a door\nAction:\nopen the door\nand more"))
    assert json.loads(action["tool_calls"][0]["function"]["arguments"]) == {"action": "open the door"}
    with pytest.raises(formats.UnparsedAction, match="empty"):
        react.read(said("Action:  "))
    chat, messages, tools = opened("chat", Door())
    assert (messages[0]["content"], tools) == ("There is a door.", [])
    assert chat.read(said("open the door")) == said("open the door")


def test_chat_is_refused_where_there_are_tools():
    with pytest.raises(SpecError, match=r"agent\.format.*find_order.*react"):
        opened("chat", Shop(train=2, heldout=1))


@pytest.mark.parametrize("name", ["native", "react", "chat"])
def test_a_demonstration_reads_as_what_it_shows(name):
    (shown,) = demonstrate(Door, Door().scenarios("train"), Presentation(name))
    assert shown.success
    (history,) = shown.histories
    answers = [message for message in history.messages if message.role == "assistant"]
    expected = {"native": "", "react": "Action: open the door", "chat": "open the door"}[name]
    assert answers[-1].content == expected
    assert len(shown.tools) == (name == "native")
    assert history.messages[-1].role == ("tool" if name == "native" else "user")
    seen = history.messages[-1].content
    assert seen == ("Observation: It opens." if name == "react" else "It opens.")


def test_the_solutions_of_the_shop_are_written_and_read_back():
    shop = Shop(train=6, heldout=1)
    scenarios = shop.scenarios("train")
    demonstrations = demonstrate(lambda: shop, scenarios, Presentation("react"))
    react, *_ = opened("react", shop)
    for scenario, shown in zip(scenarios, demonstrations, strict=True):
        assert shown.success
        written = [message.content for message in shown.histories[0].messages if message.role == "assistant"]
        for text, action in zip(written, shop.solve(scenario), strict=True):
            read = react.read(said(text))
            if calls := action.get("tool_calls"):
                ours, expected = read["tool_calls"][0]["function"], calls[0]["function"]
                assert ours["name"] == expected["name"]
                assert json.loads(ours["arguments"]) == json.loads(expected["arguments"])
            else:
                assert read["content"] == action["content"]
