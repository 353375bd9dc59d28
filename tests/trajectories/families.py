"""Families of models by their chat templates: each in the form of its family, shortened, with a tokenizer that knows
its special tokens; and episodes played under them, whose answers are written down here.

Line breaks stand in expressions. `DATE` stands for what templates tell of the day.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components.environments.protocol import Step
from components.inference.conversations import Conversations
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Sampling
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Scenario, Trajectory
from tests.rollout.worlds import play


@dataclass(frozen=True)
class Family:
    models: str
    template: str
    special: tuple[str, ...]
    """Special tokens, the end of an answer among them."""
    added: tuple[str, ...] = ()
    """Tokens of their own that are not special."""
    bos: str | None = None
    eos: str | None = None
    before: str = ""
    """What its models write before what they say."""
    why: str = ""
    """Why a new history begins."""


_IM = ("<|im_start|>", "<|im_end|>")
_THINK = "<think>\nlet me see\n</think>\n\n"
_HERMES_CALLS = r"""
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}"""
_HERMES_TOOLS = r"""
    {{- '\n\n# Tools\n\nYou may call functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nCall as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' }}"""
_TOOL_ANSWERS = r"""
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"""

SMOLLM2 = r"""
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN25 = (
    r"""
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}"""
    + _HERMES_TOOLS
    + r"""{%- endif %}{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}{{- '\n' + message.content }}{%- endif %}"""
    + _HERMES_CALLS
    + r"""{{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}"""
    + _TOOL_ANSWERS
    + r"""{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

QWEN3 = (
    r"""
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}"""
    + _HERMES_TOOLS
    + r"""{%- endif %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}"""
    + _HERMES_CALLS
    + r"""{{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}"""
    + _TOOL_ANSWERS
    + r"""{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

SMOLLM3 = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are SmolLM.' %}
{%- set thinking = '/no_think' not in system %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\n\n' + system + '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\n' + ('' if thinking else '<think>\n\n</think>\n') }}
        {{- message.content.lstrip('\n') + '<|im_end|>\n' }}
        {% endgeneration %}
    {%- elif message.role == 'tool' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('' if thinking else '<think>\n\n</think>\n') }}
{%- endif %}"""

LLAMA3 = r"""
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with {"name": ..., "parameters": ...}.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

NEMO = r"""
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set turns = namespace(count=0) %}
{%- for message in rest %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (turns.count % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
        {%- endif %}
        {%- set turns.count = turns.count + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST]' + system + '\n\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST]' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be of length 9!') }}{%- endif %}
            {{- call.function | tojson + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be of length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_SMALL = r"""
{{- bos_token }}
{%- set today = strftime_now('%Y-%m-%d') %}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = 'You are Mistral Small. The current date is ' + today + '.', messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in rest %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

GEMMA2 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

GEMMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first, rest = messages[0].content + '\n\n', messages[1:] %}
{%- else %}
    {%- set first, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

PHI3 = r"""
{%- for message in messages %}
    {%- if message.role == 'system' and message.content %}{{- '<|system|>\n' + message.content + '<|end|>\n' }}
    {%- elif message.role == 'user' %}{{- '<|user|>\n' + message.content + '<|end|>\n' }}
    {%- elif message.role == 'assistant' %}{{- '<|assistant|>\n' + message.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

PHI4 = r"""
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"""

_DEEPSEEK = r"""
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- set ns.system = message.content %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments | tojson + '\n```<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + ANSWER + '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' + message.content + '<｜tool▁outputs▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>HEAD' }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace("ANSWER", "message.content").replace("HEAD", "")
DEEPSEEK_R1 = _DEEPSEEK.replace("ANSWER", "message.content.split('</think>')[-1]").replace("HEAD", r"<think>\n")

GRANITE = r"""
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system = 'Knowledge Cutoff Date: April 2024.\nToday is ' + strftime_now('%B %d, %Y') + '.' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in rest %}
    {%- set role = 'tool_response' if message.role == 'tool' else message.role %}
    {{- '<|start_of_role|>' + role + '<|end_of_role|>' + message.content }}
    {%- if message.tool_calls %}{{- '<|tool_call|>' + message.tool_calls | tojson }}{%- endif %}
    {{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

GPT_OSS = r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- if system or tools %}
    {{- '<|start|>developer<|message|># Instructions\n\n' + system }}
    {%- if tools %}{{- '\n\n# Tools\n\n' + tools | tojson }}{%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>' in message.content %}
            {{- raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}
        {%- elif message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content | tojson }}
        {{- '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_BAR = "｜"
_DS = tuple(f"<{_BAR}{one}{_BAR}>" for one in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_THINKING = ("<think>", "</think>")

FAMILIES = {
    "smollm2": Family("SmolLM2, ChatML", SMOLLM2, _IM),
    "hermes": Family("Qwen2.5, Hermes", QWEN25, _IM, ("<tool_call>", "</tool_call>")),
    "qwen3": Family(
        "Qwen3",
        QWEN3,
        _IM,
        ("<tool_call>", "</tool_call>", *_THINKING),
        before=_THINK,
        why="reasoning is dropped once the user speaks again",
    ),
    "smollm3": Family("SmolLM3", SMOLLM3, _IM, _THINKING, before=_THINK),
    "llama3": Family("Llama 3.1, 3.2, 3.3", LLAMA3, _LLAMA, bos="<|begin_of_text|>"),
    "nemo": Family(
        "Mistral Nemo, 7B v0.3",
        NEMO,
        _MISTRAL,
        bos="<s>",
        eos="</s>",
        why="the system message, and with it the tools, moves to the user's last words",
    ),
    "mistral": Family("Mistral Small 3", MISTRAL_SMALL, _MISTRAL, bos="<s>", eos="</s>"),
    "gemma2": Family("Gemma 2", GEMMA2, _GEMMA, bos="<bos>"),
    "gemma3": Family("Gemma 3", GEMMA3, _GEMMA, bos="<bos>"),
    "phi3": Family(
        "Phi-3", PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), eos="<|endoftext|>"
    ),
    "phi4": Family("Phi-4", PHI4, (*_IM, "<|im_sep|>")),
    "deepseek_v3": Family("DeepSeek-V3", DEEPSEEK_V3, _DS, bos=_DS[0]),
    "deepseek_r1": Family(
        "DeepSeek-R1 and its distillates",
        DEEPSEEK_R1,
        _DS,
        _THINKING,
        bos=_DS[0],
        before="let me see\n</think>\n\n",
        why="`<think>` is opened for the model, and reasoning is dropped from every answer",
    ),
    "granite": Family("Granite 3", GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "gpt_oss": Family(
        "gpt-oss",
        GPT_OSS,
        _HARMONY,
        before="<|channel|>analysis<|message|>let me see<|end|><|start|>assistant<|channel|>final<|message|>",
        why="analysis is dropped from answers, and the end of an answer becomes another token",
    ),
}

QUESTIONS = 3
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
SCENARIO = Scenario("words", {}, "train")


def chat_format(family: Family) -> ChatFormat:
    return ChatFormat(tokenizer_of(family))


def tokenizer_of(family: Family) -> Any:
    """Its template with a tokenizer of bytes and a few pairs of them, so that a text has several tokenisations."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("i", "n"), ("e", "r"), ("l", "l"), ("o", "n")]
    vocabulary = [*letters, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(vocabulary)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in family.special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.added])
    named = {name: token for name, token in (("bos_token", family.bos), ("eos_token", family.eos)) if token}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=family.template, name_or_path="a", **named)


