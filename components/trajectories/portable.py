"""A chat template that renders conversations as in training, on any server.

`ChatFormat` writes tools and calls itself if the model's template does not support them. A server with the original
template would omit them. Therefore an export includes a template with the same layout before the model's own: tool
signatures in the system message, calls in the pythonic form, tool results as user messages. A template with tool
support is exported unchanged. Only Espalier's servers escape special tokens in messages.
"""

from __future__ import annotations

import json
import re

from components.trajectories.call_forms.pythonic import WORD
from components.trajectories.chat import ChatFormat
from components.trajectories.chat_template import TODAY
from components.trajectories.plain_messages import DEFAULT_SYSTEM, TOOLS

_NOW = re.compile(r"""strftime_now\(\s*(["'])(.{0,200}?)\1\s*\)""")
# Blocks are trimmed on both sides. Jinja's sandbox has no mutable lists, so lists are rebuilt; llama.cpp's Jinja cannot
# join the keys of an object. `calls` and `literal` correspond to `tool_calls.write_pythonic` and `tool_calls.literal`.
_LAYOUT = """\
{%- macro literal(value) -%}
{%- if value is string -%}{{- value | tojson -}}
{%- elif value is none -%}{{- 'None' -}}
{%- elif value is boolean -%}{{- 'True' if value else 'False' -}}
{%- elif value is mapping -%}{{- '{' -}}
{%- for key in value -%}{{- ', ' if not loop.first -}}{{- key | tojson -}}{{- ': ' -}}{{- literal(value[key]) -}}
{%- endfor -%}{{- '}' -}}
{%- elif value is iterable -%}{{- '[' -}}
{%- for one in value -%}{{- ', ' if not loop.first -}}{{- literal(one) -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro argument(key, value) -%}
{%- set word = namespace(is=key != '') -%}
{%- if key.isalnum is defined -%}
{%- for letter in key -%}
{%- if not (letter.isalnum() or letter in '_.-') -%}{%- set word.is = false -%}{%- endif -%}
{%- endfor -%}
{%- else -%}
{%- for letter in NOT_OF_WORDS -%}
{%- if letter in key -%}{%- set word.is = false -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if word.is -%}{{- key -}}{{- '=' -}}{{- literal(value) -}}
{%- else -%}{{- '**{' -}}{{- key | tojson -}}{{- ': ' -}}{{- literal(value) -}}{{- '}' -}}{%- endif -%}
{%- endmacro -%}
{%- macro calls(made) -%}{{- '[' -}}
{%- for call in made -%}{{- ', ' if not loop.first -}}{{- call['function']['name'] -}}{{- '(' -}}
{%- if call['function']['arguments'] is string -%}{{- '**' -}}{{- call['function']['arguments'] -}}
{%- else -%}
{%- for key in call['function']['arguments'] -%}{{- ', ' if not loop.first -}}
{{- argument(key, call['function']['arguments'][key]) -}}{%- endfor -%}
{%- endif -%}{{- ')' -}}{%- endfor -%}{{- ']' -}}
{%- endmacro -%}
{%- macro listed(names) -%}
{%- for name in names -%}{{- ', ' if not loop.first -}}{{- name -}}{%- endfor -%}
{%- endmacro -%}
{%- set talk = namespace(shown=[], answering=false, signatures=[]) -%}
{%- for message in messages -%}
{%- set text = message['content'] or '' -%}
{%- if message['tool_calls'] -%}
{%- set written = calls(message['tool_calls']) -%}
{%- set text = text ~ '\\n' ~ written if text else written -%}
{%- endif -%}
{%- set role = message['role'] -%}
{%- if role == 'tool' and TOOL_ROLE == 'user' -%}
{%- set role = 'user' -%}
{%- set text = '<tool_response>' ~ text ~ '</tool_response>' -%}
{%- endif -%}
{%- if talk.answering and message['role'] == 'tool' and TOOL_ROLE == 'user' -%}
{%- set joined = {'role': 'user', 'content': talk.shown[-1]['content'] ~ '\\n' ~ text} -%}
{%- set talk.shown = talk.shown[:-1] + [joined] -%}
{%- else -%}
{%- set talk.shown = talk.shown + [{'role': role, 'content': text}] -%}
{%- endif -%}
{%- set talk.answering = message['role'] == 'tool' -%}
{%- endfor -%}
{%- if tools -%}
{%- for tool in tools -%}
{%- set names = (tool['function']['parameters'] or {}).get('properties') or {} -%}
{%- set about = tool['function']['description'] or '' -%}
{%- set line = tool['function']['name'] ~ '(' ~ listed(names) ~ '): ' ~ about -%}
{%- set talk.signatures = talk.signatures + [line] -%}
{%- endfor -%}
{%- set names = (tools[0]['function']['parameters'] or {}).get('properties') or {} -%}
{%- set example = namespace(text=tools[0]['function']['name'] ~ '(') -%}
{%- for name in names -%}
{%- set example.text = example.text ~ (', ' if not loop.first else '') ~ name ~ '=...' -%}
{%- endfor -%}
{%- if not talk.shown or talk.shown[0]['role'] != 'system' -%}
{%- set talk.shown = [{'role': 'system', 'content': DEFAULT}] + talk.shown -%}
{%- endif -%}
{%- set offer = SYSTEM_AND_TOOLS -%}
{%- set talk.shown = [{'role': 'system', 'content': offer}] + talk.shown[1:] -%}
{%- endif -%}
"""
_SYSTEM_AS_USER = """\
{%- set system = namespace(said=[]) -%}
{%- for message in talk.shown -%}
{%- set role = 'user' if message['role'] == 'system' else message['role'] -%}
{%- set system.said = system.said + [{'role': role, 'content': message['content']}] -%}
{%- endfor -%}
{%- set talk.shown = system.said -%}
"""
_IN_TURN = """\
{%- set turns = namespace(taken=[]) -%}
{%- for message in talk.shown -%}
{%- if turns.taken and message['role'] == 'user' and turns.taken[-1]['role'] == 'user' -%}
{%- set joined = {'role': 'user', 'content': turns.taken[-1]['content'] ~ '\\n' ~ message['content']} -%}
{%- set turns.taken = turns.taken[:-1] + [joined] -%}
{%- else -%}
{%- set turns.taken = turns.taken + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set talk.shown = turns.taken -%}
"""
_NOT_OF_WORDS = [*"\t\n\r", *(letter for letter in map(chr, range(32, 256)) if not WORD.match(letter))]
"""Characters that a keyword of a pythonic call cannot have, in Latin-1. llama.cpp's templates can neither classify
characters nor iterate over text; there, a parameter whose name has another symbol, such as an arrow, differs from the
training prompt."""
# The last tag is an expression, because Jinja trims nothing after expressions.
_THEN = "{%- set messages = talk.shown -%}{%- set tools = none -%}{{- '' }}"


