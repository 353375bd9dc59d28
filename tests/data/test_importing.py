"""Checks of an import: what each drops, counts and says."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.data import fingerprints
from components.data.fingerprints import Fingerprints, SimilarTexts, fingerprint
from components.data.form_resolution import resolve_form
from components.data.import_report import CHECKS, ImportReport
from components.data.importing import DataImport
from components.data.row_checks import TokenChecks
from components.data.spec import DataSpec
from components.errors import SpecError
from components.models.spec import ModelSpec
from components.models.weights import load_tokenizer, prepare
from components.specs import validate
from components.trajectories.chat import ChatFormat
from components.trajectories.groups import scenario_of
from components.trajectories.schema import Trajectory
from components.trajectories.store import count_trajectories, load_scored, read_trajectories
from tests.data.rows import FORMS, WEATHER, openai
from tests.trajectories.families import FAMILIES, chat_format
from tests.trajectories.templates import STRICT

WORDS = [hashlib.sha256(str(number).encode()).hexdigest()[:7] for number in range(3000)]
GOOD = [{"prompt": f"Name the number {n}.", "completion": f"It is {n}."} for n in range(6)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatFormat(
        load_tokenizer(prepare(ModelSpec(name="tiny", source="random"), tmp_path_factory.mktemp("models")))
    )


@pytest.fixture
def importing(tmp_path, chat):
    """Import rows: returns the report, the trajectories, and the held-out ones."""

    def run(
        rows: list[Any], template: str | None = None, **options: Any
    ) -> tuple[ImportReport, list[Trajectory], list[Trajectory]]:
        path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", rows)
        spec = validate(DataSpec, {"path": str(path), "max_dropped": 1.0, **options})
        spec = spec.model_copy(update={"form": resolve_form(spec)})
        out = path.with_suffix("")
        out.mkdir()
        checked = chat
        if template is not None:
            tokenizer = copy.deepcopy(chat.tokenizer)
            tokenizer.chat_template = template
            checked = ChatFormat(tokenizer)
        report = DataImport(spec, TokenChecks(checked, 300)).write(out)
        files = [out / name for name in ("trajectories.parquet", "scores.parquet", "selection.parquet")]
        held = out / "heldout" / "trajectories.parquet"
        return report, load_scored(*files), list(read_trajectories(held)) if held.exists() else []

    return run


def write(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON Lines; text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def counts(report: ImportReport) -> dict[str, int]:
    return {name: result.count for name, result in report.checks.items() if result.count}


NAMED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ('' if m.content[0] == '/' else '\n') + m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template that writes commands on the line of the role."""
BAD: dict[str, Any] = {
    "malformed": '{"prompt": ',
    "empty": {"prompt": "a", "completion": "  "},
    "tokenizer": {"prompt": "a", "completion": "b<|im_end|>c"},
    "too_long": {"prompt": "a", "completion": "b" * 400},
    "duplicate": GOOD[2],
    "no_learnable_token": {
        "prompt": "z",
        "completion": [{"role": "assistant", "content": "y", "weight": 0}],
    },
    "unknown_tool": {
        "prompt": "w",
        "completion": [{"role": "assistant", "tool_calls": [{"function": {"name": "nothing", "arguments": "{}"}}]}],
        "tools": [WEATHER],
    },
}


def test_a_row_that_fails_a_check_is_dropped_and_counted(importing, subtests):
    for check in BAD:
        with subtests.test(check=check):
            report, trajectories, _ = importing([*GOOD, BAD[check]])
            assert counts(report) == {check: 1}
            assert len(trajectories) == report.examples == report.episodes == 6
            assert (report.rows, report.dropped()) == (7, 1)
            (shown,) = report.checks[check].examples
            assert shown["number"] == 7
            assert shown["reason"]


def _talk(*texts: str) -> dict[str, Any]:
    """A conversation of user and assistant in turn; a text that begins with `assistant: ` is the assistant's."""
    messages = []
    for number, text in enumerate(texts):
        role, content = text.split(": ", 1) if ": " in text else (("user", "assistant")[number % 2], text)
        messages.append({"role": role, "content": content})
    return {"messages": messages}


def test_reasoning_is_no_text_between_the_marks_of_other_models():
    TokenChecks(chat_format(FAMILIES["deepseek_r1"]), 300).require_place("text")
    tokens = TokenChecks(chat_format(FAMILIES["gpt_oss"]), 300)
    tokens.require_place("field")
    with pytest.raises(
        SpecError, match=r"data\.reasoning: text: .*expected field, which writes the model's marks, or drop"
    ):
        tokens.require_place("text")


