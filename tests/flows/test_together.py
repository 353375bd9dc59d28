"""A train stage in two processes: the result of one, from one, by either; and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.compute.accelerate.spec import AcceleratePlace
from components.compute.runners import ProcessRunner, RunnerContext, StageProcess
from components.compute.torchrun.spec import TorchrunPlace
from components.errors import EspalierError, ResourceError
from components.trajectories.schema import Score, Selection
from flows.stages.base import Context, Request
from flows.stages.execute import request_key, run_stage
from tests.algorithms.builders import MODEL, batch
from tests.flows.pretend import store_episodes

pytestmark = pytest.mark.timeout(1800)
SMALL = {"learning_rate": 1e-3, "pack_tokens": 64}
ALGORITHMS = {
    "grpo": GRPOSpec(minibatches=2, epochs=2, kl_coefficient=0.1, **SMALL),
    "sft": SFTSpec(batch_size=4, **SMALL),
}


def train_request(name: str = "grpo", *, lora: bool = True, save_every: float = 30.0) -> Request:
    model = MODEL if lora else MODEL.model_copy(update={"lora": None})
    spec = {"model": model, "algorithm": ALGORITHMS[name]}
    data: dict[str, Any] = {key: one.model_dump(mode="json") for key, one in spec.items()}
    inputs = {one: one for one in ("trajectories", "scores", "selection")}
    return Request("train", {**data, "save_every": save_every}, inputs, seed=3)


def training_root(root: Path) -> Path:
    """With what a training reads: five groups, in an odd number of packs."""
    episodes = batch(groups=5)
    scores = [Score(episode.id, episode.reward) for episode in episodes]
    store_episodes(Context.at(root), episodes, scores, [Selection(episode.id, True, "kept") for episode in episodes])
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A root in which one process has trained."""
    root = training_root(tmp_path_factory.mktemp("alone"))
    run_stage(train_request(), Context.at(root))
    return root


def _together(root: Path, strategy: str = "ddp", processes: int = 2) -> ProcessRunner:
    place = TorchrunPlace(processes=processes, strategy=strategy, timeout=200)
    process = StageProcess(root, root / "log.txt", {**os.environ, "PYTHONPATH": os.getcwd()})
    return ProcessRunner(process, place.command(process))


def _kept(root: Path) -> ProcessRunner:
    process = StageProcess(root, root / "log.txt", {**os.environ, "PYTHONPATH": os.getcwd()})
    context = RunnerContext("run", root / "log", process, run_stage, root, (), print)
    return TorchrunPlace(processes=2, timeout=200).runner("torchrun", context)


def _ranks() -> list[psutil.Process]:
    """The processes of a training, by rank."""
    ranks = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            ranks[child] = child.environ().get("RANK")
    return sorted((child for child, rank in ranks.items() if rank is not None), key=ranks.__getitem__)


def _steps(root: Path, key: str) -> list[dict[str, float]]:
    path = Context.at(root).store.path(key) / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _same(root: Path, other: Path, key: str, steps: int = 4) -> None:
    ours, theirs = _steps(root, key), _steps(other, key)
    assert len(ours) == steps
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [one[name] for one in ours] == pytest.approx([one[name] for one in theirs], rel=1e-4, abs=1e-7)


def test_two_processes_leave_what_one_leaves(alone, tmp_path):
    root, before = training_root(tmp_path), psutil.Process().children(recursive=True)
    events: list[Any] = []
    kept = _kept(root)
    found = kept.run(train_request().to_json(), events.append)
    ranks = _ranks()
    assert found.status == "ran"
    assert found.key == request_key(train_request(), Context.at(alone))
    _same(root, alone, found.key)
    progress = [event["progress"] for event in events if "progress" in event]
    assert [one[:2] for one in progress] == [[done, 4] for done in range(5)]  # the first process speaks, once
    one, two = (Context.at(where).store.find(found.key) for where in (alone, root))
    assert set(json.loads((one.path / "manifest.json").read_text())["files"]) == set(
        json.loads((two.path / "manifest.json").read_text())["files"]
    )
    assert not list((root / "artifacts" / ".drafts").iterdir())

    # The next training, which continues from the first, has the same processes.
    following = replace(train_request(), seed=4, inputs={**train_request().inputs, "start": found.key})
    second = kept.run(following.to_json(), print)
    assert ranks == _ranks()
    assert len(ranks) == 2
    expected, _ = run_stage(following, Context.at(alone))
    losses = [[step["loss"] for step in _steps(*of)] for of in ((root, second.key), (alone, expected.key))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)
    kept.close()
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_the_processes_of_an_accelerate_file_leave_what_one_leaves(alone, tmp_path):
    root = training_root(tmp_path / "two")
    file = tmp_path / "accelerate.yaml"
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4}}
    file.write_text(json.dumps({"num_processes": 2, "mixed_precision": "no", "use_cpu": True, **zero}))
    place = AcceleratePlace(config_file=str(file), timeout=200)
    process = StageProcess(root, root / "log.txt", {**os.environ, "PYTHONPATH": os.getcwd()})
    runner = place.runner("accelerate", RunnerContext("run", root / "log", process, run_stage, root, (), print))
    result = runner.run(train_request().to_json(), lambda event: None)
    runner.close()
    assert result.status == "ran"
    assert result.key == request_key(train_request(), Context.at(alone))
    _same(root, alone, result.key)


