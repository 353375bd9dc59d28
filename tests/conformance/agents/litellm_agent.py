"""LiteLLM: a loop over `completion`, streamed or not."""

import inspect
import json

import litellm
from task import KEY, MODEL, STREAM, SYSTEM, TOOLS, URL, finish, question


def described(name: str) -> dict:
    function = TOOLS[name]
    properties = {argument: {"type": "integer"} for argument in inspect.signature(function).parameters}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    description = function.__doc__.splitlines()[0]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def main() -> None:
    talk: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question()}]
    while True:
        options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "max_retries": 0}
        answer = litellm.completion(messages=talk, tools=[described(name) for name in TOOLS], stream=STREAM, **options)
        if STREAM:
            answer = litellm.stream_chunk_builder(list(answer), messages=talk)
        said = answer.choices[0].message
        talk.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            finish(said.content)
            return
        for call in said.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            talk.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


main()
