"""Checks of the places where stages run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from components.algorithms.continual.spec import EWCSpec
from components.algorithms.spec import AlgorithmSpec
from components.compute.spec import ComputeSpec
from components.errors import Problem
from components.evaluation.spec import EvaluateSpec
from components.inference.spec import InferenceSpec
from components.models import precision
from components.models.spec import ModelSpec
from components.rewards.llm.spec import asked_by
from components.rewards.spec import JudgeSpec
from components.rollout.collect_spec import CollectSpec
from components.specs import Target, nearest
from flows.experiment.sections import BudgetSpec
from flows.stages import DISTRIBUTED, PLACED, PLAYING, SHARDED
from flows.stages.collect import played_together
from flows.stages.evaluate import stops_early
from flows.stages.filter import whole_collection
from flows.stages.judge import running_statistics


def stages(compute: ComputeSpec) -> Iterator[Problem]:
    """Check that `compute.stages` and `compute.prices` name stages."""
    for key, names in (("stages", compute.stages), ("prices", compute.prices)):
        for name in names:
            if name not in PLACED:
                message = f"{name!r}: expected one of {', '.join(PLACED)}"
                yield Problem(f"compute.{key}.{name}", message, nearest(name, PLACED))


def places(compute: ComputeSpec) -> Iterator[Problem]:
    """Check that `compute.places` defines each place that a stage uses."""
    chosen = {"default": compute.default} | {f"stages.{stage}": name for stage, name in compute.stages.items()}
    for key, name in chosen.items():
        if name not in compute.places:
            message = f"{name!r}: expected one of {', '.join(compute.places)}"
            yield Problem(f"compute.{key}", message, nearest(name, compute.places))


def budget(
    budget: BudgetSpec, compute: ComputeSpec, reward: Target, inference: InferenceSpec, collect: CollectSpec
) -> Iterator[Problem]:
    """Check that something has a price if the cost is limited."""
    if budget.cost is None or compute.price or any(compute.prices.values()):
        return
    teacher = collect.teacher.inference if collect.teacher is not None else inference
    if any(judge.paid for judge in asked_by(reward)) or not (inference.loads_policies and teacher.loads_policies):
        return
    message = f"{budget.cost:g}, but nothing has a price; set the hourly price of the machine: compute.price"
    yield Problem("budget.cost", message)


def remote_store(compute: ComputeSpec, store: str | None) -> Iterator[Problem]:
    """Check that remote machines can reach the artifact store."""
    for name, place in compute.places_in_use.items():
        yield from place.store_problems(name, store, "stages")


def parallel(compute: ComputeSpec) -> Iterator[Problem]:
    """Check that stages can run at the same time, if `compute.parallel` permits several."""
    if compute.parallel == 1:
        return
    used = compute.places_in_use
    if used and not any(place.concurrent for place in used.values()):
        message = f"{compute.parallel}: stages in the process of the flow run one after the other; expected 1"
        yield Problem("compute.parallel", f"{message}, or another place", "compute=process")
    for name, place in used.items():
        yield from place.parallel_problems(name, compute.parallel)


def config_file(compute: ComputeSpec) -> Iterator[Problem]:
    """Check that a place reads the file of `compute.config_file`."""
    file = compute.config_file
    if file is not None and file not in (getattr(place, "config_file", None) for place in compute.places.values()):
        yield Problem("compute.config_file", f"{file!r}: no place reads it; expected compute=accelerate")


def shards(
    compute: ComputeSpec,
    collect: CollectSpec,
    judge: JudgeSpec,
    reward: Target,
    filter: Target,
    evaluate: EvaluateSpec,
    inference: InferenceSpec,
) -> Iterator[Problem]:
    """Check that each stage with several shards can be split, and has a place where several stages can run, each of
    which uses all GPUs that it has."""
    for name in compute.stage_shards:
        if name not in SHARDED:
            message = f"{name!r}: expected a stage that can be split: {', '.join(SHARDED)}"
            yield Problem(f"compute.stage_shards.{name}", message, nearest(name, SHARDED))
    if compute.shard_rows is not None and compute.shards > 1:
        message = f"{compute.shard_rows}: set together with compute.shards={compute.shards}, the number of shards"
        yield Problem("compute.shard_rows", f"{message}; expected one of them", "compute.shards=1")
        return
    split = {stage: compute.shards_of(stage) for stage in SHARDED if compute.shards_of(stage) != 1}
    yield from _one_at_a_time(compute, split)
    for stage, count in split.items():
        name, workers = compute.placement(stage), compute.workers(count or 2)
        if name in compute.places and compute.places[name].remote and workers > 1:
            for problem in compute.places[name].parallel_problems(name, workers):
                yield replace(problem, nearest="compute.shard_workers=1")
    if inference.in_process:
        yield from _idle_gpus(compute, [stage for stage in PLAYING if stage in split])
    if split and (collect.overlap or compute.parallel > 1):
        name = "collect.overlap" if collect.overlap else "compute.parallel"
        text = "whose stages run in single processes beside the others"
        key, value, whole = _shared_setting(compute)
        shards = value if compute.shard_rows else max(count for count in split.values() if count is not None)
        yield Problem(key, f"{shards}: cannot be combined with {name}, {text}; expected {whole}")
    rewards = {"judge": reward, "evaluate": evaluate.reward or reward}
    for stage, reason in (
        *((stage, running_statistics(rewards[stage])) for stage in rewards if stage in split),
        ("collect", played_together(collect, judge.ahead) if "collect" in split else None),
        ("evaluate", stops_early(evaluate) if "evaluate" in split else None),
        ("filter", whole_collection(filter) if "filter" in split else None),
    ):
        if reason is not None:
            shown = split[stage] or f"null, with compute.shard_rows={compute.shard_rows}"
            message = f"{shown}: {stage} cannot be split: it {reason}; expected 1"
            yield Problem(f"compute.stage_shards.{stage}", message)


def _shared_setting(compute: ComputeSpec) -> tuple[str, int, str]:
    """Return the key that splits all stages, its value, and the value with which none is split."""
    if compute.shard_rows is not None:
        return "compute.shard_rows", compute.shard_rows, "null"
    return "compute.shards", compute.shards, "1"


def _one_at_a_time(compute: ComputeSpec, split: Mapping[str, int | None]) -> Iterator[Problem]:
    """Yield a problem if stages have several shards on a place that computes one stage at a time: one problem for all
    stages that `compute.shards` or `compute.shard_rows` splits, one for each other stage. split: shards of each split
    stage, None if its rows determine them."""
    alone = {
        stage: compute.placement(stage)
        for stage in split
        if (name := compute.placement(stage)) in compute.places and not compute.places[name].concurrent
    }
    key, value, whole = _shared_setting(compute)
    reason = "in the process of the flow, one part after the other; expected {}, or another place"
    shared = [stage for stage in alone if compute.stage_shards.get(stage) is None]
    if shared:
        names, stages = ", ".join(sorted({alone[stage] for stage in shared})), ", ".join(shared)
        runs = f"{stages} run on {names}" if len(shared) > 1 else f"{stages} runs on {names}"
        everywhere = compute.default == "local" and set(compute.stages.values()) <= {"local"}
        remedy = "compute=process" if everywhere else " ".join(f"compute.stages.{stage}=process" for stage in shared)
        yield Problem(key, f"{value}: {runs}, {reason.format(whole)}", remedy)
    for stage in [stage for stage in alone if stage not in shared]:
        message = f"{split[stage]}: {stage} runs on {alone[stage]}, {reason.format(1)}"
        yield Problem(f"compute.stage_shards.{stage}", message, f"compute.stages.{stage}=process")


def _idle_gpus(compute: ComputeSpec, split: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each place with machines of several GPUs of which a shard, with the engine in its process,
    uses one. split: stages with shards that generate."""
    for name, place in compute.places_in_use.items():
        stages = [stage for stage in split if compute.placement(stage) == name]
        if stages and place.gpus > 1:
            yield Problem(
                f"compute.places.{name}.accelerators",
                f"{place.gpus} GPUs: each shard of {' and '.join(stages)} has a machine of its own, and the embedded "
                "engine uses one GPU; expected machines with one GPU, or inference=vllm, which generates on all",
            )