def portable_template(chat: ChatFormat) -> str:
    """Return the chat template for an exported tokenizer. `apply_chat_template(messages, tools=tools)` then gives the
    same text as `chat.render(messages, tools)`, for call arguments that are mappings, as servers pass them, and on any
    day. A model's template with tool support is unchanged except for a fixed date."""
    own = _NOW.sub(lambda match: _text(TODAY.strftime(match[2])), chat.tokenizer.chat_template)
    if chat.native_tools:
        return own
    before, _, after = TOOLS.partition("{system}")[2].partition("{signatures}")
    middle, _, end = after.partition("{example}")
    offer = " ~ ".join(
        [
            "talk.shown[0]['content']",
            _text(before),
            "(talk.signatures | join('\\n'))",
            _text(middle),
            "example.text",
            _text(")" + end),
        ]
    )
    layout = _LAYOUT.replace("SYSTEM_AND_TOOLS", offer).replace("DEFAULT", _text(DEFAULT_SYSTEM))
    layout = layout.replace("TOOL_ROLE", _text(chat.tool_role)).replace("NOT_OF_WORDS", _text(_NOT_OF_WORDS))
    if not chat.system_role:
        layout += _SYSTEM_AS_USER
    if chat.alternates:
        layout += _IN_TURN
    return layout + _THEN + own


def _text(value: str | list[str]) -> str:
    """Return text, or a list of texts, as a Jinja literal."""
    return json.dumps(value, ensure_ascii=False)
