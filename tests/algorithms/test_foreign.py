"""Episodes of another model are converted to the tokens of the model in training, or left out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from components.algorithms.foreign import TOKENIZER, UNKNOWN, convert_foreign_tokens
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.preference.spec import DPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.sft.trainer import examples
from components.errors import ArtifactError
from components.models.weights import load_tokenizer, tokenizer_digest
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import History, Message
from tests.algorithms.builders import adapter_bytes, demonstrations, train_in

ALIEN = 7_000_000
"""Token id outside any vocabulary in these tests."""


def sampled(tokenizer: str, count: int = 4):
    """Return conversations as another model's engine would record them, with ids outside our vocabulary."""
    trajectories = demonstrations(count)
    for trajectory in trajectories:
        [history] = trajectory.histories
        for index, message in enumerate(history.messages):
            start = len(history.token_ids)
            history.token_ids += [ALIEN + index] * 3
            if message.role == "assistant":
                message.span, message.finish_reason = (start, start + 3), "stop"
        history.logprobs = [-1.0] * len(history.token_ids)
        trajectory.sampling = {"temperature": 0.7, TOKENIZER: tokenizer}
    return trajectories


@pytest.fixture(scope="module")
def chat(base_dir):
    return ChatFormat(load_tokenizer(base_dir))


@pytest.mark.parametrize("tokenizer", ["0" * 64, UNKNOWN])
def test_what_another_model_said_is_laid_out_anew(base_dir, chat, tokenizer):
    foreign_episodes = sampled(tokenizer)
    converted = convert_foreign_tokens(foreign_episodes, base_dir, sampled=False)
    assert examples(chat, converted, 512) == examples(chat, demonstrations(4), 512)
    assert foreign_episodes[0].histories[0].token_ids[0] == ALIEN  # the inputs are unchanged


def test_tokens_of_the_very_same_tokenizer_are_kept(base_dir, tmp_path):
    own_digest = tokenizer_digest(base_dir)
    foreign_episodes = sampled(own_digest)
    assert convert_foreign_tokens(foreign_episodes, base_dir, sampled=True) == foreign_episodes
    assert convert_foreign_tokens(demonstrations(), base_dir, sampled=True) == demonstrations()
    for change in ("chat_template.jinja", "tokenizer.json"):
        other = tmp_path / change
        shutil.copytree(base_dir, other)
        assert tokenizer_digest(other) == own_digest
        file = other / change
        if change == "tokenizer.json":
            data = json.loads(file.read_text())
            vocabulary = data["model"]["vocab"]
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
            file.write_text(json.dumps(data))
        else:
            file.write_text(file.read_text().replace("assistant", "model"))
        assert tokenizer_digest(other) != own_digest


def test_an_answer_that_was_cut_off_is_not_taught(base_dir, chat, caplog):
    foreign_episodes = sampled(UNKNOWN)
    foreign_episodes[1].histories[0].messages[-1].finish_reason = "length"
    converted = convert_foreign_tokens(foreign_episodes, base_dir, sampled=False)
    assert [trajectory.id for trajectory in converted] == ["d0/0", "d2/0", "d3/0"]
    assert "left out of training because an answer was truncated: 1 of 4" in caplog.text


def test_no_turn_is_taught_twice(base_dir, chat):
    """If the other template rewrites the past, each turn has its own history with all earlier messages."""
    [foreign_episode] = sampled(UNKNOWN, 1)
    [full_history] = foreign_episode.histories
    first = History([replace(message) for message in full_history.messages[:3]], list(range(9)), [0.0] * 9)
    helper = History([Message("user", "Count."), Message("assistant", "One.")], agent="helper")
    foreign_episode.histories = [first, helper, full_history]
    [converted] = convert_foreign_tokens([foreign_episode], base_dir, sampled=False)
    assert [history.agent for history in converted.histories] == ["helper", "main"]
    [written] = demonstrations(1)
    assert examples(chat, [converted], 512)[1:] == examples(chat, [written], 512)


def test_training_never_sees_a_foreign_id(base_dir, tmp_path):
    """An id outside the model's vocabulary would end the training with an error."""
    theirs, written = (
        adapter_bytes(train_in(tmp_path / name, SFTSpec(), base_dir, trajectories)[0])
        for name, trajectories in (("theirs", sampled(UNKNOWN)), ("written", demonstrations(4)))
    )
    assert theirs == written
    pair = sampled(UNKNOWN, 2)
    pair[0].reward, pair[1].reward, pair[1].scenario = 0.0, 1.0, pair[0].scenario
    _, metrics, _ = train_in(tmp_path / "dpo", DPOSpec(), base_dir, pair)
    assert metrics["examples"] == 1
    with pytest.raises(ArtifactError, match="d0/0 was sampled from a model with another tokenizer"):
        train_in(tmp_path / "grpo", GRPOSpec(), base_dir, sampled(UNKNOWN))
