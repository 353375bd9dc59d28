"""`flows.data`: a file as a run would import it and train on it."""

from __future__ import annotations

import json

import pytest

from flows.data import main
from tests.data.rows import FORMS

TURN = "<|im_start|>{}\n{}<|im_end|>\n"


@pytest.fixture
def inspect(tmp_path, capsys):
    """Inspect rows: returns the exit code and the output."""

    def run(rows: list[dict], *arguments: str) -> tuple[int, str]:
        path = tmp_path / "my rows, it's a.json"
        path.write_text(json.dumps(rows))
        code = main([str(path), "model=tiny", "environment=shop", f"root={tmp_path}/root", *arguments])
        return code, capsys.readouterr().out

    return run


def test_rows_are_shown_with_the_tokens_and_the_mask_of_the_training(inspect):
    code, out = inspect(FORMS["preference"], "--json", "--rows", "1")
    data = json.loads(out)
    (row,) = data["rows_shown"]
    prompt = TURN.format("user", "Say 0.") + "<|im_start|>assistant\n"
    assert "".join(text for text, _ in row["rl"]["tokens"]) == prompt
    for sft, answer, reward in zip(row["sft"], ("0, please.", "I refuse."), (1.0, 0.0), strict=True):
        (tokens,) = sft["tokens"]
        assert "".join(text for text, _ in tokens) == f"{prompt}{answer}<|im_end|>"
        assert "".join(text for text, trained in tokens if trained) == f"{answer}<|im_end|>"
        assert sft["reward"] == reward
    assert (code, data["form"], data["rows"], data["comparable"]) == (0, "preference", 4, 4)
    assert data["columns"] == {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    assert data["algorithms"] == ["dpo", "ipo", "kto", "orpo", "sft with filter=successful"]
    assert (
        data["diversity"]["tokens"]["max"]
        == len((prompt + "0, please.").replace("<|im_start|>", "<").replace("<|im_end|>", "<")) + 1
    )


def test_the_mask_is_in_marks_without_a_terminal_and_in_colours_on_one(inspect, monkeypatch):
    steps = [*FORMS["steps"], {**FORMS["steps"][0], "task_id": "task_9", "final_reward": 7}]
    code, out = inspect(steps, "--rows", "1")
    assert code == 2
    assert "form steps: 4 of 5 rows to train on" in out
    assert "the rewards of the steps add up to 1, but final_reward is 7" in out
    assert "a run is refused: data.max_dropped: 0.1: 1 of 5 rows fail a check" in out
    assert out.replace("|", "").count('[[Thought: I search first.↵\nAction: search {"query": "item 0"}<im_end>]]') == 1
    assert "\x1b" not in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = inspect(FORMS["steps"], "--rows", "1")[1]
    assert "\x1b[1;32m" in coloured
    assert "[[" not in coloured


def test_an_algorithm_that_cannot_learn_from_the_data_is_refused_and_those_that_can_are_named(inspect):
    thumbs, pairs = FORMS["thumbs"], [{**row, "score_chosen": 1, "score_rejected": 0} for row in FORMS["preference"]]
    able = "algorithms: kto, sft with filter=successful"
    cases = [
        (thumbs, [], 0, able),
        (thumbs, ["algorithm=kto"], 0, able),
        ([{**row, "label": "accepted"} for row in thumbs], ["algorithm=kto"], 0, "algorithms: kto, sft\n"),
        (thumbs, ["algorithm=sft"], 2, "a run is refused: filter: keeps 2 rejected answers"),
        (thumbs, ["algorithm=sft", "filter=successful"], 0, able),
        (thumbs, ["+experiment=dpo"], 2, "a run is refused: data: algorithm=dpo learns nothing from this data"),
        ([{**row, "label": False} for row in thumbs], ["algorithm=sft"], 2, "algorithms: kto\n"),
        (pairs, ["algorithm=dpo"], 0, "algorithms: dpo, ipo, kto, orpo"),
        (
            FORMS["messages"][:2],
            ["+experiment=dpo", "data.heldout=0.001"],
            2,
            "refused: data: algorithm=dpo learns nothing",
        ),
    ]
    for rows, overrides, code, text in cases:
        exit_code, out = inspect(rows, "--rows", "0", *overrides)
        assert (exit_code, text in out) == (code, True), (overrides, out)


def test_rows_without_a_list_of_tools_have_those_of_the_environment(inspect):
    def row(number: int, tool: str) -> dict:
        call = {"function": {"name": tool, "arguments": f'{{"order": "A{number}"}}'}}
        messages = [{"role": "user", "content": f"Order A{number}?"}, {"role": "assistant", "tool_calls": [call]}]
        return {"messages": messages}

    rows = [row(number, "find_order" if number else "fly") for number in range(12)]
    code, out = inspect(rows, "--json", "--rows", "1")
    data = json.loads(out)
    assert (code, data["examples"], data["checks"]["unknown_tool"]["count"]) == (0, 11, 1)
    (unknown,) = data["checks"]["unknown_tool"]["examples"]
    assert (unknown["number"], "message 1 calls fly;" in unknown["reason"]) == (1, True)
    assert "change_address" in "".join(text for text, _ in data["rows_shown"][0]["rl"]["tokens"])
    code, out = inspect(rows, "environment=none", "--rows", "0")
    assert code == 2
    assert "calls find_order; the tools are: none; expected the column tools, or an environment with them" in out


def test_files_and_a_path_exclude_each_other(inspect, capsys):
    assert main(["a.jsonl", "data.path=b.jsonl", "model=tiny"]) == 2
    assert "data.path: set together with FILE (a.jsonl)" in capsys.readouterr().err
