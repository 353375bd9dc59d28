"""Rows of a served policy's conversations: what each kind of feedback trains on."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from components.data.form_resolution import resolve_form
from components.data.importing import DataImport
from components.data.served.log import SUFFIX, ServedLog, files, read
from components.data.served.rows import ServedSource, standing
from components.data.sources import content_digest, rows
from components.data.spec import DataSpec
from components.errors import ResourceError
from components.trajectories.store import read_scored

TOOLS = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}]


class Served:
    """A folder with one conversation of two turns, and a second answer to its first message."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = ServedLog(folder)
        self.answer("a", "Where?", [1, 2], "Here.", [3, 4])
        self.answer("b", "And now?", [5], "Gone.", [6, 7], parent="a", prompt="p2", shared=4)
        self.answer("c", "Where?", [1, 2], "There.", [8], conversation="other")

    def answer(self, name: str, user: str, prompt_ids: list[int], text: str, ids: list[int], **more: Any) -> None:
        line = {
            "id": name,
            "conversation": "talk",
            "version": "1",
            "tokenizer": "vocabulary:x",
            "parent": None,
            "messages": [{"role": "user", "content": user}],
            "prompt": "p1",
            "shared": 0,
            "altered": False,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "seconds": 0.1,
            "prompt_token_ids": prompt_ids,
            "token_ids": ids,
            "logprobs": [-0.5] * (len(ids) - 1) + [None],
            **more,
        }
        if line["parent"] is None:
            line["tools"] = TOOLS
        self.log.append(lambda file: [line])

    def say(self, target: str, **feedback: Any) -> None:
        answer = self.log.find(**{"answer" if len(target) == 1 else "conversation": target})
        assert answer is not None
        named = target if len(target) == 1 else None
        line = {"feedback": "f", "answer": named, "conversation": answer.conversation, **feedback}
        assert self.log.append_feedback(line, answer)

    def trained(self) -> list[list[tuple[float | None, list[tuple[list[int], list[bool], list[str]]]]]]:
        """Reward, and for each history the tokens, those that are trained on, and the trained texts; by row."""
        source = ServedSource.of(DataSpec(path=str(self.folder)))
        assert source is not None
        return [
            [
                (
                    candidate.reward,
                    [
                        (history.token_ids, history.sampled_mask(), [
                            message.content for message in history.messages
                            if message.role == "assistant" and message.trained
                        ])
                        for history in candidate.histories
                    ],
                )
                for candidate in row["candidates"]
            ]
            for row in source.rows()
        ]  # fmt: skip


@pytest.fixture
def served(tmp_path) -> Served:
    return Served(tmp_path / "served")


def test_each_kind_of_feedback_trains_on_its_answers(served):
    """A score of an answer on this answer, one of a conversation on all of its answers. NaN: an added token."""
    served.say("a", score=0.25)
    served.say("b", score=1.0)
    served.say("talk", score=0.5)
    served.say("c", better_than="a")
    served.say("b", correction={"text": "Sold.", "calls": [{"name": "find", "arguments": "{}"}]})
    first, pair, second, corrected, whole = served.trained()  # by prompt
    added = [False, False, True, False]  # the last token of each answer has no log-probability
    assert first == [(0.25, [([1, 2, 3, 4], added, ["Here."])])]
    assert second == [(1.0, [([1, 2, 3, 4, 5, 6, 7], [False] * 5 + [True, False], ["Gone."])])]
    assert whole == [(0.5, [([1, 2, 3, 4, 5, 6, 7], [*added, False, True, False], ["Here.", "Gone."])])]
    assert [(reward, history[0][0]) for reward, history in pair] == [(1.0, [1, 2, 8]), (0.0, [1, 2, 3, 4])]
    assert corrected == [(1.0, [([], [], ["Sold."])])]


