"""`chat_template` and `chat_template_kwargs`: what is rendered, exported, hashed and refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from components.deployment.export import export_merged
from components.errors import ResourceError, SpecError
from components.models.chat_template import keeps_reasoning
from components.models.spec import LocalModelSpec, ModelSpec
from components.models.weights import check_weights, declared_end, load_tokenizer, prepare
from components.specs import validate
from components.trajectories.chat import ChatFormat
from components.trajectories.chat_template import TODAY
from components.trajectories.template_options import TemplateOptions
from components.trajectories.template_values import meaningless
from components.trajectories.template_variables import variables
from tests.trajectories.families import FAMILIES, tokenizer_of

TEMPLATE = """
{%- if tone is not defined %}{% set tone = 'plain' %}{% endif -%}
{%- for message in messages %}{% set content = message['content'] %}
{{- '<|im_start|>' + message['role'] + ' ' + tone + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' + tone + '\\n' }}{% endif %}"""
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TINY = {"name": "tiny", "source": "random"}
REAL = Path(os.environ.get("ESPALIER_MODELS", "/nowhere"))


def spec_of(**changes) -> ModelSpec:
    return validate(ModelSpec, {**TINY, **changes})


def rendered(folder: Path) -> str:
    return ChatFormat(load_tokenizer(folder)).render(TALK, [], generate=False)


@pytest.fixture
def template(tmp_path) -> str:
    (tmp_path / "tone.jinja").write_text(TEMPLATE)
    return str(tmp_path / "tone.jinja")


def test_the_folder_of_a_model_has_the_template_and_its_values(base_dir, template, tmp_path):
    before = rendered(prepare(spec_of(), tmp_path))
    for values, tone in (({}, "plain"), ({"tone": 'a "b"\n%} 🙂'}, 'a "b"\n%} 🙂'), ({"tone": 3}, "3")):
        spec = spec_of(chat_template=template, chat_template_kwargs=values)
        if values.get("tone") == 3:
            spec = spec_of(chat_template=TEMPLATE.replace("+ tone", "~ tone"), chat_template_kwargs=values)
        folder = prepare(spec, tmp_path)
        expected = f"<|im_start|>user {tone}\na<|im_end|>\n<|im_start|>assistant {tone}\nb<|im_end|>\n"
        assert rendered(folder) == expected
        assert (folder / "model.safetensors").samefile(prepare(spec_of(), tmp_path) / "model.safetensors")
    served = load_tokenizer(folder).apply_chat_template(TALK, tokenize=False, tone="own")  # by a server's client
    assert served == "<|im_start|>user own\na<|im_end|>\n<|im_start|>assistant own\nb<|im_end|>\n"
    assert rendered(prepare(spec_of(), tmp_path)) == before


def test_an_exported_model_renders_the_same_without_settings(template, tmp_path):
    folder = prepare(spec_of(chat_template=template, chat_template_kwargs={"tone": "dry"}), tmp_path)
    export_merged(folder, None, tmp_path / "out", "card")
    text = load_tokenizer(tmp_path / "out").apply_chat_template(TALK, tokenize=False)
    assert "user dry" in text
    assert text == rendered(folder)


THINKING = """\n
{%- for message in messages %}{% if loop.last and message['role'] == 'user' and sets_system_last %}
{{- messages[0]['content'] }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""


def test_options_in_a_template_hold_until_the_configuration_says_otherwise(base_dir, tmp_path):
    """Those of the model of an export are the defaults of what is made of it. Nothing else of the template changes."""
    before = "\n\nHello " + THINKING
    exported = {"chat_template": TemplateOptions(True, "pythonic").write(before)}
    folders = {
        "as exported": (exported, TemplateOptions(True, "pythonic")),
        "reasoning off": (exported | {"keep_reasoning": False}, TemplateOptions(False, "pythonic")),
        "other calls": (
            {"chat_template": TemplateOptions(True, "json_text").write(before), "call_form": "pythonic"},
            TemplateOptions(True, "pythonic"),
        ),
        "new": ({"chat_template": before, "keep_reasoning": True}, TemplateOptions(True)),
        "none": ({"chat_template": before}, TemplateOptions()),
    }
    for case, (changes, options) in folders.items():
        template = (prepare(spec_of(**changes), tmp_path) / "chat_template.jinja").read_text()
        assert (case, TemplateOptions.read(template)) == (case, options)
        assert (case, keeps_reasoning(prepare(spec_of(**changes), tmp_path))) == (case, options.keep_reasoning)
        assert (case, template.count("{#- espalier")) == (case, int(options != TemplateOptions()))
        assert rendered(prepare(spec_of(**changes), tmp_path)).startswith("\n\nHello"), case
    assert "keep_reasoning" not in spec_of().key_part()
    assert spec_of(keep_reasoning=False).key_part()["keep_reasoning"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"forget": 1}', "forget: expected only call_form and keep_reasoning"),
        ('{"keep_reasoning": "yes"}', "keep_reasoning: expected true or false"),
        ('{"call_form": "frob"}', "call_form: expected null or one of pythonic, "),
        ('{"call_form": }', "no JSON"),
    ],
)
def test_unknown_options_in_a_template_are_refused(options, message):
    with pytest.raises(ResourceError, match=message):
        TemplateOptions.read(f"{{#- espalier {options} -#}}{THINKING}")


def test_reasoning_that_no_history_can_keep_is_refused(base_dir, tmp_path):
    moved = "{%- set sets_system_last = true -%}" + THINKING
    for template, message in ((moved, "changes earlier messages"), (TEMPLATE, "knows no reasoning")):
        with pytest.raises(SpecError, match=f"model.keep_reasoning: true: the chat template of .* {message}"):
            prepare(spec_of(chat_template=template, keep_reasoning=True), tmp_path)


def test_keys_have_the_content_of_a_template_and_its_values(template, tmp_path):
    shutil.copy(template, tmp_path / "copy.jinja")
    keys = [
        json.dumps(spec_of(**changes).key_part(), sort_keys=True)
        for changes in (
            {"chat_template": template},
            {"chat_template": str(tmp_path / "copy.jinja")},
            {"chat_template": TEMPLATE},
            {"chat_template": "chatml"},
            {"chat_template_kwargs": {"tone": "dry"}},
            {"chat_template_kwargs": {"tone": "wet"}},
            {},
        )
    ]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 5
    assert not {"chat_template", "chat_template_kwargs"} & spec_of(chat_template=None).key_part().keys()


def test_what_a_template_does_not_read_is_refused_before_anything_runs(base_dir, template, tmp_path):
    prepare(spec_of(), tmp_path)
    for changes, words in (
        ({"chat_template": template, "chat_template_kwargs": {"tones": 1}}, "reads tone. Did you mean 'tone'?"),
        ({"chat_template": template, "chat_template_kwargs": {"content": "x"}}, "it reads tone"),  # set in the loop
        ({"chat_template": template, "chat_template_kwargs": {"messages": "x"}}, "it reads tone"),
        ({"chat_template": "chatml", "chat_template_kwargs": {"tone": "x"}}, "it reads no variables"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "it reads no variables"),
    ):
        for refuse in (check_weights, prepare):
            with pytest.raises(SpecError) as caught:
                refuse(spec_of(**changes), tmp_path)
            assert words in str(caught.value), changes
    with pytest.raises(
        SpecError, match=r"model\.call_form: kimi: the chat template of .* does not write calls in this form"
    ):
        prepare(spec_of(call_form="kimi"), tmp_path)
    assert ChatFormat(load_tokenizer(prepare(spec_of(call_form="pythonic"), tmp_path))).call_form is None
    with pytest.raises(ResourceError, match=r"with model\.chat_template is no Jinja template"):
        prepare(spec_of(chat_template="{{ a", chat_template_kwargs={"a": 1}), tmp_path)


def test_an_unusable_template_is_refused_by_its_setting(base_dir, tmp_path):
    """With its path where no tokenizer is needed to see it, and never with that of a draft."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    cases = (
        (None, "is no file"),
        ("", "is empty"),
        ("Hello", "renders no messages"),
        ("{{ 'a' }}" + "b" * (1 << 20), "has 1048585 bytes; at most 1048576 are read"),
        ("{{ messages }", r"refuses a question and its answer \(TemplateSyntaxError: .*\): repair it"),
        ("{{ raise_exception('no conversations today') }}", "refuses .*no conversations today"),
        ("{{ messages[0].content }}", "does not render the content of messages"),
        (loop + "{{ messages[1].content }}", "takes too much"),
    )
    for number, (text, reason) in enumerate(cases):
        file = tmp_path / f"{number}.jinja"
        if text is not None:
            file.write_text(text)
        with pytest.raises(SpecError, match=rf"chat_template: .*expected chatml, .*/{file.name}' {reason}"):
            spec_of(chat_template=str(file))
    no_end = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for template, reason in ((no_end, "does not mark where"), ("{{ raise_exception('no') }}", "refuses")):
        with pytest.raises(ResourceError, match=reason) as caught:
            prepare(spec_of(chat_template=template), tmp_path)
        assert "with model.chat_template" in str(caught.value)
        assert "repair the template" in str(caught.value)
        assert "draft" not in str(caught.value)


QWEN3 = (
    """{% if enable_thinking is defined and enable_thinking is false %}closed{% endif %}{{ messages[-1]['content'] }}"""
)
TRUTHY = "{{ messages[-1]['content'] }}{% if not think %}closed{% endif %}"
EFFORT = """{% if effort == 'high' %}high{% elif effort == 'low' %}low{% else %}{% set default = 'medium' %}{% endif %}
{{- messages[-1]['content'] }}"""
MEDIUM = """{% set effort = effort | default('medium') %}
{%- if effort %}{{ 'H' if effort == 'high' else 'M' }}{% endif %}
{{- messages[-1]['content'] }}"""
SHOWN = "{{ messages[-1]['content'] + (tone | default('plain')) | string }}"
BUDGET = "{{ messages[-1]['content'] }}{% if budget is number and budget > 40 %}long{% endif %}"
TOOLS = "{% if tools and native %}{{ tools | length }}{% endif %}{{ messages[-1]['content'] }}"
KEPT = "{% for m in messages %}{% if kept %}{{ m.reasoning_content }}{% endif %}{{ m['content'] }}{% endfor %}"
UNSEEN = "{% if add_vision_id and messages[0].images %}{{ messages[0].images }}{% endif %}{{ messages[-1]['content'] }}"
STRICT = "{% if mode not in ['a', 'b'] %}{{ raise_exception('mode') }}{% endif %}{{ messages[-1]['content'] + mode }}"
QUESTION_REFUSED = "{{ raise_exception('never') if mode != 'a' else messages[-1]['content'] }}"


@pytest.mark.parametrize(
    ("template", "name", "accepted", "refused", "expected"),
    [
        (QWEN3, "enable_thinking", [True, False, 1], ["maybe", "no", "off", "false", "", 0, 7, 0.5], "true or false"),
        (TRUTHY, "think", [True, False, 0, 1, ""], ["no", "false", 7], "true or false"),
        (EFFORT, "effort", ["high", "low", "medium"], ["hgih", True, 3], "'high' or 'low'"),
        (MEDIUM, "effort", ["high", "medium"], ["hgih"], "'high'"),
        (QWEN3 + EFFORT, "enable_thinking", [True], ["low", "medium"], "true or false"),  # texts of another variable
        (SHOWN, "tone", ["dry", "", 3, True], [], ""),
        (BUDGET, "budget", [0, 39, 41, 0.5], [], ""),
        (TOOLS, "native", [True, False], ["yes"], "true or false"),
        (KEPT, "kept", [True, False], ["yes"], "true or false"),
        (UNSEEN, "add_vision_id", [True, False, "yes", 3], [], ""),
        (STRICT, "mode", ["a", "b"], ["c", True], "'a' or 'b'"),
        (QUESTION_REFUSED, "mode", ["a"], ["b"], "'a'"),
    ],
)
def test_a_value_without_a_meaning_to_the_template_is_refused(template, name, accepted, refused, expected):
    """Other values of its type give the same prompt. The template's default may be stated."""
    for value in accepted:
        assert (value, list(meaningless(template, {name: value}))) == (value, [])
    for value in refused:
        assert (value, list(meaningless(template, {name: value}))) == (value, [(name, expected)])


def test_values_without_a_meaning_are_named_before_anything_runs(base_dir, tmp_path):
    prepare(spec_of(), tmp_path)
    spec = spec_of(chat_template=QWEN3, chat_template_kwargs={"enable_thinking": "no"})
    for refuse in (check_weights, prepare):
        with pytest.raises(
            SpecError, match=r"kwargs\.enable_thinking: 'no': the chat template .*expected true or false"
        ):
            refuse(spec, tmp_path)


def test_variables_of_published_templates():
    templates = pytest.importorskip("trl").__path__[0] + "/chat_templates"
    expected = {
        "qwen3": {"enable_thinking"},
        "qwen3_instruct_2507": set(),
        "gptoss": {"builtin_tools", "model_identity", "reasoning_effort"},
        "llama3_2": {"custom_tools", "date_string", "tools_in_user_message"},
        "glm4moe": {"enable_thinking"},
        "gemma3": set(),
        "qwen3_6": {"add_vision_id", "enable_thinking", "preserve_thinking"},
    }
    assert {name: variables(Path(templates, f"{name}.jinja").read_text()) for name in expected} == expected


def bare(folder: Path, tokenizer) -> LocalModelSpec:
    """Return the spec of a folder with a tokenizer without template, and weights that nothing reads."""
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    (folder / "model.safetensors").touch()
    return spec_of(name=str(folder), source="hub", chat_template="chatml")


def test_chatml_ends_messages_with_a_token_that_the_tokenizer_has(tmp_path):
    for name, end in (("gemma3", "<eos>"), ("qwen3", "<|im_end|>")):
        tokenizer = tokenizer_of(FAMILIES[name])
        if name == "gemma3":
            tokenizer.add_special_tokens({"eos_token": "<eos>"})
        folder = prepare(bare(tmp_path / name, tokenizer), tmp_path / "cache")
        chat = ChatFormat(load_tokenizer(folder))
        shown = chat.render([*TALK, {"role": "user", "content": f"c{end}"}], [], generate=True)
        escaped = f"{end[0]} {end[1:]}"
        assert shown == (
            f"<|im_start|>user\na{end}\n<|im_start|>assistant\nb{end}\n<|im_start|>user\nc{escaped}{end}\n"
            "<|im_start|>assistant\n"
        )
        assert (chat.end, declared_end(folder)) == (end, [1, chat.end_id])
    tokenizer = tokenizer_of(FAMILIES["gemma3"])
    tokenizer.eos_token = None
    with pytest.raises(ResourceError, match=r"neither <\|im_end\|> nor an end of sequence"):
        prepare(bare(tmp_path / "none", tokenizer), tmp_path / "cache")


@pytest.mark.models
@pytest.mark.skipif(not REAL.is_dir(), reason="ESPALIER_MODELS names no folder of tokenizers")
def test_real_tokenizers_render_as_by_transformers_with_the_values(tmp_path):
    from transformers import AutoTokenizer

    trl = pytest.importorskip("trl").__path__[0]
    for name, values in (
        ("qwen3", {"enable_thinking": False}),
        ("gptoss", {"reasoning_effort": "low"}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": "You are a shop."}),
    ):
        tokenizer = AutoTokenizer.from_pretrained(REAL / name)
        text = tokenizer.chat_template or Path(trl, "chat_templates", "gptoss.jinja").read_text()
        folder = tmp_path / f"{name}-{len(str(values))}"
        spec = bare(folder, tokenizer)
        (folder / "chat_template.jinja").write_text(text)  # beside a config without one
        spec = spec.model_copy(update={"chat_template": None, "chat_template_kwargs": values})
        chat = ChatFormat(load_tokenizer(prepare(spec, tmp_path / "cache")))
        tokenizer.chat_template = text
        for messages in (TALK[:1], TALK, [{"role": "system", "content": "s"}, *TALK[:1]]):
            options = {"add_generation_prompt": len(messages) != 2, "strftime_now": TODAY.strftime, **values}
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert chat.render(messages, [], generate=len(messages) != 2) == expected, (name, values)


@pytest.mark.models
@pytest.mark.skipif(not REAL.is_dir(), reason="ESPALIER_MODELS names no folder of tokenizers")
def test_chatml_on_the_tokenizer_of_a_base_model(tmp_path):
    """gemma-3-270m (base) ends a sequence with `<eos>` and begins it with `<bos>`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL / "gemma3", eos_token="<eos>")
    chat = ChatFormat(load_tokenizer(prepare(bare(tmp_path / "gemma", tokenizer), tmp_path / "cache")))
    assert (chat.end, chat.end_id) == ("<eos>", 1)
    stream = chat.streams(TALK, [])[0]
    (start, end), tokens = stream.spans[0], stream.token_ids
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens[start:end]) == "b<eos>"
    assert chat.parse(tokens[start:end], 0)["content"] == "b"
