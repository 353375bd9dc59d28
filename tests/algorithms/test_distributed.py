"""Two processes, with replicated or sharded base weights, take the same steps as one; only the first one writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.algorithms.continual.replay import mixed
from components.algorithms.continual.spec import ReplaySpec
from components.algorithms.distillation.spec import DistillSpec
from components.algorithms.policy import sharded
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.ppo.spec import PPOSpec
from components.algorithms.preference.spec import DPOSpec, KTOSpec
from components.algorithms.reward_models.spec import ProcessRewardModelSpec, RewardModelSpec, RewardTrainingSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.spec import AlgorithmSpec, CostSpec
from components.models.fused_lora import fuse
from components.models.spec import LoraSpec
from components.trajectories.schema import Score, Trajectory
from components.trajectories.selected import SelectedFiles, SelectedTrajectories
from components.trajectories.store import write_scores, write_trajectories
from tests.algorithms.builders import MODEL, batch, make_context, make_policy, train_in
from tests.algorithms.test_checkpoint import DROPOUT, differing

pytestmark = pytest.mark.timeout(1800)
CODE = Path(__file__).resolve().parents[2]
RANKS = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
from torch import distributed
from tests.algorithms import test_distributed

base_dir, folder, port, *functions = sys.argv[1:]
rank = 0 if os.fork() else 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")  # as launchers do
distributed.init_process_group(
    "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
)
results = {name: getattr(test_distributed, name)(Path(base_dir), Path(folder, name)) for name in functions}
Path(folder, f"{rank}.json").write_text(json.dumps(results))
distributed.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def in_two_processes(functions: list[str], base_dir: Path, folder: Path) -> dict[str, list[Any]]:
    """Return the results of `function(base_dir, folder / function)` in each of two processes, by function."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, "-c", RANKS, str(base_dir), str(folder), port, *functions],
        cwd=CODE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as ranks:
        try:
            _, errors = ranks.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            raise
        assert ranks.returncode == 0, errors[-5000:]
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [of_rank[name] for of_rank in results] for name in functions}


# --- one step -------------------------------------------------------------------------------------------------------

COMMON = {"pack_tokens": 64, "max_grad_norm": 1e9}
TEACHER = {"name": "tiny", "source": "random", "device": "cpu"}
STEPS: dict[str, AlgorithmSpec | RewardTrainingSpec] = {
    "grpo": GRPOSpec(kl_coefficient=0.1, **COMMON),
    # AdamW magnifies rounding in the pretraining steps of the critic, whose values enter the advantages.
    "ppo": PPOSpec(epochs=1, **COMMON, value_pretraining_steps=0),
    "sft": SFTSpec(batch_size=15, weight_temperature=0.5, **COMMON),
    "dpo": DPOSpec(**COMMON),
    "kto": KTOSpec(**COMMON),
    "distill": DistillSpec(teacher=TEACHER, **COMMON),
    "reward_model": RewardModelSpec(batch_size=64, **COMMON),
    "process_reward_model": ProcessRewardModelSpec(batch_size=64, **COMMON),
}
"""Five groups in more packs than processes, an odd number."""
ALONE = ("whole", "all weights learn")
"""Kinds that a single process also runs."""
KINDS = [("whole", name) for name in STEPS] + [("sharded", name) for name in ("grpo", "sft")]
KINDS += [("sharded, fused adapters", "grpo")]
KINDS += [(kind, name) for kind in ("all weights learn", "in parts", "in parts, zero2") for name in ("grpo", "sft")]


def episodes() -> list[Trajectory]:
    trajectories = batch(groups=5)
    for number, trajectory in enumerate(trajectories):
        assert trajectory.reward is not None
        trajectory.metrics = {"slips": float(number % 2)}
        trajectory.step_rewards = [trajectory.reward / 2, trajectory.reward]
    return trajectories


def train_reward(spec: RewardTrainingSpec, base_dir: Path, **rest: Any) -> dict[str, float]:
    from components.algorithms.trainer import JudgedCollection
    from tests.algorithms.builders import train_reward_model

    trajectories = episodes()
    judged = [JudgedCollection(trajectories, scores(trajectories))]
    return train_reward_model(spec, base_dir=base_dir, judged=judged, **rest)