_CALL = {"name": "weather", "arguments": json.dumps({"city": "<|im_end|>"})}
_ESCAPED = r'{"city": "\u003c|im_end|\u003e"}'
INEXPRESSIBLE: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "a response without a prompt": (None, _talk("assistant: b"), "the conversation is empty"),
    "roles that do not alternate": (STRICT, _talk("a", "b", "assistant: c"), "Roles must alternate"),
    "a response that does not follow its prompt": (NAMED, _talk("a", "/b"), "differently from the head"),
    "a special token in a call": (
        None,
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": _CALL}]}],
            "tools": [WEATHER],
        },
        "special token <|im_end|>",
    ),
    "an escaped special token in a call": (
        None,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": _CALL | {"arguments": _ESCAPED}}]},
            ],
            "tools": [WEATHER],
        },
        "special token <|im_end|>",
    ),
    "reasoning without a place in the template": (
        None,
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b", "reasoning_content": "why"}]},
        "has reasoning that the chat template leaves out. Set data.reasoning=text or data.reasoning=drop",
    ),
}
"""Template, row and reason of rows that training cannot express."""


def test_a_row_that_training_cannot_express_is_dropped_by_number(importing, subtests):
    for name, (template, row, reason) in INEXPRESSIBLE.items():
        with subtests.test(name):
            good = {"prompt": "x", "completion": "y"} if "prompt" in row else _talk("x", "y")
            report, _, _ = importing([good, row], template)
            assert counts(report) == {"tokenizer": 1}
            (shown,) = report.checks["tokenizer"].examples
            assert shown["number"] == 2
            assert reason in shown["reason"]


def test_strict_reports_all_checks_with_counts_and_rows(importing):
    with pytest.raises(SpecError) as error:
        importing([*GOOD, *BAD.values(), *[BAD["too_long"]] * 7], on_problem="strict")
    message = str(error.value)
    for check in BAD:
        assert f"{check}: " in message
        assert CHECKS[check] in message
    assert "too_long: 8 rows" in message
    assert "and 3 more" in message
    assert ".jsonl:7 (" in message
    assert "data.on_problem=drop" in message


def test_too_many_dropped_rows_and_no_rows_end_the_import(importing):
    rows = [GOOD[0], BAD["empty"], BAD["empty"]]
    with pytest.raises(SpecError, match=r"data\.max_dropped: 0\.5: 2 of 3 rows fail a check"):
        importing(rows, max_dropped=0.5)
    assert importing(rows, max_dropped=0.7)[0].examples == 1
    with pytest.raises(SpecError, match="no row is left to train on"):
        importing([BAD["empty"]])


def test_near_duplicates_are_counted_dropped_or_ignored(importing):
    text = " ".join(WORDS[:25])
    rows = [{"prompt": text + end, "completion": "Yes."} for end in (".", "!")]
    report, trajectories, _ = importing(rows)
    assert (counts(report), report.similar.count, len(trajectories), report.dropped()) == ({}, 1, 2, 0)
    assert not any(name.startswith("dropped/") for name in report.metrics())
    report, trajectories, _ = importing(rows, near_duplicates="problem")
    assert (counts(report), len(trajectories), report.dropped()) == ({"near_duplicate": 1}, 1, 1)
    assert counts(importing(rows, near_duplicates="ignore")[0]) == {}


def test_a_held_out_share_keeps_equal_prompts_together(importing):
    rows = [{"prompt": f"q {n % 50}", "completion": f"a {n}"} for n in range(200)]
    report, trained, held = importing(rows, heldout=0.3)
    assert report.heldout == len(held)
    assert len(trained) + len(held) == 200
    assert 20 <= len(held) <= 100
    prompts = [{one.histories[0].messages[0].content for one in split} for split in (trained, held)]
    assert not prompts[0] & prompts[1]
    assert {one.scenario.split for one in held} == {"heldout"}


def test_rows_of_the_held_out_file_are_not_trained_on(importing, tmp_path):
    held = write(tmp_path / "test.jsonl", [GOOD[1], {**GOOD[3], "completion": "Another answer."}])
    report, trained, heldout = importing(GOOD, heldout_path=str(held))
    assert counts(report) == {"leaked": 2}
    assert [item["number"] for item in report.checks["leaked"].examples] == [2, 4]
    assert (len(trained), len(heldout), report.rows) == (4, 2, 8)


def test_an_empty_held_out_split_is_refused(importing, tmp_path):
    held = write(tmp_path / "test.jsonl", [BAD["empty"]])
    with pytest.raises(SpecError, match=r"data\.heldout_path: the held-out split is empty"):
        importing(GOOD, heldout_path=str(held))


