"""vLLM's tool parsers as a filter, run by the Python of an environment with vLLM; nothing of Espalier is imported.

Input: a JSON object of parser names with their texts. Output: vLLM's version, and for each parser and text its content
and calls, or null for calls if it reads none.
"""

import contextlib
import json
import logging
import sys
from types import SimpleNamespace

logging.disable(logging.CRITICAL)
SPECIAL = ("<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>")


class Tokenizer:
    """The part of a tokenizer that the parsers ask."""

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(SPECIAL)}


def read(name: str, texts: list[str]) -> list[dict]:
    from vllm.tool_parsers import ToolParserManager

    parser = ToolParserManager.get_tool_parser(name)(Tokenizer())
    request = SimpleNamespace(tools=[], tool_choice="auto")
    results = []
    for text in texts:
        answer = parser.extract_tool_calls(text, request)
        calls = [[call.function.name, call.function.arguments] for call in answer.tool_calls]
        results.append({"content": answer.content or "", "calls": calls if answer.tools_called else None})
    return results


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: read(name, texts) for name, texts in asked.items()}
        import vllm
    json.dump({"version": vllm.__version__, "read": found}, sys.stdout)