def scores(trajectories: list[Trajectory]) -> list[Score]:
    return [Score(trajectory.id, trajectory.reward) for trajectory in trajectories]


def first_steps(base_dir: Path, folder: Path) -> dict[str, Any]:
    return {f"{kind} {name}": one_step(base_dir, folder, kind, name) for kind, name in KINDS}


def one_step(base_dir: Path, folder: Path, kind: str, name: str) -> dict[str, Any]:
    """Return the gradient before the first step, the metrics, and the final parameters."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from components.algorithms.distillation.trainer import train_distill

    spec = STEPS[name]
    gradient: list[list[float]] = []
    learning: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not learning:
            learning.extend(parameter for group in optimizer.param_groups for parameter in group["params"])
            gradient.extend(
                sharded.gather_tensor(parameter.grad).flatten().tolist()
                for parameter in learning
                if parameter.grad is not None
            )

    logs: list[dict[str, float]] = []
    hook = register_optimizer_step_pre_hook(keep)
    try:
        if isinstance(spec, RewardTrainingSpec):
            for path in (out := folder / f"out-{name}", scratch := folder / f"scratch-{name}"):
                path.mkdir(exist_ok=True)
            options = {"start": None, "out": out, "scratch": scratch, "seed": 0, "on_step": logs.append}
            logs.append(train_reward(spec, base_dir, model=MODEL, **options))
            tensors = {
                "gradient": gradient,
                "after": [sharded.gather_tensor(parameter).flatten().tolist() for parameter in learning],
            }
            return tensors | {"metrics": [_steady(log) for log in logs]}
        lora = MODEL.lora if kind in ("whole", "sharded", "sharded, fused adapters") else None
        strategy = "ddp" if kind in ALONE else "zero2" if kind.endswith("zero2") else "fsdp"
        policy = make_policy(base_dir, model=MODEL.model_copy(update={"lora": lora}), strategy=strategy)
        if kind.endswith("fused adapters"):  # as on a GPU
            assert fuse(policy.model)
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
        scratch = folder / f"scratch-{kind}-{name}"
        scratch.mkdir(parents=True, exist_ok=True)
        if (critic := spec.critic(policy)) is not None:
            optimizer.add_param_group({"params": list(critic.parameters.values())})
        options = {"base_dir": base_dir, "scratch": scratch, "on_step": logs.append, "critic": critic}
        context = make_context(policy, optimizer, episodes(), **options)
        if isinstance(spec, DistillSpec):
            train_distill(spec, context, policy)
        else:
            spec.build(context).train()
    finally:
        hook.remove()
    after = [sharded.gather_tensor(parameter).flatten().tolist() for parameter in learning]
    return {"gradient": gradient, "after": after, "metrics": [_steady(log) for log in logs]}


def _steady(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in ("seconds", "tokens_per_s")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of `together`, with a folder for each function."""
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def together(base_dir, folder) -> dict[str, list[Any]]:
    """Run all functions in the same two processes and return the results of each, by function."""
    functions = {
        "first_steps": [],
        "loading": [],  # before functions that forbid the second process to write tensors
        "whole_trainings": [f"{name}/{part}" for name in TRAININGS for part in ("whole", "stopped", "alone")],
        "train_a_role": ["all", "worker"],
        "half_precision": [],
        "state_bytes": [],
        "refusals": ["apart-0", "apart-1", "struck"],
    }
    for function, trainings in functions.items():
        (folder / function).mkdir()
        for training in trainings:
            for sub in ("out", "scratch"):
                (folder / function / training / sub).mkdir(parents=True)
    write_trajectories(folder / "episodes.parquet", episodes())
    write_scores(folder / "scores.parquet", [Score(episode.id, episode.reward) for episode in episodes()])
    with pytest.raises(Interrupted):
        one_training(base_dir, "sft", folder / "refusals" / "apart-0", interrupt)
    return in_two_processes(list(functions), base_dir, folder) | {"folder": folder}


def test_two_processes_take_the_step_of_one(base_dir, tmp_path, together):
    alone = {(kind, name): one_step(base_dir, tmp_path, kind, name) for kind, name in KINDS if kind in ALONE}
    for kind, name in KINDS:
        same = kind if kind in ALONE else "whole" if kind.startswith("sharded") else "all weights learn"
        assert_same_step(together["first_steps"], alone[same, name], kind, name)


