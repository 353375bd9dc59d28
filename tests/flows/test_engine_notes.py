"""The note of a plan, and of a run's start, on the engine that samples sooner."""

from __future__ import annotations

import pytest

from components.inference.engines import vllm
from flows.experiment.compose import compose
from flows.planning import engines
from flows.planning.engines import engine_notes
from flows.stages.base import Request

VLLM = "inference=vllm"
CASES = [
    # overrides, GPU, scenarios of four episodes of one response of 100 tokens: the faster engine, what is said of it
    ([], True, 100, "embedded", "embedded 36 s, vllm 2 min 14 s; they are equal for 170,"),
    (
        [],
        True,
        1000,
        "vllm",
        "up to 400,000 tokens in 4,000 episodes the estimates, with starts, are embedded 6 min",
    ),
    ([VLLM], True, 100, "embedded", "400 episodes"),
    ([VLLM, "model.device=cpu"], True, 1000, "embedded", "vllm 75 min"),
    (["model.device=cpu"], True, 1000, None, ""),  # chosen, and nothing is faster
    ([], False, 1000, None, ""),
    (["compute=sky", "store=s3://b", "compute.stages.collect=sky_h100"], False, 1000, "vllm", ""),
    ([VLLM, "inference.urls=[http://a/v1]"], True, 1000, None, ""),  # runs already
    (["inference=remote", "inference.url=http://a/v1", "inference.model=m"], True, 1000, None, ""),
]


@pytest.fixture
def machine(monkeypatch):
    return lambda gpu: monkeypatch.setattr(engines, "visible_gpus", lambda: ["0"] if gpu else [])


def notes(overrides, scenarios, root):
    agent = ["agent.max_turns=1", "agent.max_tokens=100"]
    spec = compose(["+experiment=smoke", *agent, *overrides, f"root={root}"])
    collect = {**spec.collect.model_dump(mode="json"), "scenarios": scenarios, "group_size": 4}
    played = {"collect": collect, "agent": {"max_turns": 1}}
    requests = [Request("collect", {**played, "actor": actor}, {}) for actor in ("policy", "solver")]
    return list(engine_notes(spec, requests))


def test_the_faster_engine_follows_from_machine_and_number_of_tokens(machine, tmp_path):
    for overrides, gpu, scenarios, fastest, text in CASES:
        machine(gpu)
        found = notes(overrides, scenarios, tmp_path)
        start = [] if fastest is None else [f"inference={fastest} is the faster engine here: "]
        assert [note[: len(start[0])] for note in found] == start, (overrides, gpu, scenarios)
        assert text in "".join(found), (overrides, gpu, scenarios, found)


def test_a_later_start_of_vllm_reads_what_the_first_compiled(machine, tmp_path):
    machine(True)
    first = notes([], 100, tmp_path)
    (tmp_path / vllm.COMPILED).mkdir(parents=True)
    assert "vllm 2 min 14 s" in first[0]
    assert "vllm 1 min 43 s" in notes([], 100, tmp_path)[0]