def test_pairs_and_lists_are_scored_trajectories_of_one_scenario(importing):
    _, trajectories, _ = importing(FORMS["ranking"])
    assert [trajectory.reward for trajectory in trajectories[:3]] == [1.0, 0.5, 0.0]
    assert len({trajectory.group for trajectory in trajectories[:3]}) == 1
    assert len({trajectory.group for trajectory in trajectories}) == 4
    assert len({trajectory.id for trajectory in trajectories}) == 12


def test_tools_and_untrained_messages_are_stored(importing):
    _, (trajectory,), _ = importing([{"messages": openai(1), "tools": [WEATHER]}])
    assert trajectory.tools == [WEATHER]
    _, trajectories, _ = importing(FORMS["agenttraj"])
    trained = [message.trained for message in trajectories[0].histories[0].messages if message.role == "assistant"]
    assert trained == [False, True]
    assert scenario_of(trajectories[2].scenario.id) == "shop_2"
    assert {trajectory.scenario.type for trajectory in trajectories} == {"shop"}


def test_scored_conversations_with_an_id_and_a_prompt_in_common_are_one_scenario(importing):
    rows = [{"id": "q", "prompt": prompt, "completion": f"a {n}", "reward": n} for n in (0, 1) for prompt in "xyx"]
    report, trajectories, _ = importing(rows)
    groups = Counter((scenario_of(item.group), item.histories[0].messages[0].content) for item in trajectories)
    assert groups == {("q", "x"): 2, ("q", "y"): 2}  # two rows are duplicates
    assert len({item.group for item in trajectories}) == report.comparable == 2
    assert len({item.id for item in trajectories}) == 4
    assert importing(GOOD)[0].comparable == 0
    assert importing(FORMS["preference"])[0].comparable == 4


def test_scored_episodes_of_one_task_are_one_scenario_and_counted_by_environment(importing):
    rows = [
        {
            "task_id": f"{world}_{n}",
            "task_type": f"{world}/easy",
            "instruction": f"Do {n} in {world}.",
            "steps": [
                {"thought": "", "action": f"act {reward}", "action_input": "", "observation": "", "reward": None}
            ],
            "final_reward": reward,
            "metadata": {},
        }
        for world, rewards in [("webshop", (1.0, 0.2, 0.6)), ("maze", (0.0, 0.0))]
        for n in range(2)
        for reward in rewards
    ]
    report, trajectories, _ = importing(rows)
    groups: dict[str, list[float | None]] = {}
    for trajectory in trajectories:
        groups.setdefault(scenario_of(trajectory.group), []).append(trajectory.reward)
    assert groups == {
        "webshop_0": [1.0, 0.2, 0.6],
        "webshop_1": [1.0, 0.2, 0.6],
        "maze_0": [0.0],
        "maze_1": [0.0],  # the second of equal episodes is a duplicate
    }
    data = report.to_json()
    assert report.comparable == 2
    assert data["environments"] == {
        "webshop": {"trajectories": 6, "success": pytest.approx(4 / 6)},
        "maze": {"trajectories": 2, "success": 0.0},
    }
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert data["diversity"]["effective_types"] == pytest.approx(math.exp(entropy), abs=0.01)
    assert data["diversity"]["turns"] == {"min": 1, "median": 1, "p90": 1, "max": 1}


def test_thumbs_of_three_values_are_refused(importing, subtests):
    for values in [(1, 0, -1), ("up", "down", "neutral"), ("good", "bad", "👍")]:
        with subtests.test(values=values):
            rows = judged("is_good", *values)
            message = r"data\.columns: label: the column 'is_good' has more than two values"
            with pytest.raises(SpecError, match=message) as error:
                importing(rows, form="thumbs")
            assert "data.columns={reward: is_good}" in str(error.value)
            late = [{**judged("is_good", *values[:2])[0], "prompt": f"q {n}"} for n in range(60)]
            with pytest.raises(SpecError, match=message):  # behind the rows that the form is recognised from
                importing([*late, *rows], form="thumbs")
    assert importing(judged("is_good", True, "false"))[0].rejected == 3