def test_the_latest_feedback_stands_whichever_servers_file_it_is_in(served):
    """The file of a conversation's last answer may have begun before that of its earlier ones."""
    served.say("other", score=0.0)
    name = f"{time.time() - 60:.6f}-second{SUFFIX}"  # begun first, answered last
    line = next(line for line in read(served.folder) if line["id"] == "c")
    texts = [{**line, "id": "d"}, {"feedback": "g", "answer": None, "conversation": "other", "score": 1.0}]
    text = "".join(
        json.dumps({**line, "time": line_time}) + "\n" for line, line_time in zip(texts, (2e9, 3e9), strict=True)
    )
    (served.folder / name).write_text(text)
    assert [line["score"] for line in standing(read(served.folder))] == [1.0]
    with open(served.folder / name, "a") as file:
        file.write('null\n5\n[1]\n{"id": "z"}\n\0\n')  # damaged
    assert [line["id"] for line in read(served.folder) if "id" in line] == ["d", "a", "b", "c"]
    assert ServedLog(served.folder).find(answer="d") is not None
    (served.folder / f"copy{SUFFIX}").write_text("a foreign file")
    assert len(files(served.folder)) == 2


def test_later_feedback_replaces_earlier_one(served):
    served.say("a", score=0.0)
    served.say("a", score=1.0)
    served.say("a", better_than="c")
    served.say("c", better_than="a")
    assert [[reward for reward, _ in row] for row in served.trained()] == [[1.0], [1.0, 0.0]]


def test_a_split_has_its_kinds_of_feedback_alone(served):
    """Also a choice against an answer of a conversation without feedback."""
    served.say("c", better_than="a")
    assert [[reward for reward, _ in row] for row in served.trained()] == [[1.0, 0.0]]
    served.say("a", score=0.25)
    served.say("b", correction={"text": "Sold.", "calls": []})
    rewards = {
        split: [
            [candidate.reward for candidate in row.values["candidates"]]
            for row in rows(DataSpec(path=str(served.folder), split=split))
        ]
        for split in ("scores", "corrections", "choices", "scores+corrections", None)
    }
    assert [rewards[split] for split in ("scores", "corrections", "choices")] == [[[0.25]], [[1.0]], [[1.0, 0.0]]]
    assert rewards["scores+corrections"] == [[0.25], [1.0]]
    assert len(rewards[None]) == 3
    with pytest.raises(ResourceError, match="split = train: expected some of scores, corrections, choices"):
        list(rows(DataSpec(path=str(served.folder), split="train")))


def test_the_import_recognises_the_folder_and_keeps_scores_and_tokens(served, tmp_path):
    """A corrected answer with a low score is a comparison of two answers to one prompt."""
    served.say("a", score=0.0)
    served.say("b", score=1.0)
    served.say("a", correction={"text": "Sold.", "calls": []})
    spec = DataSpec(path=str(served.folder))
    spec = spec.model_copy(update={"form": resolve_form(spec)})
    (tmp_path / "out").mkdir()
    report = DataImport(spec, tokens=None).write(tmp_path / "out")
    assert (spec.form, report.examples, report.rejected, report.comparable) == ("served", 3, 1, 1)
    read = list(read_scored(tmp_path / "out" / "trajectories.parquet", tmp_path / "out" / "scores.parquet"))
    assert [trajectory.group for trajectory in read] == ["p1", "p1", "p2"]  # groups are not torn apart
    assert [trajectory.reward for trajectory in read] == [0.0, 1.0, 1.0]
    assert [trajectory.sampling.get("tokenizer") for trajectory in read] == ["vocabulary:x", None, "vocabulary:x"]
    history = read[0].histories[0]
    assert (history.token_ids, history.logprobs[2]) == ([1, 2, 3, 4], -0.5)
    assert math.isnan(history.logprobs[3])


def test_a_training_reads_the_conversations_up_to_a_time(served):
    """Also while the server goes on: the digest of what was read before stays the same."""
    served.say("a", score=1.0)
    source = ServedSource.of(DataSpec(path=str(served.folder)))
    assert source is not None
    spec = DataSpec(path=source.until_now().path)
    before = content_digest(spec)
    served.say("b", score=1.0)
    assert (len(list(rows(spec))), content_digest(spec)) == (1, before)
    assert content_digest(DataSpec(path=str(served.folder))) != before
    again = ServedSource.of(spec)
    assert again is not None
    assert again.until_now() == again
    with pytest.raises(ResourceError, match="'yesterday' is no time; expected FOLDER@2026"):
        list(rows(DataSpec(path=f"{served.folder}@yesterday")))
