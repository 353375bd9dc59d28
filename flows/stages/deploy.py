"""Deploy stage: exports the policy in standard formats and checks that each export answers like the policy, with mode
`serve` also over HTTP."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from components.artifacts import Artifact, Draft
from components.deployment.card import ModelCard, placeless
from components.deployment.spec import DeploySpec, Format
from components.errors import EngineError, Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.json_text import read_json
from components.models.spec import ModelSpec
from components.rollout.spec import AgentSpec
from components.trajectories.schema import Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec

EVALUATIONS = ("start", "sft", "feedback")
"""Evaluations before the rounds, in order of training; the inputs are named `evaluation_start` and so on."""


class DeployStage(StageSpec):
    name: str
    """Name of the model."""
    model: ModelSpec
    agent: AgentSpec
    deploy: DeploySpec
    step: int
    """Round after which the policy was trained; 0: the start of the rounds."""
    experiment: dict[str, Any]
    """Composed config, for the model card."""

    def key_part(self) -> dict[str, Any]:
        deploy = self.deploy
        return {
            "name": self.name,
            "model": self.model.key_part(),
            "mode": deploy.mode,
            "formats": sorted(deploy.formats),
            "gguf": deploy.gguf if "gguf" in deploy.formats else None,
            "prompts": deploy.prompts,
            "max_tokens": self.agent.max_tokens,
            "step": self.step,
            "experiment": placeless(self.experiment),
        }


def deploy(spec: DeployStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write one folder per format in `deploy.formats`, with README.md, and `answers.json`, the policy's answers to
    held-out prompts. Inputs: `policy`, a checkpoint; the evaluations, or without an environment the measurements of
    held-out rows.

    Each export must answer held-out prompts like the policy; with mode `serve` the merged model also over HTTP, with
    identical tokens. Raises EngineError otherwise, and exports nothing.
    """
    from components.deployment.answers import answers_of
    from components.deployment.canary import write_answers
    from components.trajectories.stored import StoredTrajectories
    from flows.stages.episodes import warm_engine

    if spec.deploy.mode == "none":
        raise SpecError([Problem("deploy.mode", "'none' exports nothing; expected export or serve")])
    evaluations = _evaluations(inputs)
    episodes = {name: StoredTrajectories(artifact.path) for name, artifact in evaluations.items()}
    steps = len(spec.deploy.formats) + 1
    context.progress(0, steps)
    size = _write(spec, inputs, evaluations, episodes, draft, context)
    context.progress(1, steps)
    engine = warm_engine(spec.model, inputs["policy"], context)
    if evaluations:
        last = list(episodes.values())[-1]
        requests = {role: _requests(spec, last, engine.policy, role) for role in _roles(spec)}
    else:
        requests = {None: _heldout_requests(spec, inputs["answers_after"], engine.policy)}
    answers = {role: answers_of(engine, asked) for role, asked in requests.items()}
    engine.release()
    every = [list(chain(*by_role.values())) for by_role in (requests, answers)]
    write_answers(draft.path, *every)
    metrics = {"bytes": float(size)}
    for done, form in enumerate(spec.deploy.formats, 2):
        for role in requests:
            name = form if role is None else f"{form}/{role}"
            checked = _check(form, spec, draft.path / name, requests[role], answers[role], context)
            metrics |= {f"{name}/{figure}": value for figure, value in checked.items()}
        context.progress(done, steps)
    if spec.deploy.mode == "serve":
        metrics |= _served(spec, draft, *every)
    return metrics


def _roles(spec: DeployStage) -> Sequence[str | None]:
    """Return the roles with an adapter of their own; [None] for a policy that all roles share."""
    return (spec.model.lora.roles if spec.model.lora else None) or [None]


def _requests(spec: DeployStage, episodes: Sequence[Trajectory], policy: str, role: str | None) -> list[ChatRequest]:
    """Return the held-out prompts of a role, or of a policy that all roles share. Raises EngineError if no episode has
    a message of the role."""
    from components.deployment.check import opening_requests

    requests = opening_requests(
        episodes, spec.deploy.prompts, policy=policy, max_tokens=spec.agent.max_tokens, role=role
    )
    if role is not None and not requests:
        raise EngineError(
            f"no held-out prompt to compare the adapter of the role {role} on: no episode of the evaluation has a "
            "message of it; expected more evaluate.scenarios or an evaluate.temperature above 0, or deploy.mode=none"
        )
    return requests


def _heldout_requests(spec: DeployStage, answers: Artifact, policy: str) -> list[ChatRequest]:
    """Return the prompts of held-out rows of imported data, for a run without an environment."""
    from flows.stages.sample import read_answers

    sampling = Sampling(temperature=0.0, max_tokens=spec.agent.max_tokens)
    rows = read_answers(answers.path)[: spec.deploy.prompts]
    return [ChatRequest(row["messages"], row["tools"], policy, sampling) for row in rows]


