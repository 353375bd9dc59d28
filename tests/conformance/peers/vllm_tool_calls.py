"""vLLM's tool parsers as a filter, run by the Python of an environment with vLLM; nothing of Espalier is imported.

Input: a JSON object with the offered tools, the special tokens of a tokenizer, and texts by the names of parsers.
Output: vLLM's version, and for each parser and text its content and calls, or null for calls if it reads none.
"""

import contextlib
import json
import logging
import sys
import warnings

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


def tokenizer_with(special: list[str]):
    """Return a tokenizer of bytes with these special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def read(name: str, texts: list[str], tools: list[dict], tokenizer) -> list[dict]:
    """Return what a parser reads. A text at which it raises has the error as its content."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tool_parsers import ToolParserManager

    asked = [{"role": "user", "content": "a"}]
    request = ChatCompletionRequest(model="m", messages=asked, tools=tools, tool_choice="auto")
    results = []
    for text in texts:
        if name.startswith("cohere_command"):  # read by a parser of reasoning and calls together
            parser = ParserManager.get_parser(name, enable_auto_tools=True)(tokenizer, request.tools)
            _, content, called = parser.parse(text, request)
            calls = [[call.name, call.arguments] for call in called or []]
            results.append({"content": content or "", "calls": calls or None})
            continue
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        try:
            answer = parser.extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001 - a parser of the form, not this program
            results.append({"content": f"{type(error).__name__}: {error}", "calls": None})
            continue
        calls = [[call.function.name, call.function.arguments] for call in answer.tool_calls]
        results.append({"content": answer.content or "", "calls": calls if answer.tools_called else None})
    return results


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        tokenizer = tokenizer_with(asked["special"])
        found = {name: read(name, texts, asked["tools"], tokenizer) for name, texts in asked["texts"].items()}
        import vllm
    json.dump({"version": vllm.__version__, "read": found}, sys.stdout)
