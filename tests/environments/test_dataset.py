"""Dataset: columns as inputs, splits by content, keys by content, and rows that cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.environments.dataset.environment import Dataset
from components.environments.tools import call
from components.errors import ResourceError, SpecError
from components.specs import Target, validate
from tests.environments import checks

CAPITALS = [("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Peru", "Lima"), ("Cuba", "Havana")]
SUMS = [
    {"question": f"{n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n:,}", "level": f"Level {1 + n % 3}"}
    for n in range(480, 520)
]
GSM8K = os.environ.get("ESPALIER_GSM8K", "")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path) -> dict[str, Any]:
    """Arguments of an environment of sums, half of them held out."""
    return {
        "path": write(tmp_path / "train.jsonl", SUMS[:20]),
        "heldout_path": write(tmp_path / "test.jsonl", SUMS[20:]),
        "prompt": "question",
        "answer": "answer",
        "answer_after": "####",
        "demonstration": "answer",
        "cache": str(tmp_path / "cache"),
    }


def single(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Dataset:
    """Return an environment with the rows, and one other held-out row with the same columns."""
    first = {name: [{"role": "user", "content": "?"}] if name == "prompt" else value for name, value in rows[0].items()}
    options = {"heldout_path": write(tmp_path / "heldout.jsonl", [first]), **options}
    return Dataset(path=write(tmp_path / "train.jsonl", rows), cache=str(tmp_path / "cache"), **options)


def success(dataset: Dataset, text: str) -> bool | None:
    dataset.reset(dataset.scenarios("train")[0])
    return dataset.step({"role": "assistant", "content": text}).info.get("success")


def problem(**options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        Dataset(**options)
    return str(caught.value)


def test_it_keeps_what_every_environment_keeps(sums):
    checks.check(lambda: Dataset(**sums))


def test_a_row_is_a_scenario(sums):
    dataset = Dataset(**sums, difficulty="level", type="level", system="Add.")
    assert [len(dataset.scenarios(split)) for split in (*checks.SPLITS, "other")] == [20, 20, 0]
    scenario = dataset.scenarios("train")[3]
    assert scenario.input == {
        "prompt": "483 + 483?",
        "answer": "966",
        "demonstration": "483 + 483 = 966\n#### 966",
        "level": "Level 1",
    }
    assert (scenario.type, scenario.difficulty) == ("Level 1", 1)
    assert dataset.reset(scenario) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "483 + 483?"},
    ]
    assert dataset.tools() == []
    assert dataset.scenarios("train")[-1] == list(dataset.scenarios("train"))[-1] == dataset.scenarios("train")[19]
    assert dataset.scenarios("heldout")[:2] == list(dataset.scenarios("heldout"))[:2]


def test_the_solver_plays_the_demonstrations(sums):
    dataset = Dataset(**sums)
    for split in checks.SPLITS:
        assert all(checks.solved(dataset, scenario) for scenario in dataset.scenarios(split))
    del sums["demonstration"]
    dataset = Dataset(**sums)
    with pytest.raises(SpecError, match=r"environment.demonstration: null.*warmup=none"):
        dataset.check_solutions(dataset.scenarios("train")[:2])


def test_every_format_gives_the_same_scenarios(tmp_path, sums, subtests):
    import pyarrow as pa
    from pyarrow import csv, parquet

    table, expected = pa.Table.from_pylist(SUMS[:20]), Dataset(**sums)
    for suffix, write_table in {
        ".json": lambda table, path: path.write_text(json.dumps(table.to_pylist())),
        ".parquet": parquet.write_table,
        ".csv": csv.write_csv,
    }.items():
        with subtests.test(suffix=suffix):
            path = tmp_path / f"train{suffix}"
            write_table(table, path)
            dataset = Dataset(**sums | {"path": str(path)})
            assert list(dataset.scenarios("train")) == list(expected.scenarios("train"))
            assert Dataset.key_arguments(sums) == Dataset.key_arguments(sums | {"path": str(path)})


def test_a_folder_holds_both_splits(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train-00000.jsonl", SUMS[:10])
    write(folder / "train-00001.jsonl", SUMS[10:20])
    write(folder / "test.jsonl", SUMS[20:])
    dataset = Dataset(
        path=str(folder), split="train", heldout_split="test", prompt="question", cache=str(tmp_path / "cache")
    )
    assert [len(dataset.scenarios(split)) for split in checks.SPLITS] == [20, 20]
    assert "success" not in dataset.step(dataset.reset(dataset.scenarios("train")[0])[0]).info


# Splits


def split_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, str]:
    dataset = Dataset(path=write(tmp_path / "rows.jsonl", rows), cache=str(tmp_path / "cache"), **options)
    return {scenario.input["prompt"]: split for split in checks.SPLITS for scenario in dataset.scenarios(split)}


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 10_000), min_size=30, max_size=60, unique=True),
    moved=st.randoms(use_true_random=False),
    more=st.integers(10_001, 20_000),
)
def test_the_split_of_a_row_does_not_depend_on_the_others(tmp_path_factory, numbers, moved, more):
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": f"{number}?", "answer": number} for number in [*range(10_001, 10_041), *numbers]]
    before = split_of(folder, rows[:-1], heldout_share=0.3)
    moved.shuffle(rows)
    after = split_of(folder, [*rows, {"prompt": f"{more}!", "answer": 0}], heldout_share=0.3)
    assert before.items() <= after.items()
    assert len(after) == len(rows) + 1


def test_a_share_is_held_out(tmp_path):
    rows = [{"prompt": f"{number}?"} for number in range(2000)]
    shares = [Counter(split_of(tmp_path, rows, **options).values())["heldout"] / 2000 for options in (
        {}, {"heldout_share": 0.4}
    )]  # fmt: skip
    assert shares == pytest.approx([0.1, 0.4], abs=0.03)


def test_a_share_that_holds_out_nothing_is_refused(tmp_path):
    rows = [{"prompt": f"{number}?"} for number in range(3)]
    path = write(tmp_path / "rows.jsonl", rows)
    text = problem(path=path, heldout_share=0.01, cache=str(tmp_path))
    assert "environment.heldout_share: 0.01: split 'heldout' has none of 3 rows; set a larger share" in text
    assert "split 'train' has none" in problem(path=path, heldout_share=0.9999, cache=str(tmp_path))


# Keys


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    data = {"_target_": "components.environments.dataset.environment.Dataset", **options}
    return validate(Target, data, allow=[]).resolved()


def test_keys_depend_on_content_and_not_on_paths(tmp_path, sums):
    key = resolved(sums)
    assert key["_target_"] == "environment.dataset"
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(Path(sums["path"]).read_bytes())
    assert resolved(sums | {"path": str(moved), "cache": str(tmp_path / "other")}) == key
    assert resolved(sums | {"system": "Add."}) != key
    assert resolved(sums | {"success": "text"}) != key
    assert resolved(sums | {"fields": []}) != key
    write(Path(sums["path"]), [*SUMS[:19], {**SUMS[19], "level": "Level 9"}])
    changed = resolved(sums)
    assert changed["scenarios"] != key["scenarios"]
    assert changed | {"scenarios": ""} == key | {"scenarios": ""}


def test_an_edited_file_is_read_again(sums):
    ids = {scenario.id for scenario in Dataset(**sums).scenarios("train")}
    write(Path(sums["path"]), [*SUMS[:19], {**SUMS[19], "answer": "#### 1"}])
    others = {scenario.id for scenario in Dataset(**sums).scenarios("train")}
    assert len(ids & others) == 19
    assert len(ids | others) == 21


def test_the_stored_scenarios_are_reused(sums, monkeypatch):
    from components.environments.dataset import store

    expected = list(Dataset(**sums).scenarios("train"))
    store._stored.cache_clear()  # as in another process
    monkeypatch.setattr(store, "_write", None)
    assert list(Dataset(**sums).scenarios("train")) == expected
    assert [path.name for path in Path(sums["cache"]).iterdir() if path.name.startswith(".")] == []


def test_memory_does_not_grow_with_the_texts(tmp_path):
    """Storing, listing and choosing scenarios allocates a fraction of the size of the file."""
    from components.rollout.collector import choose_scenarios

    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"prompt": f"{number} {'word ' * 400}"}) + "\n" for number in range(20_000))
    tracemalloc.start()
    try:
        dataset = Dataset(path=str(path), heldout_share=0.5, cache=str(tmp_path / "cache"))
        assert sum(1 for split in checks.SPLITS for _ in dataset.scenarios(split)) == 20_000
        assert len(choose_scenarios(dataset.scenarios("train"), 16, 3, 0)) == 16
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 3
    finally:
        tracemalloc.stop()


# Prompts


def test_a_prompt_may_be_messages(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ask = {"role": "user", "content": "Capital of Peru?"}
    own = {"role": "system", "content": "Own."}
    dataset = single(tmp_path, [{"prompt": [*talk, ask]}, {"prompt": [own, ask]}], system="Default.")
    first, second = dataset.scenarios("train")
    assert dataset.reset(first) == [{"role": "system", "content": "Default."}, *talk, ask]
    assert dataset.reset(second) == [own, ask]


def test_a_template_names_columns(tmp_path):
    rows = [{"country": country, "hints": [1], "capital": capital} for country, capital in CAPITALS]
    options = {"template": "{{The}} capital of {country}? {hints} {}", "answer": "capital", "heldout_share": 0.5}
    dataset = single(tmp_path, rows, heldout_path=None, **options)
    prompts = {scenario.input["prompt"] for split in checks.SPLITS for scenario in dataset.scenarios(split)}
    assert "{The} capital of Peru? [1] {}" in prompts
    assert dataset.scenarios("train")[0].input.keys() == {"prompt", "answer", "country", "hints"}


def test_a_template_does_not_show_the_answer(sums):
    del sums["prompt"]
    text = problem(**sums, template="{question} {answer}")
    assert "environment.template: shows the column 'answer', which environment.answer hides" in text


# Success


def test_success(tmp_path, subtests):
    for answer, mode, right, wrong in [
        ("1,234", "auto", ["1234", "It is $1,234.", "3 + 4\n#### 1234.0", "\\boxed{1234}"], ["", "1234 or 5", "12345"]),
        (0.5, "auto", ["0.5", "The answer: .5"], ["5", "half"]),
        ("Paris", "auto", ["Paris", "paris.", "Let me think.\nThe answer is **Paris**.", "\\boxed{Paris}"],
         ["", "Rome", "Paris, I think", "Paris\nRome"]),
        (["yes", "true"], "auto", ["Yes.", "TRUE"], ["no", "yes and no"]),
        (True, "auto", ["true"], ["1", "false"]),
        ("12 apples", "number", ["12", "so 12 pears"], ["apples", "13"]),
        ("12", "text", ["12", "Answer: 12"], ["012", "the 12"]),
        ({"a": 1}, "auto", ['{"a": 1}'], ["1"]),
    ]:  # fmt: skip
        with subtests.test(answer=answer):
            dataset = single(tmp_path, [{"prompt": "?", "truth": answer}], answer="truth", success=mode)
            assert [text for text in right if not success(dataset, text)] == []
            assert [text for text in wrong if success(dataset, text)] == []


def test_the_answer_follows_its_marker(tmp_path):
    options = {"answer": "truth", "answer_after": "=>"}
    dataset = single(tmp_path, [{"prompt": "?", "truth": "a => b => Lima"}], **options)
    assert dataset.scenarios("train")[0].input["answer"] == "Lima"
    assert success(dataset, "I think so. => Lima ")
    assert not success(dataset, "Lima => Rome")


def test_without_an_answer_only_the_reward_scores(tmp_path):
    rows = [{"prompt": "?", "tests": ["assert add(1, 2) == 3"], "answer": 3}]
    assert success(single(tmp_path, rows), "3") is None
    assert success(single(tmp_path, rows, answer="answer", success=None), "3") is None
    assert single(tmp_path, rows).scenarios("train")[0].input == rows[0]
    only = single(tmp_path, rows, fields=["tests"]).scenarios("train")[0].input
    assert only == {"prompt": "?", "tests": rows[0]["tests"]}


# Tools


def test_tools(tmp_path):
    dataset = single(tmp_path, [{"prompt": "12 * 13?", "truth": 156}], answer="truth", tools=["calculate"])
    assert [schema["function"]["name"] for schema in dataset.tools()] == ["calculate"]
    dataset.reset(dataset.scenarios("train")[0])
    step = dataset.step(call("calculate", {"expression": "12 * 13"}))
    assert (step.observation[0]["content"], step.done) == ("156", False)
    step = dataset.step(call("python", {"code": "1"}))
    assert step.observation[0]["content"] == "error: no tool python; there are calculate"
    step = dataset.step({"role": "assistant", "content": "156"})
    assert step.done
    assert step.info == {"invalid_actions": 1, "success": True}


def test_python_runs_in_the_sandbox(tmp_path, sandbox_here):
    dataset = single(tmp_path, [{"prompt": "?"}], tools=["python"])
    dataset.reset(dataset.scenarios("train")[0])
    for code, text in (("x = 41", ""), ("x + 1", "42")):
        assert text in asyncio.run(dataset.step(call("python", {"code": code}))).observation[0]["content"]


# Rows that cannot be used


def test_a_row_that_cannot_be_used_is_named(tmp_path, subtests):
    path = tmp_path / "train.jsonl"
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": "held", "n": "#### 3"}])
    for line, options, text in [
        ('{"prompt": ', {}, "environment.path: 1 row cannot be used: {path}:3: invalid JSON"),
        ("[1]", {}, "environment.path: 1 row cannot be used: {path}:3: expected a JSON object"),
        ('{"promt": "?"}', {}, "environment.prompt: 1 row cannot be used: {path}:3: no column 'prompt'; the columns "
         "are promt. Did you mean 'promt'?"),
        ('{"prompt": ""}', {}, "environment.prompt: 1 row cannot be used: {path}:3: the prompt is ''"),
        ('{"prompt": 3}', {}, "the prompt is 3; expected text, or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', {}, "expected a role of system, user, assistant and text"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', {}, "the last message of the prompt is not the user's"),
        ('{"prompt": "?", "n": null}', {"answer": "n"}, "environment.answer: 1 row cannot be used: {path}:3: the "
         "answer is None, so no episode could be right"),
        ('{"prompt": "?", "n": "7"}', {"answer": "n", "answer_after": "####"}, "environment.answer_after: 3 rows"),
        ('{"prompt": "?", "n": "x"}', {"answer": "n", "success": "number"}, "{path}:3: the answer 'x' has no number"),
        ('{"prompt": "?", "n": "x"}', {"difficulty": "n"}, "environment.difficulty: 1 row cannot be used: {path}:3: "
         "the difficulty is 'x'"),
        ('{"prompt": "?", "n": ["x"]}', {"type": "n"}, "environment.type: 1 row"),
        ('{"prompt": "?", "n": {}}', {"demonstration": "n"}, "environment.demonstration: 3 rows"),
        ('{"prompt": "2?", "n": 1}', {}, "environment.duplicates: 1 row with the prompt of an earlier row, the first "
         "is {path}:3. Remove these rows, or set environment.duplicates=drop"),
        ('{"prompt": "held", "n": 1}', {}, "environment.duplicates: 1 row with the prompt of a held-out row, the first "
         "is {path}:3."),
    ]:  # fmt: skip
        with subtests.test(line=line, options=options):
            path.write_text(f'{{"prompt": "1?", "n": 1}}\n{{"prompt": "2?", "n": 2}}\n{line}\n')
            stated = problem(path=str(path), heldout_path=heldout, cache=str(tmp_path / "cache"), **options)
            assert text.replace("{path}", str(path)) in stated


def test_all_problems_are_reported_with_counts(tmp_path):
    rows = [{"prompt": "" if number % 2 else f"{number}?", "n": None} for number in range(10)]
    text = problem(path=write(tmp_path / "rows.jsonl", [*rows, {"x": 1}]), answer="n", cache=str(tmp_path))
    assert "2 problems in the configuration" in text
    assert "environment.prompt: 6 rows cannot be used" in text
    assert "rows.jsonl:2: the prompt is ''" in text
    assert "rows.jsonl:11: no column 'prompt'; the columns are x; and 4 rows more" in text
    assert "environment.answer: 5 rows cannot be used" in text


def test_duplicates_are_dropped_on_request(tmp_path, caplog):
    heldout = write(tmp_path / "heldout.jsonl", [{"prompt": "a", "n": 0}])
    path = write(tmp_path / "train.jsonl", [{"prompt": prompt, "n": n} for n, prompt in enumerate("abcbac")])
    dataset = Dataset(path=path, heldout_path=heldout, duplicates="drop", cache=str(tmp_path / "cache"))
    assert [scenario.input["n"] for scenario in dataset.scenarios("train")] == [1, 2]
    assert "2 rows with the prompt of a held-out row" in caplog.text
    assert "2 rows with the prompt of an earlier row" in caplog.text


def test_contradictory_options_are_refused(sums, subtests):
    for options, text in [
        ({"path": None}, "environment.path: set path (files) or dataset"),
        ({"dataset": "a/b"}, "environment.path: set path (files) or dataset"),
        ({"revision": "main"}, "environment.revision: set without dataset"),
        ({"heldout_share": 0.5}, "environment.heldout_share: is set together with heldout_path"),
        ({"heldout_split": "test"}, "environment.heldout_split: is set together with heldout_path"),
        ({"template": "{question}"}, "environment.prompt: set prompt (a column) or template"),
        ({"answer": None}, "environment.answer_after: is set without answer"),
        ({"prompt": "answer"}, "environment.prompt: shows the column 'answer'"),
    ]:
        with subtests.test(options=options):
            assert text in problem(**sums | options)


def test_missing_and_empty_files_are_refused(tmp_path, sums):
    with pytest.raises(ResourceError, match=r"environment.path: there is no file .*nothing.jsonl"):
        Dataset(**sums | {"path": str(tmp_path / "nothing.jsonl")})
    empty = write(tmp_path / "empty.jsonl", [])
    assert "environment.heldout_path: there are no rows for split 'heldout'" in problem(
        **sums | {"heldout_path": empty}
    )
    assert "environment.path: there are no rows for split 'train'" in problem(**sums | {"path": empty})


@pytest.mark.skipif(not GSM8K, reason="ESPALIER_GSM8K names no folder with train.jsonl and test.jsonl of GSM8K")
def test_gsm8k(tmp_path):
    dataset = Dataset(
        path=f"{GSM8K}/train.jsonl",
        heldout_path=f"{GSM8K}/test.jsonl",
        prompt="question",
        answer="answer",
        answer_after="####",
        demonstration="answer",
        cache=str(tmp_path),
    )
    assert [len(dataset.scenarios(split)) for split in checks.SPLITS] == [7473, 1319]
    assert all(checks.solved(dataset, scenario) for scenario in dataset.scenarios("heldout"))
