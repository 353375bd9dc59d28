"""Chat template of a model by its configuration: `chat_template` and `chat_template_kwargs`.

Both become part of the model's folder: `weights.prepare` links its files into another folder, whose
`chat_template.jinja` is the template after a line for each variable. Engines, trainers, exports and servers read that
folder, so all of them render the same text, and an exported model needs no further settings. A server's client may
still set a variable to another value.

`chat_template: chatml` is for base models, which have no template. A message ends with `<|im_end|>` if the tokenizer
has this token, else with the tokenizer's own end of sequence: the embedding of a new token would be untrained. The end
of a message is also declared as an end of generation, so that servers stop there.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from components.errors import Problem, ResourceError, SpecError
from components.models.chatml import CHATML, chatml
from components.models.files import read_settings
from components.models.spec import LocalModelSpec
from components.specs import nearest
from components.trajectories.chat import ChatFormat
from components.trajectories.native_calls import PROBE_TOOLS, PYTHONIC
from components.trajectories.template_options import TemplateOptions
from components.trajectories.template_values import meaningless
from components.trajectories.template_variables import variables
from components.worker_process import CallTooCostly

FILE = "chat_template.jinja"


def check(spec: LocalModelSpec, base_dir: Path) -> None:
    """Raise SpecError for variables that the model's template does not read and values without a meaning to it,
    ResourceError if it has none or an invalid one. Nothing is checked in a folder that does not exist yet."""
    if spec.chat_template_kwargs and (base_dir / "config.json").is_file():
        _check_variables(spec, spec.chat_template or _own(base_dir), name_of(spec, base_dir))


def name_of(spec: LocalModelSpec, base_dir: Path) -> str:
    """Return the name of the model in a folder, with the setting that gives it another template, for errors."""
    return base_dir.name if spec.chat_template is None else f"{base_dir.name} with model.chat_template"


def write(spec: LocalModelSpec, tokenizer: Any, out: Path) -> None:
    """Write the template of a model to its folder `out`. tokenizer: of the model. Raises the errors of `check`."""
    template = spec.chat_template or tokenizer.chat_template
    _check_variables(spec, template, name_of(spec, Path(tokenizer.name_or_path)))
    if template == CHATML:
        template = chatml(tokenizer)
    # The last tag is an expression, because Jinja trims nothing after expressions.
    values = [(name, json.dumps(value, ensure_ascii=False)) for name, value in spec.chat_template_kwargs.items()]
    lines = [f"{{%- set {name} = {name} if {name} is defined else {value} -%}}" for name, value in values]
    path = out / FILE
    path.unlink(missing_ok=True)  # a link to a file of the original model
    own = TemplateOptions.read(template)
    keep = own.keep_reasoning if spec.keep_reasoning is None else spec.keep_reasoning
    template = TemplateOptions(keep, spec.call_form or own.call_form).write(template)
    path.write_text("".join([*lines, "{{- '' }}"] if lines else []) + template, encoding="utf-8")


def keeps_reasoning(base_dir: Path) -> bool:
    """Return True if prompts of the model in a folder keep earlier reasoning, by its spec or as it was exported."""
    template = _own(base_dir)
    return isinstance(template, str) and TemplateOptions.read(template).keep_reasoning


def check_options(spec: LocalModelSpec, chat: ChatFormat, name: str) -> None:
    """Raise SpecError for a `call_form` that the model's template does not write, because later prompts would show
    calls in another form than the model wrote, and for `keep_reasoning` of a model without reasoning, or whose template
    rewrites also what others write. chat: of the model. name: of the model."""
    if spec.call_form not in (None, PYTHONIC) and chat.call_form is None:
        text = f"{spec.call_form}: the chat template of {name} does not write calls in this form; expected null, for "
        raise SpecError([Problem("model.call_form", f"{text}the form that it writes, or {PYTHONIC}")])
    if not spec.keep_reasoning:
        return
    reason = None
    if chat.reasoning is None:
        reason = "knows no reasoning"
    elif not keeps_history(chat):
        reason = "changes earlier messages also where they have no reasoning, so that no prompt continues them"
    if reason:
        raise SpecError(
            [Problem("model.keep_reasoning", f"true: the chat template of {name} {reason}; expected false")]
        )


def keeps_history(chat: ChatFormat) -> bool:
    """Return True if two questions, each with a call and an answer, are one history with each message once."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": "system-0"}] if chat.system_role else []
    tool = PROBE_TOOLS[0]["function"]["name"]
    for number in range(2):
        arguments = json.dumps({"word": f"word-{number}"})
        call = {"id": f"call_{number}_0", "type": "function", "function": {"name": tool, "arguments": arguments}}
        talk += [
            {"role": "user", "content": f"question-{number}"},
            {"role": "assistant", "content": "", "reasoning": f"before-{number}", "tool_calls": [call]},
            {"role": "tool", "content": f"result-{number}", "tool_call_id": call["id"], "name": tool},
            {"role": "assistant", "content": f"answer-{number}", "reasoning": f"after-{number}"},
        ]
    bare = [{key: message[key] for key in message if key != "reasoning"} for message in talk]
    for messages in (talk, bare):  # without reasoning, if the prompt closes it
        with suppress(ResourceError):
            streams = chat.streams(messages, PROBE_TOOLS[:1])
            text = str(chat.tokenizer.decode(streams[0].token_ids))
            parts = [message.get(name) for message in messages for name in ("content", "reasoning")]
            return len(streams) == 1 and all(text.count(part) == 1 for part in parts if part)
    return False


def declare_end(out: Path, declared: int | list[int] | None, end: int) -> None:
    """Add the token with which a message ends to those with which generation ends. declared: the model's own."""
    ends = declared if isinstance(declared, list) else [] if declared is None else [declared]
    path = out / "generation_config.json"
    settings = read_settings(path) if path.is_file() else {}
    path.unlink(missing_ok=True)
    ends = [*ends, *([] if end in ends else [end])]
    path.write_text(json.dumps({**settings, "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


def _own(base_dir: Path) -> str | None:
    """Return the template in the files of a model; None without one."""
    if (path := base_dir / FILE).is_file():
        return path.read_text(encoding="utf-8")
    path = base_dir / "tokenizer_config.json"
    template = read_settings(path).get("chat_template") if path.is_file() else None
    return template


def _check_variables(spec: LocalModelSpec, template: Any, name: str) -> None:
    if not isinstance(template, str):
        several = "several chat templates" if template else "no chat template"
        raise ResourceError(
            f"model.chat_template = null: {name} has {several}; expected the path of a template, or chatml for a base "
            "model"
        )
    try:
        read = sorted(variables(template)) if template != CHATML else []
    except (TemplateError, RecursionError) as error:
        raise ResourceError(f"the chat template of {name} is no Jinja template ({error}); repair it") from None
    problems = [
        Problem(
            f"model.chat_template_kwargs.{key}",
            f"{value!r}: the chat template of {name} does not read it; it reads {', '.join(read) or 'no variables'}",
            nearest(key, read),
        )
        for key, value in spec.chat_template_kwargs.items()
        if key not in read
    ]
    values = {key: value for key, value in spec.chat_template_kwargs.items() if key in read}
    try:
        for key, expected in meaningless(template, values):
            text = f"{values[key]!r}: the chat template of {name} reads it like any other value of its type"
            problems.append(Problem(f"model.chat_template_kwargs.{key}", f"{text}; expected {expected}"))
    except CallTooCostly as error:
        raise ResourceError(f"the chat template of {name} takes too much: {error}; repair it") from None
    if problems:
        raise SpecError(problems)
