"""Anthropic's client: a loop over Messages, streamed or not. Its address is the root of the server."""

import inspect

import anthropic
from task import KEY, MODEL, STREAM, SYSTEM, TOOLS, URL, finish, question


def described(name: str) -> dict:
    function = TOOLS[name]
    properties = {argument: {"type": "integer"} for argument in inspect.signature(function).parameters}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": name, "description": function.__doc__.splitlines()[0], "input_schema": schema}


def main() -> None:
    client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
    talk: list = [{"role": "user", "content": question()}]
    tools = [described(name) for name in TOOLS]
    while True:
        options = {"model": MODEL, "system": SYSTEM, "messages": talk, "tools": tools, "max_tokens": 200}
        if STREAM:
            with client.messages.stream(**options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**options)
        talk.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            finish(answer.content[-1].text)
            return
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [(call.id, str(TOOLS[call.name](**call.input))) for call in calls]
        content = [{"type": "tool_result", "tool_use_id": name, "content": result} for name, result in results]
        talk.append({"role": "user", "content": content})


main()
