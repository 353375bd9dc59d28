"""Logs that published libraries wrote become the conversations that they recorded, and unusable ones are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from components.data.form_resolution import resolve_form
from components.data.forms import FORMS
from components.data.importing import DataImport
from components.data.logs.joining import form_rows
from components.data.rows import BrokenRow
from components.data.spec import DataSpec
from components.errors import ResourceError, SpecError
from tests.data.log_writers import WEATHER

FOLDER = Path(__file__).parent / "logs"
LIBRARIES = Path(os.environ.get("LOG_LIBRARIES", ".logs"))
CALL = ("assistant", "", '{"city": "Oslo"}')
SHOWN = [("system", "Be brief.", ""), ("user", "Weather in Oslo?", "")]
EPISODE = [*SHOWN, CALL, ("tool", "2 degrees", ""), ("assistant", "It has 2 degrees.", "")]
LOGS = {
    "openllmetry_console.json": "otel",
    "openllmetry_otlp.json": "otel",
    "openllmetry_0_40_console.json": "otel",
    "openinference_console.json": "otel",
    "openinference_otlp.json": "otel",
    "langfuse_console.json": "otel",
    "langfuse_observations.json": "langfuse",
    "langfuse_observations.csv": "langfuse",
    "langsmith_runs.jsonl": "langsmith",
    "mlflow_traces.json": "mlflow",
    "mlflow_traces.csv": "mlflow",
    "phoenix_spans.jsonl": "otel",
    "openai_stored_*.json": "openai_stored",
    "openai_batch_*.jsonl": "openai_batch",
}
"""Form by files."""


def conversations(path: Path | str, form: str = "auto", **options):
    """Return form, examples, and reasons of the conversations that cannot be used."""
    spec = DataSpec(path=str(path), form=form, **options)
    name = resolve_form(spec)
    broken: list[BrokenRow] = []
    examples = [FORMS[name].example(row.values, spec.mapped) for row in form_rows(FORMS[name], spec, broken.append)]
    return name, examples, [f"{Path(row.source).name}:{row.number}: {row.reason}" for row in broken]


def turns(example, candidate: int = 0):
    """Return role, text and arguments of each message."""
    return [
        (message.role, message.content, "".join(call.arguments for call in message.tool_calls))
        for message in example.candidates[candidate].messages
    ]


def trained(example) -> list[str]:
    return [
        message.content for message in example.candidates[0].messages if message.role == "assistant" and message.trained
    ]


def written(folder: Path, *lines, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def observation(trace: str, number: int, prompt, answer, **more):
    """Return an observation of Langfuse. A text of the prompt is the user's, one in a list the model's."""
    messages = [
        {"role": "assistant", "content": item[0]}
        if isinstance(item, list)
        else item
        if isinstance(item, dict)
        else {"role": "user", "content": item}
        for item in prompt
    ]
    output = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    head = {"id": f"o{number}", "traceId": trace, "type": "GENERATION", "startTime": f"2026-01-01T00:00:{number:02}Z"}
    return {**head, "input": messages, "output": output, **more}


def check_log(folder: Path, files: str, form: str) -> None:
    name, examples, broken = conversations(folder / files)
    assert (name, broken) == (form, [])
    assert turns(examples[-1]) == EPISODE
    assert examples[-1].tools == [WEATHER]
    assert set(examples[-1].missing) == {"token_ids"}
    assert "ChatCompletion" not in json.dumps(examples[-1].input)
    whole = not form.startswith("openai")  # each of OpenAI's rows is one call
    assert trained(examples[-1]) == (["", "It has 2 degrees."] if whole else ["It has 2 degrees."])
    assert [turns(example) for example in examples[:-1]] == ([[*SHOWN, CALL]] if form == "openai_batch" else [])


def test_the_log_of_each_library_is_the_conversation_that_it_recorded(subtests):
    for files, form in LOGS.items():
        with subtests.test(files=files):
            check_log(FOLDER, files, form)
    assert {path.name for path in FOLDER.iterdir()} == {path.name for files in LOGS for path in FOLDER.glob(files)}


@pytest.mark.parametrize(
    "library", ["openai", "mlflow", "openllmetry", "openllmetry_0_40", "openinference", "langfuse", "langsmith"]
)
def test_each_library_writes_such_a_log(library, tmp_path):
    packages = LIBRARIES / ("old" if library == "openllmetry_0_40" else "new")
    if library != "openai" and not packages.is_dir():
        pytest.skip(f"{packages} is not there: make test-logs installs the libraries that write logs")
    environ = {**os.environ, "PYTHONPATH": "" if library in ("openai", "mlflow") else str(packages.absolute())}
    command = [sys.executable, "-P", str(FOLDER.parent / "log_writers.py"), library, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names = [files for files in LOGS if files.startswith(f"{library}_") and any(tmp_path.glob(files))]
    assert names
    for files in names:
        check_log(tmp_path, files, LOGS[files])


def test_calls_of_a_trace_are_joined_and_each_answer_is_trained_on_once(tmp_path, subtests):
    reasoned = {"role": "assistant", "content": "a", "reasoning_content": "think"}
    cases = {
        "growing": ([(["q"], "a"), (["q", ["a"], "r"], "b")], [["a", "b"]]),
        "logged in another order": ([(["q", ["a"], "r"], "b", 9), (["q"], "a", 1)], [["a", "b"]]),
        "logged twice": ([(["q"], "a"), (["q"], "a")], [["a"]]),
        "two branches": ([(["q"], "a"), (["q", ["a"], "r"], "b"), (["q", ["a"], "s"], "c")], [["a", "b"], ["c"]]),
        "a sub-agent": ([(["q"], "a"), (["other"], "x"), (["q", ["a"], "r"], "b")], [["x"], ["a", "b"]]),
        "a compacted context": ([(["q"], "a"), (["summary", "r"], "b")], [["a"], ["b"]]),
        "an example in the prompt": ([(["q", ["shot"], "r"], "b")], [["b"]]),
        "an answer that was edited": ([(["q"], "a"), (["q", ["A"], "r"], "b")], [["a"], ["b"]]),
        "reasoning": ([(["q"], reasoned), (["q", ["a"], "r"], "b")], [["a", "b"]]),
        "two answers": ([(["q"], {"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]})],) * 1
        + ([["a"], ["b"]],),
    }
    for name, (calls, expected) in cases.items():
        with subtests.test(name):
            rows = [
                observation("t", call[2] if len(call) > 2 else number, *call[:2]) for number, call in enumerate(calls)
            ]
            _, examples, broken = conversations(written(tmp_path, *rows))
            assert broken == []
            assert [trained(example) for example in examples] == expected
            if name == "reasoning":
                assert [message.reasoning for message in examples[0].candidates[0].messages][1] == "think"


def test_a_log_that_cannot_be_used_says_why_by_row(tmp_path, subtests):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    off = {
        "name": "openai.chat",
        "context": {"trace_id": "0x1", "span_id": "0x2"},
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
    }
    blob = [{"role": "user", "parts": [{"type": "blob", "modality": "image", "content": "x"}]}]
    seen = {**off, "attributes": {**off["attributes"], "gen_ai.input.messages": json.dumps(blob)}}
    failed = {**off, "status": {"status_code": "ERROR", "description": "429"}}
    failed["attributes"] = {**off["attributes"], "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "q"}
    request = {
        "custom_id": "r1",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "q"}]},
    }
    expired = {"custom_id": "r1", "response": None, "error": {"code": "batch_expired", "message": "too late"}}
    embedded = {"custom_id": "r1", "url": "/v1/embeddings", "body": {"input": "q"}}
    stored = {"object": "chat.completion", "id": "chatcmpl-1", "choices": [{"message": {"content": "a"}}]}
    good = observation("t", 1, ["q"], "a")
    cases = {
        "content off": ([off], "log.jsonl:1: span 0x2 (openai.chat) has no messages. Switch the capture of content on"),
        "an image": ([observation("t", 1, [image], "a")], "log.jsonl:1: message 0 contains image of type 'image_url'"),
        "an image of parts": ([seen], "log.jsonl:1: span 0x2 (openai.chat) has no answer"),
        "a failed call": ([failed], "log.jsonl:1: the call failed: 429"),
        "half a trace": (
            [good, observation("t", 2, ["q", ["a"], image], "b")],
            "log.jsonl:2: message 2 contains image",
        ),
        "another form": ([good, observation("u", 1, ["q"], "a"), {"x": 1}], "log.jsonl:3: no row of the form langfuse"),
        "a tool of another shape": (
            [{**good, "startTime": ["x"], "input": {"messages": good["input"], "tools": [{"function": 5}]}}],
            "log.jsonl:1: tools: expected objects with the name",
        ),
        "a trace without its observations": (
            [{"id": "t", "timestamp": "", "release": "", "public": False, "input": "q", "output": "a"}],
            "log.jsonl:1: trace t has no observations, which have the calls. Export the table of observations",
        ),
        "a trace without its spans": (
            [{"info": {"trace_id": "t"}, "data": {"spans": []}}],
            "log.jsonl:1: trace t has no spans. Search with include_spans=True",
        ),
        "an empty cell": ([{**good, "input": ""}], "log.jsonl:1: observation o1 has no messages. Export"),
        "no input": ([observation("t", 1, [], "a")], "log.jsonl:1: observation o1 has no messages. Export"),
        "a request alone": ([request], "log.jsonl:1: r1: the answer is missing. Add the batch's output file"),
        "a response alone": ([expired], "log.jsonl:1: r1: the input is missing. Add the batch's input file"),
        "an expired request": ([request, expired], "log.jsonl:2: the call failed: too late"),
        "an id twice": ([request, request, expired], "log.jsonl:3: r1: the id is there twice"),
        "an embedding": ([embedded], "log.jsonl:1: r1: a request to '/v1/embeddings'; expected /v1/chat/completions"),
        "a completion alone": ([stored], "log.jsonl:1: chatcmpl-1: the input is missing."),
    }
    for name, (lines, reason) in cases.items():
        with subtests.test(name):
            _, _, (broken,) = conversations(written(tmp_path, *lines))
            assert broken.startswith(reason)


def test_a_file_that_ends_early_or_has_another_shape_imports_nothing(tmp_path, subtests):
    whole = (FOLDER / "openllmetry_console.json").read_text()
    lines = (FOLDER / "langsmith_runs.jsonl").read_text()
    shapes = [{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": 5}]}]}]}] * 2
    rows = "".join(f"{json.dumps(row)}\n" for row in shapes)
    cases = {
        "console.json": (whole[:-900], "otel", "invalid JSON"),
        "runs.jsonl": (lines[:-30], "langsmith", "runs.jsonl:3: invalid JSON"),
        "rows.jsonl": (rows, "otel", "rows.jsonl:1: the row is not in the shape of the form otel"),
    }
    for name, (content, form, reason) in cases.items():
        with subtests.test(name):
            (tmp_path / name).write_text(content)
            spec = DataSpec(path=str(tmp_path / name), form=form)
            with pytest.raises(ResourceError, match=reason):
                list(form_rows(FORMS[form], spec, lambda broken: None))


@pytest.mark.parametrize(
    ("files", "columns", "form", "column"),
    [
        ("phoenix_spans.jsonl", None, "otel", "input_messages"),
        ("langsmith_runs.jsonl", ["id", "run_type", "inputs", "outputs"], "langsmith", "inputs"),
    ],
)
def test_a_table_with_the_text_of_python_in_its_cells_is_refused_with_what_to_export(
    tmp_path, files, columns, form, column
):
    table = pandas.DataFrame(json.loads(line) for line in (FOLDER / files).read_text().splitlines())
    table.to_csv(tmp_path / "a.csv", columns=columns, index=False)
    with pytest.raises(ResourceError, match=rf"a.csv:2: .* {form}: {column}: expected .* DataFrame.to_json"):
        conversations(tmp_path / "a.csv")


def test_a_column_of_lists_of_numbers_is_a_score_in_the_export_of_langfuse():
    _, (example,), _ = conversations(FOLDER / "langfuse_observations.csv", columns={"reward": "quality"})
    assert example.candidates[0].reward == 0.5


def test_categories_of_langfuse_are_numbers_where_a_configuration_maps_them_and_else_reported_by_row(tmp_path):
    def category(number: int, **values: object) -> dict:
        return {"traceId": f"t{number}", "name": "verdict", "dataType": "CATEGORICAL", "stringValue": "good", **values}

    rows = [observation(f"t{number}", 1, [f"q{number}"], f"a{number}") for number in range(4)]
    rows += [category(0, value=1, configId="c"), category(1, value=0, configId=None), category(2)]
    rows[3]["verdict"] = ["bad", "bad"]  # of a table
    rows[3]["tags"] = ["beta"]
    path = str(written(tmp_path, *rows))
    spec = DataSpec(path=path, form="langfuse", columns={"reward": "verdict"}, max_dropped=1)
    (tmp_path / "a").mkdir()
    report = DataImport(spec, tokens=None).write(tmp_path / "a")
    assert (report.examples, report.unused) == (1, {})
    refused = [row["reason"] for row in report.checks["malformed"].examples]
    assert refused == ["column 'verdict': expected a finite number, got text; data.ignore leaves the column out"] * 3


def test_an_import_reports_what_a_log_lacks_and_reads_scores(tmp_path):
    tool = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    rows = [observation(f"t{number}", 1, [f"q{number}"], f"a{number}") for number in range(8)]
    rows += [{"traceId": f"t{number}", "name": "helpful", "value": number % 2} for number in range(8)]
    rows += [observation("t0", 2, ["q0", ["a0"], "r"], None, level="ERROR", statusMessage="timeout")]
    rows += [observation("t9", 1, ["q9"], tool)]
    spec = DataSpec(path=str(written(tmp_path, *rows)), form="langfuse", max_dropped=0.2)
    (tmp_path / "a").mkdir()
    with pytest.raises(SpecError, match="does not read the column 'helpful'"):
        DataImport(spec, tokens=None).write(tmp_path / "a")
    (tmp_path / "b").mkdir()
    spec = spec.model_copy(update={"columns": {"reward": "helpful"}, "max_dropped": 0.2})
    report = DataImport(spec, tokens=None).write(tmp_path / "b")
    assert (report.rows, report.examples, report.rejected) == (9, 8, 4)
    assert {name: result.count for name, result in report.missing.items()} == {"token_ids": 8, "errors": 1}
    assert "timeout" in report.to_json()["missing"]["errors"]["examples"][0]["reason"]
    (example,) = report.checks["unknown_tool"].examples
    assert example["reason"].startswith("message 1 calls f, but the log has no tools")


def test_limit_counts_conversations_not_their_rows(tmp_path):
    rows = [observation(trace, 1, ["q"], "a") for trace in "xyz"] + [observation("x", 2, ["q", ["a"], "r"], "b")]
    _, examples, _ = conversations(written(tmp_path, *rows), limit=2)
    assert [(example.name, trained(example)) for example in examples] == [("x", ["a", "b"]), ("y", ["a"])]