def assert_same_step(together: list[dict[str, Any]], alone: dict[str, Any], kind: str, name: str) -> None:
    first, second = (results[f"{kind} {name}"] for results in together)
    assert first == second  # bitwise identical in all processes
    assert any(any(values) for values in alone["gradient"])
    largest = max(abs(value) for values in alone["gradient"] for value in values)
    # The gradient of the value bias is a sum that cancels, 0 up to the rounding of its terms; AdamW scales it up.
    cancels = [len(values) == 1 and abs(values[0]) < 1e-6 * largest for values in alone["gradient"]]
    for part in ("gradient", "after"):
        for ours, expected, cancel in zip(first[part], alone[part], cancels, strict=True):
            if cancel and part == "after":
                continue
            scale = largest if cancel else max(map(abs, expected)) or 1.0
            # AdamW's first step is nearly the sign of the gradient, so rounding matters where a gradient is near 0.
            step = 0.01 * STEPS[name].learning_rate if part == "after" else 0.0
            assert ours == pytest.approx(expected, abs=2e-6 * scale + step)
    assert len(first["metrics"]) == len(alone["metrics"])
    for ours, expected in zip(first["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


# --- all weights in half precision ----------------------------------------------------------------------------------

HALF = MODEL.model_copy(update={"lora": None, "dtype": "bfloat16"})
SHARDED = ("fsdp", "zero2", "fsdp_offload")
HALF_SPEC = SFTSpec(batch_size=8, learning_rate=1e-4, pack_tokens=64, epochs=2)


def half_precision(base_dir: Path, folder: Path, strategies: tuple[str, ...] = SHARDED) -> dict[str, Any]:
    """Train all weights in bfloat16 twice, the second time from the checkpoint of the first. Return the logs."""
    logs = {}
    for strategy in strategies:
        start = None
        for part in ("first", "second"):
            start, _, logs[f"{strategy} {part}"] = train_in(
                folder / strategy / part, HALF_SPEC, base_dir, episodes(), HALF, strategy=strategy, start=start
            )
    return {name: [_steady(log) for log in steps] for name, steps in logs.items()}


def test_sharded_weights_in_half_precision_have_float32_masters(base_dir, tmp_path, together):
    """Checkpoints have the layout of one process: weights in bfloat16, moments and master weights in float32. One
    process trains the checkpoint of two further. Packs are summed in another order, so values differ by rounding."""
    first, second = together["half_precision"]
    assert first == second
    alone = half_precision(base_dir, tmp_path, ("ddp",))
    for strategy in SHARDED:
        for part in ("first", "second"):
            expected = alone[f"ddp {part}"]
            assert [log["loss"] for log in first[f"{strategy} {part}"]] == pytest.approx(
                [log["loss"] for log in expected], abs=2e-3
            )
            ours, theirs = (
                {**load_file(path / "weights/model.safetensors"), **load_file(path / "optimizer.safetensors")}
                for path in (
                    together["folder"] / "half_precision" / strategy / part / "out",
                    tmp_path / "ddp" / part / "out",
                )
            )
            assert {name: tensor.dtype for name, tensor in ours.items()} == {
                name: tensor.dtype for name, tensor in theirs.items()
            }
            for name in theirs:
                if name.endswith("/master"):
                    assert (ours[name] - theirs[name]).abs().mean() < 0.1 * HALF_SPEC.learning_rate
                    assert torch.equal(ours[name].bfloat16(), ours[name.removesuffix("/master")])
    for part in ("first", "second"):  # the place of the state changes nothing
        fsdp, offloaded = (together["folder"] / "half_precision" / name / part / "out" for name in SHARDED[::2])
        assert differing(fsdp, offloaded) == []
    further = train_in(
        tmp_path / "further",
        HALF_SPEC,
        base_dir,
        episodes(),
        HALF,
        start=together["folder"] / "half_precision/fsdp/first/out",
    )[2]
    assert [log["loss"] for log in further] == pytest.approx([log["loss"] for log in alone["ddp second"]], abs=2e-3)


# --- loading --------------------------------------------------------------------------------------------------------


def loading(base_dir: Path, folder: Path) -> dict[str, Any]:
    """Return for each kind of sharded policy whether it equals one that is loaded as a whole before it is sharded, as
    does its next step, and the peak memory of loading a larger model both ways, in units of its size."""
    from components.models.spec import ArchitectureSpec
    from components.models.weights import prepare
    from tests.models.families import write

    first = int(os.environ["RANK"]) == 0
    if first:
        write("qwen3_moe", folder / "experts", tie_word_embeddings=True)
    torch.distributed.barrier()
    equal = {}
    for place, lora, dtype in (
        (base_dir, None, "bfloat16"),
        (base_dir, MODEL.lora, "bfloat16"),
        (folder / "experts", None, "float32"),
        (folder / "experts", MODEL.lora, "float32"),
    ):
        model = MODEL.model_copy(update={"name": place.name, "lora": lora, "dtype": dtype})
        streamed, whole = make_policy(place, model=model, strategy="fsdp"), make_policy(place, model=model)
        assert streamed._logit_transform is whole._logit_transform
        assert streamed._layout is whole._layout
        whole._shard("fsdp", lambda module: None)
        equal[f"{place.name} {lora} loaded"] = _equal(streamed, whole)
        for policy in (streamed, whole):
            optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-3)
            options = {"base_dir": base_dir, "scratch": folder, "on_step": lambda _: None}
            HALF_SPEC.build(make_context(policy, optimizer, episodes()[:8], **options)).train()
        equal[f"{place.name} {lora} after a step"] = _equal(streamed, whole)
    large = HALF.model_copy(update={"architecture": ArchitectureSpec(hidden=512, layers=24), "dtype": "float32"})
    large_dir = prepare(large, folder / "models") if first else None
    torch.distributed.barrier()
    large_dir = large_dir or prepare(large, folder / "models")
    size = (large_dir / "model.safetensors").stat().st_size
    peaks = {}
    for kind, strategy in (("streamed", "fsdp"), ("whole", "ddp")):
        Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
        before = _peak()
        policy = make_policy(large_dir, model=large, strategy=strategy)
        peaks[kind] = (_peak() - before) / size
    return {"equal": equal, "peaks": peaks}


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = (
        {
            name: sharded.local_shard(tensor)
            for name, tensor in [*policy.model.named_parameters(remove_duplicate=False), *policy.model.named_buffers()]
        }
        for policy in (one, other)
    )
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == ours[name].dtype and torch.equal(tensor, ours[name]) for name, tensor in theirs.items()
    )


