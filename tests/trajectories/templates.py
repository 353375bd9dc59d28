"""Chat templates in the manner of those that models come with. Line breaks stand in expressions: Jinja trims others."""

from __future__ import annotations

_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    '{{ \'Call tools as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>.\n<tools>\' }}'
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
)
_OTHERS = (
    "{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
)
_EACH = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
_HEAD = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HERMES = (
    _TOOLS
    + "{% for message in messages %}"
    + _OTHERS
    + "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _HEAD
)
"""Tools in the system message, calls in tags, answers of tools as a user's words."""

REASONING = (
    _TOOLS
    + "{% set last = namespace(user=0) %}{% for message in messages %}"
    + "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for message in messages %}"
    + _OTHERS
    + "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    + "{{ message.content if loop.index0 > last.user else message.content.split('</think>')[-1] }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _HEAD
)
"""As Hermes, but reasoning is dropped from answers before the user's last words."""

FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.index0 < messages | length - 3 %}"
    "{{ '<|im_start|>assistant\n...<|im_end|>\n' }}{% else %}" + _EACH + "{% endif %}{% endfor %}" + _HEAD
)
"""Drops what the assistant said more than a turn ago."""

OPENED = (
    "{% for message in messages %}" + _EACH + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Opens the reasoning in the head for generation, and nowhere else."""

STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{% endif %}" + _EACH + "{% endfor %}" + _HEAD
)
"""User and assistant in turn, and nobody else."""

OTHER_CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<run>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}{{ '</run>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _HEAD
)
"""Shows tools, but writes calls in a form of its own."""

ENDLESS = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}{{ 'assistant: ' }}"
)
"""Marks no end of a message."""