def test_any_of_the_processes_may_prepare_the_weights(tmp_path):
    """Which one does is chance: transformers writes a model in the first process only, unless told otherwise."""
    program = """
import sys
from pathlib import Path
from torch import distributed
from components.models.weights import prepare
from tests.algorithms.builders import MODEL
from torch.testing._internal.distributed.fake_pg import FakeStore
distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
print(sorted(path.name for path in prepare(MODEL, Path(sys.argv[1])).iterdir()))
"""
    files = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
    ).stdout
    assert "'config.json'" in files
    assert "'model.safetensors'" in files


class Enough(KeyboardInterrupt):
    """Ctrl-C."""


def _stop(event: Any) -> None:
    if "progress" in event and event["progress"][0] == 2:
        raise Enough


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "strategy"),
    [
        ("grpo", True, "ddp"),
        ("sft", True, "ddp"),
        ("grpo", True, "fsdp"),
        ("grpo", False, "fsdp"),
        ("sft", False, "zero2"),
    ],
)
def test_one_goes_on_where_two_were_stopped_and_the_other_way_round(tmp_path, name, lora, strategy):
    request = train_request(name, lora=lora, save_every=0.0)
    whole, two, one = (training_root(tmp_path / part) for part in ("whole", "two", "one"))
    artifact, _ = run_stage(request, Context.at(whole))
    with pytest.raises(Enough):
        _together(two, strategy).run(request.to_json(), _stop)
    unfinished = Context.at(two).store.scratch(artifact.key) / "unfinished"
    assert max(int(path.name) for path in unfinished.glob("[0-9]*")) >= 2
    run_stage(request, Context.at(two))
    with pytest.raises(Enough):
        run_stage(request, Context.at(one, progress=lambda *given: _stop({"progress": given})))
    assert _together(one, strategy).run(request.to_json(), print).status == "ran"
    for root in (two, one):
        _same(root, whole, artifact.key)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_stage_and_nothing_is_left(tmp_path):
    root = training_root(tmp_path)

    def kill(event: Any) -> None:
        if "progress" in event and event["progress"][0] == 1:
            mine = [one for one in psutil.Process().children(recursive=True) if one.environ().get("RANK") == "1"]
            mine[0].kill()

    kept = _kept(root)
    with pytest.raises(EspalierError, match=r"training process 1 ended by SIGKILL.*log\.txt"):
        kept.run(train_request(save_every=0.0).to_json(), kill)
    assert not list(psutil.Process().children(recursive=True))
    assert kept.run(train_request(save_every=0.0).to_json(), print).status == "ran"
    (ranks := _ranks())[1].kill()  # between two trainings
    assert kept.run({**train_request().to_json(), "seed": 5}, print).status == "ran"
    assert not {*ranks} & {*_ranks()}
    kept.close()


@pytest.mark.slow
def test_a_mistake_comes_back_as_itself(tmp_path):
    root = training_root(tmp_path)
    shutil.rmtree(Context.at(root).store.path("scores"))
    with pytest.raises(EspalierError, match="train needs scores"):
        _together(root).run(train_request().to_json(), print)
    request = train_request().to_json()
    request["spec"]["model"] |= {"source": "hub", "name": "/nowhere"}
    with pytest.raises(ResourceError, match="nowhere"):
        _together(training_root(tmp_path / "other")).run(request, print)
