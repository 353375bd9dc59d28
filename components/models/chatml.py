"""ChatML, the chat template for base models, which have none.

A message ends with `<|im_end|>` if the tokenizer has this token, else with the tokenizer's own end of sequence: the
embedding of a new token would be untrained.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from components.errors import ResourceError

CHATML = "chatml"
"""`model.chat_template` of base models."""
_IM_END = "<|im_end|>"
_CHATML = """\
{{- BEGIN -}}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ END ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def chatml(tokenizer: Any) -> str:
    """Return a ChatML template for a tokenizer. Raises ResourceError if it has no token with which a message can
    end."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    end = _IM_END if _IM_END in special else tokenizer.eos_token
    if end is None:
        raise ResourceError(
            f"model.chat_template = chatml: the tokenizer of {tokenizer.name_or_path} has neither {_IM_END} nor an end "
            "of sequence; expected the path of a template whose messages end with a special token"
        )
    begins = bool(tokenizer.bos_token) and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    begin = tokenizer.bos_token if begins else ""
    return _CHATML.replace("BEGIN", json.dumps(begin)).replace("END", json.dumps(end))


def chatml_digest() -> str:
    """Return the SHA-256 of ChatML, for stage keys."""
    return hashlib.sha256(_CHATML.encode()).hexdigest()
