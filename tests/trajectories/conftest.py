"""Fixtures: the tokenizer of the tiny model, with any chat template."""

from __future__ import annotations

import copy

import pytest

from tests.deployment.tiny import TINY


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture(scope="session")
def make_format(base_dir):
    """ChatFormat of the tiny tokenizer, which writes a byte a token; None takes its own template (ChatML)."""
    from components.models.weights import load_tokenizer
    from components.trajectories.chat import ChatFormat

    tokenizer = load_tokenizer(base_dir)

    def make(template: str | None = None) -> ChatFormat:
        other = copy.deepcopy(tokenizer)
        if template is not None:
            other.chat_template = template
        return ChatFormat(other)

    return make
