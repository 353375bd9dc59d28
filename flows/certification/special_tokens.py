"""Check of the tokens that end a response: those of the model's files, of the engine and of the chat template."""

from __future__ import annotations

from typing import Any

from components.errors import PromptRefused
from components.evaluation.certificate_page import CertificateCheck, check_result
from components.inference.conversations import stop_ids
from components.models.weights import declared_end, model_config
from components.trajectories.chat import ChatFormat
from flows.certification.subject import Subject

NAME = "special_tokens"


def check_special_tokens(subject: Subject, engine: Any = None) -> CertificateCheck:
    """Compare the stop tokens with the tokens of an assistant message. engine: its attribute `stop_ids` counts, if it
    has one."""
    chat, tokenizer = subject.chat, subject.chat.tokenizer
    end = declared_end(subject.base_dir)
    declared = sorted(end if isinstance(end, list) else [] if end is None else [end])
    stops = frozenset(getattr(engine, "stop_ids", None) or stop_ids(end, chat))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends, size = _ends(chat, special), _vocabulary(subject)
    named = {token: tokenizer.convert_ids_to_tokens(token) for token in {*stops, *declared} if token < len(tokenizer)}
    failures = []
    if chat.end_id not in stops:
        failures.append(
            f"the engine does not stop at {chat.end!r} ({chat.end_id}), with which the template ends a response"
        )
    if declared and not ends & set(declared):
        listed = ", ".join(f"{named.get(token)!r} ({token})" for token in declared)
        failures.append(
            f"the model's files declare {listed} as the end of a response, which never ends an assistant message of "
            f"the template; it ends with {chat.end!r} ({chat.end_id})"
        )
    if plain := sorted(token for token in stops if token not in special):
        failures.append(f"the stop token {named.get(plain[0])!r} ({plain[0]}) is ordinary text and would cut responses")
    ids = {"end of turn": chat.end_id, "eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    for name, token in (*ids.items(), *(("stop token", token) for token in sorted(stops))):
        if token is not None and token >= size:
            failures.append(f"{name} {token}: the model has only {size} tokens")
    figures: dict[str, Any] = {"end": chat.end, "stops": ", ".join(str(named.get(token)) for token in sorted(stops))}
    figures |= {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token}
    notes = []
    if unused := sorted(stops - ends):
        notes.append(
            f"{', '.join(str(named.get(token)) for token in unused)} also ends a response, not in the template"
        )
    if tokenizer.pad_token_id == chat.end_id:
        notes.append("pad_token is the end of a turn; training masks by position, so the end is still learned")
    return check_result(NAME, failures, figures, note="; ".join(notes))


def _ends(chat: ChatFormat, special: set[int]) -> set[int]:
    """Return the special tokens that end an assistant message, alone and before a further question."""
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "second"},
    ]
    tokens: set[int] = set()
    for length in (2, 3):
        try:
            after = chat.render(talk[:length], [], generate=False).rpartition("reply")[2]
        except PromptRefused:
            continue
        tokens |= set([token for token in chat.encode(after) if token in special][:1])
    return tokens


def _vocabulary(subject: Subject) -> int:
    return int(model_config(subject.base_dir).get_text_config().vocab_size)
