"""Fixtures: the tiny model under any chat template, with an engine that samples scripted tokens."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.deployment.tiny import TINY


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def scripted(base_dir, tmp_path, monkeypatch):
    """Return a factory of a real engine with a template (None: its own) and the list of tokens to sample."""
    from components.inference.transformers import batch
    from components.inference.transformers.engine import TransformersEngine

    def make(template: str | None):
        folder = shutil.copytree(base_dir, tmp_path / "model")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        script: list[int] = []

        def draw(logits_BV, samplings, uniforms):
            tokens = [script.pop(0)]  # one conversation at a time
            return tokens, torch.log_softmax(logits_BV, -1)[[0], tokens].tolist()

        monkeypatch.setattr(batch, "draw", draw)
        return TransformersEngine(folder, max_length=4096, device="cpu"), script

    return make