class Questions:
    """Three questions of a user, in one episode; each may be looked up before it is answered."""

    def scenarios(self, split: str) -> list[Scenario]:
        return [SCENARIO]

    def tools(self) -> list[dict[str, Any]]:
        return [LOOK_UP]

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.answered = 0
        return [{"role": "system", "content": "Explain words."}, self._question()]

    def step(self, action: dict[str, Any]) -> Step:
        if calls := action.get("tool_calls"):
            return Step([{"role": "tool", "tool_call_id": one["id"], "content": "another thing"} for one in calls])
        self.answered += 1
        done = self.answered == QUESTIONS
        return Step([] if done else [self._question()], done=done, info={"success": done})

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": f"What is the word {self.answered}?"}

    def close(self) -> None: ...


class Scripted:
    """An engine that says what it is told to. whole: renders and tokenises each conversation anew, as a server does;
    else it continues its own tokens, as the embedded engine does."""

    policy = BASE_POLICY

    def __init__(self, chat: ChatFormat, script: list[list[int]], *, whole: bool = False):
        self.chat_format = chat
        self.script = list(script)
        self.whole = whole
        self.conversations = Conversations(chat, 10**6)
        self.said: list[tuple[list[int], list[int], list[float]]] = []
        """Prompt, sampled tokens and their log-probabilities of each answer."""

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        if self.whole:
            prompt = self.chat_format.prompt_ids(request.messages, request.tools)
        else:
            prompt = self.conversations.prompt(request)
        tokens = self.script[len(self.said)]
        logprobs = [-(1 + len(self.said) + index / 1000) for index in range(len(tokens))]
        turn = sum(message["role"] == "assistant" for message in request.messages)
        message = self.chat_format.parse(tokens, turn, request.tools)
        self.conversations.record_response(request, message, prompt + tokens)
        self.said.append((prompt, tokens, logprobs))
        return ChatCompletion(message, "stop", prompt, tokens, logprobs, self.policy)

    def load_policy(self, version: str, folder: str | None) -> None: ...

    def close(self) -> None: ...


def texts(family: Family, chat: ChatFormat) -> Iterator[str]:
    """What the model writes in an episode of `Questions`: a call and an answer to each question."""
    for number in range(QUESTIONS):
        function = {"name": "look_up", "arguments": json.dumps({"word": f"word {number}"})}
        call = {"id": "call_0_0", "type": "function", "function": function}
        written = (
            chat.native_calls.written([call], [LOOK_UP]) if chat.native_tools else f'[look_up(word="word {number}")]'
        )
        before = family.before.removesuffix(chat.channel) if chat.harmony else family.before
        yield before + ("\n" if before and not chat.native_tools else "") + written
        yield f"{family.before}It is another thing, in all."


def sampled(family: Family, chat: ChatFormat, *, odd: bool = False) -> list[list[int]]:
    """The same as tokens. odd: letter by letter, as no tokenizer would write it, and a model may."""
    own = re.compile("(" + "|".join(map(re.escape, (*family.special, *family.added))) + ")")
    script = []
    for number, text in enumerate(texts(family, chat)):
        parts = [part if own.fullmatch(part) else [*part] for part in own.split(text)] if odd else [[text]]
        pieces = [piece for part in parts for piece in ([part] if isinstance(part, str) else part)]
        end = chat.end_id if number % 2 else chat.end_ids[-1]  # calls and answers in turn
        script.append([*(token for piece in pieces for token in chat.encode(piece)), end])
    return script


def episode(engine: Scripted) -> Trajectory:
    sampling = Sampling(max_tokens=1000)
    return asyncio.run(play(engine, Questions(), SCENARIO, sample=0, sampling=sampling, max_turns=9, seed=1))