def judged(column: str, *values: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p {n}", "response": f"r {n}", column: values[n % len(values)]} for n in range(6)]


def test_usual_names_of_labels_are_read_as_thumbs(importing, subtests):
    for column, values in [("is_good", (True, False)), ("rating", ("up", "down")), ("label", "yn")]:
        with subtests.test(column=column):
            report, trajectories, _ = importing(judged(column, *values))
            assert report.form == "thumbs"
            assert [item.reward for item in trajectories] == [1.0, 0.0] * 3
            talks = [{"messages": openai(n), "tools": [WEATHER], column: values[n % 2]} for n in range(2)]
            assert [item.reward for item in importing(talks)[1]] == [1.0, 0.0]


def test_a_column_that_may_be_a_label_ends_the_import_until_it_is_named(importing, subtests):
    for column, values in [
        ("usable", (True,)),
        ("verdict", ("ok", "nok")),
        ("flagged", (1, None)),
        ("rating", ("up", "so-so", "down")),
    ]:
        with subtests.test(column=column):
            rows = judged(column, *values)
            with pytest.raises(
                SpecError, match=rf"data\.columns: the form \w+ does not read the column '{column}'"
            ) as error:
                importing(rows)
            assert f"data.ignore=[{column}]" in str(error.value)
            assert ("data.columns={label: " in str(error.value)) == (column != "verdict")
            assert importing(rows, ignore=[column])[0].examples == 6
            report, trajectories, _ = importing(
                [{**row, "note": f"n {n}"} for n, row in enumerate(rows)], ignore=[column]
            )
            assert report.to_json()["unused"] == {"note": 6}
            assert column not in trajectories[0].scenario.input


def test_the_advice_for_suspected_columns_leaves_out_all_of_them(importing, subtests):
    """Names of columns are any text: the advice is parsed as a shell and Hydra would."""
    for name in ["my label", "a, b", "it's", "true", "1", "null", "C:\\", "a\\'b", "ok [y/n]: {x}"]:
        with subtests.test(name):
            rows = [{**row, "flagged": bool(n % 2)} for n, row in enumerate(judged(name, "ok", "nok"))]
            with pytest.raises(SpecError) as error:
                importing(rows)
            advice = {problem.message.partition(" them out: ")[2] for problem in error.value.problems}
            (words,) = map(shlex.split, advice)
            (parsed,) = map(OverridesParser.create().parse_override, words)
            ignored = parsed.value()
            assert set(map(str, ignored)) == {name, "flagged"}
            assert importing(rows, ignore=[str(column) for column in ignored])[0].examples == 6


def test_an_ignored_column_that_no_row_has_is_a_mistake(importing):
    with pytest.raises(SpecError, match=r"data\.ignore: 'nots': no row has this column.*Did you mean 'note'"):
        importing([{**GOOD[0], "note": "a"}], ignore=["nots"])


def test_steps_with_too_few_labels_are_no_ranking(importing):
    rows = [{"prompt": f"q {n}", "completions": ["a", "b"], "labels": [True]} for n in range(3)]
    with pytest.raises(SpecError, match=r"data\.path: malformed: 3 rows .*\.jsonl:1 \(1 labels for 2 steps\)"):
        importing(rows)


def test_a_row_without_its_labels_does_not_turn_the_others_into_a_ranking(importing):
    rows = [{"prompt": f"q {n}", "completions": ["a", f"{n}"], "labels": [True, False]} for n in range(12)]
    for labels in ("yes", None):
        report = importing([*rows, {**rows[0], "prompt": "other", "labels": labels}])[0]
        assert (report.form, report.examples, report.checks["malformed"].count) == ("step_labels", 12, 1)


def test_the_first_dropped_row_is_logged_with_its_place(importing, caplog):
    importing([*GOOD, BAD["malformed"], BAD["empty"]])
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("dropped 2 of 8 rows; the first is ")
    assert ".jsonl:7: invalid JSON" in line


def test_an_image_is_named_as_the_reason(tmp_path):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, picture]},
        {"role": "assistant", "content": "A"},
    ]
    path = write(tmp_path / "a.jsonl", [{"messages": talk}] * 2)
    with pytest.raises(SpecError, match=r"messages: message 0 contains image of type 'image_url'; expected text"):
        resolve_form(DataSpec(path=str(path)))


WRONG_VALUES = [
    ({"prompt": 1, "completion": "a"}, "prompt_completion: the prompt is a number; expected text or a list"),
    ({"prompt": "q", "chosen": 2, "rejected": 3}, "preference: the completion is a number; expected text or a list"),
    ({"messages": {"role": "user"}}, "messages: expected a list of messages, got an object"),
    ({"prompt": "q", "responses": True}, "ranking: column 'ranked': expected a list, got true or false"),
]


