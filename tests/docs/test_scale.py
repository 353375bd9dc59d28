"""Each command of docs/guides/scale.md composes, and the run that it starts can be planned."""

from __future__ import annotations

import pytest

from components.compute.place import Offer
from docs import scale
from flows.experiment.compose import check
from flows.planning.plan import plan
from tests.test_configs import PROMPTS, skip_without_package

NAMES = [*scale.names(), "quickstart"]


@pytest.mark.parametrize("page", scale.PAGES, ids=lambda page: page.mark)
def test_the_page_is_what_the_command_writes(page):
    assert page.stored() == page.current()


@pytest.mark.parametrize("cluster", [False, True], ids=["gpu", "cluster"])
@pytest.mark.parametrize("name", NAMES)
def test_a_command_can_be_planned(name, cluster, tmp_path):
    skip_without_package(name)
    lines = [line.replace("FILE", str(PROMPTS)) for line in scale.command(name, cluster=cluster)]
    spec = check([*lines, f"root={tmp_path}"])[0]
    assert spec.model.dtype == "bfloat16"
    assert (spec.store is not None) == cluster
    offers = {name: Offer("H100:8", 20.0) for name in spec.compute.places}
    absent = {"store": None, "feedback": None}  # neither the bucket exists nor answers of people
    planned = plan(spec.model_copy(update=absent), ask=lambda places: offers)
    places = {stage.where for stage in planned.stages}
    assert all("H100:8" in place for place in places - {"process"}) if cluster else places <= {"local", "process"}
