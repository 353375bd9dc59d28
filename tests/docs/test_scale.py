"""Each command of docs/guides/scale.md composes, and the run that it starts can be planned."""

from __future__ import annotations

import pytest

from components.compute.place import Offer
from components.errors import SpecError
from docs import scale
from flows.experiment.compose import check
from flows.planning.plan import plan
from tests.test_configs import OFFLINE, PROMPTS, missing_requirement

NAMES = [*scale.names(), "quickstart"]


@pytest.mark.parametrize("page", scale.PAGES, ids=lambda page: page.mark)
def test_the_page_is_what_the_command_writes(page):
    assert page.stored() == page.current()


COMPUTING = ("collect", "train", "evaluate", "reward_model", "sample")
"""Stages that compute with the model."""


@pytest.mark.parametrize("cluster", [False, True], ids=["gpu", "cluster"])
def test_every_command_can_be_planned(cluster, tmp_path):
    problems = {}
    for name in NAMES:
        if missing_requirement(name) is not None:
            continue
        lines = [line.replace("FILE", str(OFFLINE.get(name, PROMPTS))) for line in scale.command(name, cluster=cluster)]
        try:
            spec = check([*lines, f"root={tmp_path}"])[0]
        except SpecError as error:
            problems[name] = str(error)
            continue
        assert (name, spec.model.dtype, spec.store is not None) == (name, "bfloat16", cluster)
        offers = {place: Offer("H100:8", 20.0) for place in spec.compute.places}
        absent = {"store": None, "feedback": None}  # neither the bucket exists nor answers of people
        planned = plan(spec.model_copy(update=absent), ask=lambda places, offers=offers: offers)
        elsewhere = {stage.where for stage in planned.stages} - {"local", "process"}
        assert (name, {place for place in elsewhere if not cluster or "H100:8" not in place}) == (name, set())
        computing = {stage.where for stage in planned.stages if stage.stage in COMPUTING}
        assert not cluster or "local" not in computing, name
    assert problems == {}