def several_processes(
    compute: ComputeSpec,
    algorithm: AlgorithmSpec,
    model: ModelSpec,
    ewc: EWCSpec | None,
    collect: CollectSpec,
) -> Iterator[Problem]:
    """Check that stages, the number of groups, and the model support training in several processes."""
    for stage in PLACED:
        name = compute.placement(stage)
        if name not in compute.places:
            continue
        if (reason := compute.places[name].refusal(name, stage, DISTRIBUTED)) is not None:
            key = f"compute.stages.{stage}" if stage in compute.stages else "compute.default"
            yield Problem(key, f"{name!r} {reason}")
    if model.source != "hub":
        model = precision.resolve(model, "unknown", Path())  # depends neither on hardware nor on files
    for name in dict.fromkeys(compute.placement(stage) for stage in DISTRIBUTED):
        if name in compute.places:
            yield from training(compute, name, algorithm, model, ewc, collect)


def training(
    compute: ComputeSpec,
    place: str,
    algorithm: AlgorithmSpec,
    model: ModelSpec,
    ewc: EWCSpec | None,
    collect: CollectSpec,
) -> Iterator[Problem]:
    """Check that a place supports the training. `model.dtype=auto` contradicts nothing: `prerequisites` resolves it and
    checks again."""
    unsharded = "ewc" if ewc is not None else algorithm.name if algorithm.has_critic else None
    key = f"compute.places.{place}"
    if model.cuda_graphs and algorithm.gradient_checkpointing:
        text = "true: reads random states on the host, which model.cuda_graphs=true excludes; expected one of the two"
        yield Problem("algorithm.gradient_checkpointing", text)
    yield from compute.places[place].training_problems(key, model, algorithm.max_grad_norm)
    yield from compute.places[place].group_problems(key, collect.scenarios, model, unsharded)