def _evaluations(inputs: Inputs) -> dict[str, Artifact]:
    """Return the evaluations by name, in order of training: those of a recipe's own between EVALUATIONS and `final`."""
    named = {
        name.removeprefix("evaluation_"): artifact
        for name, artifact in inputs.items()
        if name.startswith("evaluation_")
    }
    own = [name for name in named if name not in (*EVALUATIONS, "final")]
    return {name: named[name] for name in (*EVALUATIONS, *own, "final") if name in named}


def _write(
    spec: DeployStage,
    inputs: Inputs,
    evaluations: Mapping[str, Artifact],
    episodes: Mapping[str, Sequence[Trajectory]],
    draft: Draft,
    context: Context,
) -> int:
    """Write all formats. Return their total size in bytes."""
    from components.deployment.export import export_adapter, export_gguf, export_merged
    from components.evaluation.metrics import paired_success
    from components.evaluation.sequential import alpha_of
    from components.models.attention import implementation
    from components.models.chat_template import keeps_reasoning
    from components.models.trained_weights import folder_of
    from components.models.weights import model_config, prepare

    names = list(evaluations)
    results = {name: read_json(artifact.path / "summary.json") for name, artifact in evaluations.items()}
    base_dir, learned = prepare(spec.model, context.cache), folder_of(inputs["policy"].path)
    card = ModelCard(
        name=spec.name,
        model=spec.model,
        experiment=spec.experiment,
        step=spec.step,
        stage_key=context.key,
        inputs={name: artifact.digest for name, artifact in inputs.items()},
        results=results,
        attention=implementation(model_config(base_dir)),
        keeps_reasoning=keeps_reasoning(base_dir),
        heldout={
            name: inputs[f"validation_{name}"].metrics for name in ("before", "after") if f"validation_{name}" in inputs
        },
        differences=paired_success(
            {
                f"{before} to {names[-1]}": (
                    episodes[before],
                    episodes[names[-1]],
                    alpha_of(results[before], results[names[-1]]),
                )
                for before in names[:-1]
            }
        ),
    )
    size = 0
    formats, out = spec.deploy.formats, draft.path
    if "adapter" in formats:
        base = spec.model.name
        size += export_adapter(
            base_dir, learned, out / "adapter", card.text("adapter"), base=base, revision=spec.model.revision
        )
    with tempfile.TemporaryDirectory(prefix="merged-", dir=context.scratch) as scratch:
        merged = out / "merged" if "merged" in formats else Path(scratch)
        if {"merged", "gguf"} & set(formats):
            written = export_merged(base_dir, learned, merged, card.text("merged"))
            size += written if "merged" in formats else 0
        if "gguf" in formats:
            precision = spec.deploy.gguf
            size += export_gguf(merged, out / "gguf", card.text("gguf"), name=spec.name, precision=precision)
    return size


def _check(
    form: Format,
    spec: DeployStage,
    folder: Path,
    requests: list[ChatRequest],
    answers: list[ChatCompletion],
    context: Context,
) -> dict[str, float]:
    """Compare the answers of the export, loaded with transformers, with those of the policy. Return the differences.

    Raises EngineError."""
    from components.deployment.answers import TOLERANCE, check_answers
    from components.deployment.load import load_adapter, load_gguf
    from components.models.weights import load_model, load_tokenizer, pick_device, prepare

    dtype, device = spec.model.dtype, pick_device(spec.model.device)
    precision: str = dtype
    if form == "merged":
        model, tokenizer = load_model(folder, dtype=dtype, device=device), load_tokenizer(folder)
    elif form == "adapter":
        model, tokenizer = load_adapter(prepare(spec.model, context.cache), folder, dtype=dtype, device=device)
    else:
        model, tokenizer = load_gguf(folder, dtype=dtype, device=device)
        if dtype == "float32" and spec.deploy.gguf == "f16":
            precision = "float16"
    return check_answers(form, model, tokenizer, requests, answers, TOLERANCE[precision])


def _served(
    spec: DeployStage, draft: Draft, requests: list[ChatRequest], answers: list[ChatCompletion]
) -> dict[str, float]:
    from components.deployment.check import check_serving
    from components.inference.server import engine_over_http

    model = spec.model
    serve = functools.partial(engine_over_http, max_length=model.max_length, dtype=model.dtype, device=model.device)
    checked = check_serving(draft.path / "merged", requests, answers, serve=serve)
    return {f"served/{name}": value for name, value in checked.items()}


STAGE = Stage(
    "deploy",
    3,
    DeployStage,
    "export",
    2,
    deploy,
    files={
        **{f"{name}/": f"model in the format {name}, with its README.md" for name in get_args(Format)},
        "answers.json": "the policy's answers to held-out prompts",
    },
    optional=tuple(f"{name}/" for name in get_args(Format)),
    inputs={
        "policy": "checkpoint",
        "evaluation_*": "evaluation",
        "validation_*": "validation",
        "answers_*": "answers",
    },
    order=80,
)