def test_values_of_a_wrong_type_are_reported_with_their_row_and_not_as_wrong_columns(tmp_path):
    for row, reason in WRONG_VALUES:
        path = write(tmp_path / "a.jsonl", [row] * 3)
        for form in ("auto", reason.partition(":")[0]):
            with pytest.raises(SpecError) as error:
                resolve_form(DataSpec(path=str(path), form=form))
            [problem] = error.value.problems
            assert problem.path == "data.path"
            assert f"none of the first 3 rows can be read. {path}:1: {reason}" in problem.message
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": None}])
    with pytest.raises(SpecError, match=r"no form fits the columns prompt, completion \(null\)"):
        resolve_form(DataSpec(path=str(path)))


def test_an_unknown_form_names_columns_and_forms(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "a", "lang": "en"}])
    with pytest.raises(SpecError) as error:
        resolve_form(DataSpec(path=str(path)))
    message = str(error.value)
    assert "data.form: auto: no form fits the columns text, lang" in message
    assert "prompt_completion (prompt, completion)" in message
    with pytest.raises(SpecError, match=r"data\.form: thumbs: does not fit the rows \(column 'label' is missing\)"):
        resolve_form(DataSpec(path=str(path), form="thumbs"))
    with pytest.raises(SpecError, match=r"columns\.promt: no such column .*Did you mean 'prompt'"):
        resolve_form(DataSpec(path=str(path), form="thumbs", columns={"promt": "text"}))
    with pytest.raises(SpecError, match=r"columns\.promt: no such column of any form; expected one of .*completion"):
        resolve_form(DataSpec(path=str(path), columns={"promt": "text"}))
    assert (
        resolve_form(DataSpec(path=str(path), columns={"prompt": "lang", "completion": "text"})) == "prompt_completion"
    )


def test_a_source_without_rows_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"no row can be read; the first is .*a\.jsonl:2: expected a JSON object"):
        resolve_form(DataSpec(path=str(write(tmp_path / "a.jsonl", ["", "[1]"]))))
    with pytest.raises(SpecError, match=r"data\.path: .*b\.jsonl is empty"):
        resolve_form(DataSpec(path=str(write(tmp_path / "b.jsonl", []))))


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(SpecError, match=r"heldout_path: set together with heldout"):
        validate(DataSpec, {"path": "a", "heldout": 0.1, "heldout_path": "b"})
    with pytest.raises(SpecError, match=r"split: null, but heldout_split is set"):
        validate(DataSpec, {"path": "a", "heldout_split": "test"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    rows=st.lists(
        st.fixed_dictionaries({"prompt": st.text(max_size=20), "completion": st.text(max_size=20)}), max_size=6
    )
)
def test_any_texts_are_trained_on_or_counted(rows, importing):
    report, trajectories, _ = importing([*rows, GOOD[0]])
    assert report.rows == len(rows) + 1
    assert report.examples == len(trajectories)
    assert sum(counts(report).values()) == report.dropped()


def test_fingerprints_are_those_of_a_dictionary(monkeypatch):
    monkeypatch.setattr(fingerprints, "MOST_LATEST", 7)
    table, known = Fingerprints(), {}
    draw = random.Random(0)
    for number in range(3000):
        key = draw.choice([draw.randrange(1, 2**64), draw.randrange(2**63, 2**63 + 1000), *([*known][-1:])])
        assert table.find(key) == known.get(key)
        assert table.add(key, number) == known.get(key)
        known.setdefault(key, number)
    assert len(table._sorted) < 12


@pytest.mark.parametrize("latest", [3, 2**16])
def test_forgotten_fingerprints_bound_the_memory(monkeypatch, latest):
    monkeypatch.setattr(fingerprints, "MOST_LATEST", latest)
    table = Fingerprints(most=10)
    for number in range(1, 100):
        assert table.add(fingerprint(str(number).encode()), number) is None
    assert table.find(fingerprint(b"1")) is None
    assert table.find(fingerprint(b"99")) == 99
    assert table.add(fingerprint(b"95"), 100) == 95
    assert sum(len(keys) for keys, _ in table._sorted) <= 16


def test_similar_texts_are_detected_and_different_ones_are_not():
    texts = [" ".join(WORDS[start : start + 100]) for start in range(0, 3000, 100)]
    search = SimilarTexts(slots=2**12)
    assert [search.add(text, number) for number, text in enumerate(texts, 1)] == [None] * 30
    changed = [text.replace(text.split()[50], "other", 1) for text in texts]
    similar = [search.add(text, 100 + number) for number, text in enumerate(changed, 1)]
    assert sum(known == number for number, known in enumerate(similar, 1)) >= 25


def test_the_count_of_written_rows_is_that_of_the_file(importing, tmp_path):
    report, _, _ = importing(FORMS["preference"] * 3)
    assert counts(report) == {"duplicate": 8}
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert count_trajectories(folder / "trajectories.parquet") == report.episodes == 8