def _peak() -> int:
    """Return the peak of this process's memory in bytes, with the pages of files that it maps."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_a_model_is_sharded_while_it_is_read(together):
    """Weights, buffers and steps are those of a model that is loaded as a whole. Half of the weights stay in each
    process; beside them it has one layer and the weights outside of layers."""
    for rank in together["loading"]:
        assert len(rank["equal"]) == 8
        assert all(rank["equal"].values()), rank["equal"]
        assert rank["peaks"]["streamed"] < 0.85
        assert rank["peaks"]["whole"] > 0.95


# --- memory ---------------------------------------------------------------------------------------------------------


def state_bytes(base_dir: Path, folder: Path) -> dict[str, list[int]]:
    """Return the bytes of weights, gradients and optimizer state of this process, by dtype and strategy."""
    from components.algorithms.loop.adamw import adamw

    measured = {}
    for dtype, strategy in product(("float32", "bfloat16"), ("ddp", "fsdp", "fsdp_offload")):
        policy = make_policy(base_dir, model=HALF.model_copy(update={"dtype": dtype}), strategy=strategy)
        optimizer = adamw(HALF_SPEC, [list(policy.parameters.values())])
        sizes: list[int] = []

        def keep(optimizer: torch.optim.Optimizer, *_: Any, sizes: list[int] = sizes) -> None:
            sizes += [_bytes(parameter.grad for group in optimizer.param_groups for parameter in group["params"])]

        optimizer.register_step_pre_hook(keep)
        options = {"base_dir": base_dir, "scratch": folder, "on_step": lambda _: None}
        HALF_SPEC.build(make_context(policy, optimizer, episodes()[:8], **options)).train()
        states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        measured[f"{dtype} {strategy}"] = [_bytes(policy.parameters.values()), sizes[0], _bytes(states)]
    return measured


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(sharded.local_shard(tensor).nbytes for tensor in tensors)


def test_the_estimate_of_the_state_is_what_two_processes_hold(base_dir, together):
    from components.models.trained_weights import shapes
    from components.models.training_memory import ModelSize, training_memory

    size = ModelSize.of(shapes(base_dir))
    settings: dict[str, Any] = {"processes": 2, "pack_tokens": 64, "checkpointing": False, "reference": False}
    for name, measured in together["state_bytes"][0].items():
        dtype, strategy = name.split()
        model = HALF.model_copy(update={"dtype": dtype})
        expected = training_memory(size, model, strategy=strategy, **settings)
        if strategy == "fsdp_offload":
            shards = expected.host - training_memory(size, model, strategy="fsdp", **settings).host
            assert sum(measured) == pytest.approx(shards, rel=0.01), name
            continue
        assert measured == pytest.approx([expected.weights, expected.gradients, expected.optimizer], rel=0.01), name


# --- whole trainings, with files ------------------------------------------------------------------------------------

SMALL = {"learning_rate": 1e-3, "pack_tokens": 64}
TRAININGS: dict[str, AlgorithmSpec | RewardTrainingSpec] = {
    "grpo": GRPOSpec(  # a guard strikes in each step, and each training measures old log-probabilities
        minibatches=2,
        epochs=2,
        kl_coefficient=0.1,
        kl_in="reward",
        max_kl=1e-9,
        high_kl="warn",
        costs={"slips": CostSpec(limit=0.25, initial=1.0)},
        **SMALL,
    ),
    "ppo": PPOSpec(epochs=2, minibatches=2, value="model", **SMALL, value_pretraining_steps=2),
    "sft": SFTSpec(batch_size=4, **SMALL),
    "dpo": DPOSpec(batch_size=2, **SMALL),
    "reward_model": RewardModelSpec(batch_size=4, **SMALL),
}
"""Trainings of at least three gradient steps."""


class Interrupted(Exception):
    """Raised by the test to interrupt a run."""


def interrupt(metrics: dict[str, float]) -> None:
    raise Interrupted


def one_training(base_dir: Path, name: str, folder: Path, on_step: Callable[[dict[str, float]], None]) -> Path:
    from tests.algorithms.builders import train

    out, scratch = folder / "out", folder / "scratch"
    spec, recorded = TRAININGS[name], {"seed": 11, "on_step": on_step, "save_every": 0.0}
    if isinstance(spec, RewardTrainingSpec):
        train_reward(spec, base_dir, model=DROPOUT, start=None, out=out, scratch=scratch, **recorded)
    else:
        written = next(parent for parent in folder.parents if (parent / "episodes.parquet").exists())
        in_files = SelectedTrajectories([SelectedFiles(written / "episodes.parquet", written / "scores.parquet", None)])
        given = in_files
        if name == "grpo":
            given, _ = mixed(ReplaySpec(share=0.5), in_files, [in_files], version="v", compared=True, seed=1)
        given = [*given] if folder.name == "alone" else given
        train(spec, DROPOUT, base_dir, given, start=None, reference=None, out=out, scratch=scratch, **recorded)
    return out


def whole_trainings(base_dir: Path, folder: Path) -> dict[str, Any]:
    """Run each training in one go, and one that is interrupted after its second step and resumed. The second process
    fails if it opens a file of theirs for writing."""
    import safetensors.torch
    from torch import distributed

    from components.algorithms.loop import checkpoint

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the second process writes tensors")

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)) and set(str(arguments[1])) & set("wax+"):
            raise AssertionError(f"the second process writes {arguments[0]}")

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            raise Interrupted

    if distributed.get_rank() == 1:
        safetensors.torch.save_file = refuse
        sys.addaudithook(lambda event, arguments: watch(event, arguments) if not finished else None)
    finished: list[bool] = []
    states: dict[str, Any] = {}
    for name in TRAININGS:
        logs: list[dict[str, float]] = []
        one_training(base_dir, name, folder / name / "whole", logs.append)
        states[name] = [_steady(log) for log in logs], checkpoint.random_states()["torch"].tolist()
        with pytest.raises(Interrupted):
            one_training(base_dir, name, folder / name / "stopped", stop)
        distributed.barrier()  # the next run starts after all processes of this one have ended
        one_training(base_dir, name, folder / name / "stopped", lambda _: None)
    finished.append(True)
    return states


def test_the_first_process_writes_and_all_go_on_from_it(base_dir, folder, together):
    """With dropout: it is the same for any number of processes, and after an interrupted run."""
    first, second = together["whole_trainings"]
    assert first == second
    for name in TRAININGS:
        trained = folder / "whole_trainings" / name
        assert len(first[name][0]) >= 3
        assert differing(trained / "whole" / "out", trained / "stopped" / "out") == []
        alone = one_training(base_dir, name, trained / "alone", lambda _: None)
        expected = [json.loads(line) for line in (trained / "whole" / "out" / "log.jsonl").read_text().splitlines()]
        ours = [json.loads(line) for line in (alone / "log.jsonl").read_text().splitlines()]
        assert [log["loss"] for log in expected] == pytest.approx([log["loss"] for log in ours], rel=1e-3, abs=1e-5)
        assert {path.name for path in alone.iterdir()} == {path.name for path in (trained / "whole" / "out").iterdir()}
    lines = (folder / "whole_trainings" / "grpo" / "whole" / "scratch" / "guards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def train_a_role(base_dir: Path, folder: Path) -> None:
    """Train all roles, then the worker alone, with a decay that any gradient of the planner would bring about."""
    from tests.algorithms.builders import train

    model = MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, roles=["planner", "worker"])})
    trajectories, start = episodes(), None
    for index, trajectory in enumerate(trajectories):
        trajectory.histories[0].agent = ["planner", "worker"][index % 2]
    for name, roles in (("all", ["planner", "worker"]), ("worker", ["worker"])):
        chosen = [trajectory for trajectory in trajectories if trajectory.histories[0].agent in roles]
        folders = {"out": folder / name / "out", "scratch": folder / name / "scratch"}
        spec = SFTSpec(batch_size=8, weight_decay=0.5, **SMALL)
        train(spec, model, base_dir, chosen, start=start, **folders, seed=1, on_step=lambda _: None)
        start = folders["out"]


def test_two_processes_leave_the_adapters_of_other_roles_unchanged(folder, together):
    trained = folder / "train_a_role"
    saved = {
        (name, role): (trained / name / "out" / "adapters" / role / "adapter_model.safetensors").read_bytes()
        for name in ("all", "worker")
        for role in ("planner", "worker")
    }
    assert saved["all", "planner"] == saved["worker", "planner"]
    assert saved["all", "worker"] != saved["worker", "worker"]


def refusals(base_dir: Path, folder: Path) -> dict[str, str]:
    from torch import distributed

    from components.errors import ResourceError, TrainingDiverged
    from tests.algorithms.builders import train

    result = {}
    try:
        one_training(base_dir, "sft", folder / f"apart-{distributed.get_rank()}", lambda _: None)
    except ResourceError as error:
        result["apart"] = str(error)
    folders = {"out": folder / "struck" / "out", "scratch": folder / "struck" / "scratch"}
    spec = GRPOSpec(max_kl=1e-9, **SMALL)
    try:
        train(spec, MODEL, base_dir, episodes(), start=None, reference=None, **folders, seed=1, on_step=lambda _: None)
    except TrainingDiverged as error:
        assert (folder / "struck" / "scratch" / "diverged.parquet").stat().st_size
        result["struck"] = str(error)
    return result


def test_all_processes_end_where_one_cannot_go_on(folder, together):
    """Cases: different scratch folders, of which only one has the state of an interrupted training; and a guard that
    stops."""
    first, second = together["refusals"]
    assert "found the one after 1 gradient steps. All processes must read the same scratch folder" in first["apart"]
    assert "found the one after 0 gradient steps" in second["apart"]
    assert first["struck"] == second["struck"]
    assert "high_kl" in first["struck"]
    assert list((folder / "refusals" / "struck" / "out").iterdir()) == []
