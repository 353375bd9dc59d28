"""Measurements of families of models for docs/reference/models.md, by a tiny random model of each family with the
tokenizer and the chat template of its published models: template, layout, exactness, a step of GRPO, certificate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM

from components.algorithms.policy import exactness
from components.algorithms.policy.packing import pack, padded_layout
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.errors import EspalierError, ResourceError
from components.evaluation.checks import PropertyCheck
from components.inference.protocol import BASE_POLICY, Sampling
from components.inference.transformers.engine import TransformersEngine
from components.inference.vllm.adapters import check_layers
from components.models import trained_weights
from components.models.distribution import Cut
from components.models.layer_kinds import stateful_layers
from components.models.spec import LoraSpec, ModelSpec
from components.rollout.spec import AgentSpec
from components.trajectories.call_forms import FORMS
from components.trajectories.chat import ChatFormat
from flows.certification.certificate import certify
from flows.certification.subject import Opening, Subject
from flows.certification.template import check_template
from flows.certification.tool_calls import check_tool_calls
from tests.algorithms import exact_families
from tests.algorithms.builders import MODEL, TEMPERATURE, batch, plain_logprobs, relative_difference, train_in
from tests.flows.faulty_environment import Sums
from tests.models import families
from tests.models.family_rows import ROWS, WINDOW, Row, origin, tokenizer_and_training
from tests.models.tiny_configs import tiny
from tests.trajectories import trl_templates
from tests.trajectories.families import LOOK_UP

MAX_LENGTH = 4096
"""`model.max_length` of the certificate."""


def measure(name: str, folder: Path, tokenizers: Path, architectures: frozenset[str]) -> dict[str, Any]:
    """Return the measurements of a family. folder: empty. tokenizers: published ones. architectures: those of vLLM, in
    lower case: transformers writes `Phimoe`, published files `PhiMoE`."""
    row, base_dir = ROWS[name], folder / "base"
    tokenizer, training = tokenizer_and_training(row, tokenizers)
    chat = ChatFormat(tokenizer)
    model = _write(row, chat, base_dir)
    spec = ModelSpec(name=str(base_dir), device="cpu", max_length=MAX_LENGTH, lora=LoraSpec(rank=4, alpha=8.0))
    measured = {"type": row.type, "models": row.models, "tokenizer": origin(row), "chat": _chat(chat)}
    measured |= {"attention": _attention(row, model), "masks": _masks(row, chat, training)}
    measured |= _exactness(base_dir, spec) | {"grpo": _grpo(base_dir, folder / "grpo")}
    measured["certificate"] = _certificate(base_dir, spec, folder / "certificate")
    adapted = _message(lambda: check_layers(base_dir, "all-linear"), folder)
    measured["vllm"] = {"architecture": type(model).__name__, "known": type(model).__name__.casefold() in architectures}
    return measured | {"vllm": measured["vllm"] | {"all_linear": adapted}}


def _write(row: Row, chat: ChatFormat, base_dir: Path) -> Any:
    """Write and return a model whose tokens depend on those before them. It ends as its template does."""
    default = AutoConfig.for_model(row.type)
    options: dict[str, Any] = {"vocab_size": max(len(chat.tokenizer), 300), "max_position_embeddings": MAX_LENGTH}
    options["eos_token_id"] = chat.end_ids if len(chat.end_ids) > 1 else chat.end_id
    if getattr(default, "vocab_size_per_layer_input", None):
        options["vocab_size_per_layer_input"] = options["vocab_size"]
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = WINDOW
        if len({*(getattr(default, "layer_types", None) or [])}) > 1 and row.type != "gemma3n_text":
            options["layer_types"] = ["sliding_attention", "full_attention"]
    config = tiny(row.type, **{**options, **row.options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(base_dir)
    chat.tokenizer.save_pretrained(base_dir)
    return model


def _chat(chat: ChatFormat) -> dict[str, Any]:
    """Return the properties of a chat template."""
    return {
        "reasoning": chat.reasoning and {"start": chat.reasoning.start, "opened": chat.reasoning.opened},
        "calls": next((name for name, form in FORMS.items() if form is chat.call_form), None),
        "system": chat.system_role,
        "alternates": chat.alternates,
        "end": chat.end,
    }


def _attention(row: Row, model: Any) -> list[str]:
    """Return the properties of a family's layers that matter for attention: of the tiny model's modules, and of the
    default configuration."""
    config, names = AutoConfig.for_model(row.type), {name for name, _ in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters()}
    kinds = {*(getattr(model.config, "layer_types", None) or [])}
    properties = {
        "sliding window": getattr(model.config, "sliding_window", None) and not kinds - {"sliding_attention"},
        "sliding window and full attention": "sliding_attention" in kinds and len(kinds) > 1,
        "sinks": any(name.endswith(".sinks") for name in parameters),
        "capped scores": getattr(config, "attn_logit_softcapping", None),
        "capped logits": getattr(config, "final_logit_softcapping", None),
        "norms of queries and keys": any(name.endswith((".q_norm", ".q_layernorm")) for name in names),
        "partial rotary positions": (getattr(config, "partial_rotary_factor", None) or 1) < 1,
        "layers without positions": 0 in (getattr(config, "no_rope_layers", None) or []),
        "latent attention": getattr(config, "kv_lora_rank", None),
        "shared keys and values": getattr(config, "num_kv_shared_layers", None),
        "distance biases": row.type == "bloom",
        "experts": any("experts" in name for name in names),
    }
    return [name for name, value in properties.items() if value] + [f"state ({x})" for x in stateful_layers(model)]


# Tokens of demonstrations


def _masks(row: Row, chat: ChatFormat, training: str | None) -> dict[str, Any]:
    """Compare the trained tokens of demonstrations with TRL's masks, or else with what the template renders after the
    prompt of each answer, by transformers."""
    name, results = row.template or row.published or "", {}
    for kind, messages, tools in trl_templates.talks(name, chat):
        try:
            answers = trl_templates.trained(chat, messages, tools)
        except EspalierError as error:
            results[kind] = str(error)
            continue
        if training is None:
            expected = trl_templates.rendered(chat, messages, tools)
        else:
            expected = trl_templates.expected(name, chat, training, messages, tools)
        results[kind] = "equal" if answers == expected else f"{answers!r}, expected {expected!r}"
    return {"by": "trl" if training else "template", "conversations": results}


# Log-probabilities and gradients


def _exactness(base_dir: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return layout, attention, and the differences from transformers in float64: of the log-probabilities, on the trie
    and on padded rows, in nats, and of the gradient; and the same of transformers in float32."""
    policy = Policy(base_dir, spec.model_copy(update={"max_length": exact_families.MAX_LENGTH}), seed=0)
    expected_S, expected_gradient = exact_families.expected(base_dir)
    logprob_S, gradient = exact_families.computed(policy)
    result = {
        "layout": exact_families.layout(policy),
        "implementation": policy.base.config._attn_implementation,
        "nats": float((logprob_S - expected_S).abs().max()),
        "gradient": relative_difference(gradient, expected_gradient),
    }
    plain_S, plain_gradient = exact_families.expected(base_dir, torch.float32)
    result["plain_nats"] = float((plain_S - expected_S).abs().max())
    result["plain_gradient"] = relative_difference(plain_gradient, expected_gradient)
    if not policy.padded:
        _use_padded_rows(policy)
        (packed,) = pack(exact_families.GIVEN, 1000, padded=True)
        with torch.no_grad():
            padded_S = policy.logprobs(packed, Cut())[0].double()
        result["padded_nats"] = float((padded_S - expected_S).abs().max())
    return result


def _use_padded_rows(policy: Any) -> None:
    policy.base.set_attn_implementation("eager")
    policy._layout = padded_layout


def _grpo(base_dir: Path, folder: Path) -> dict[str, Any]:
    """Return the relative difference of the gradient of a step of GRPO from that on padded rows with eager attention,
    of the LoRA adapter's tensors together, and the share of clipped tokens."""
    trajectories, draw = batch(), random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(base_dir, attn_implementation="eager").eval()
    for trajectory in trajectories:
        (history,) = trajectory.histories
        with torch.no_grad():
            own_S = plain_logprobs(model, history.token_ids, TEMPERATURE).tolist()
        history.logprobs = [
            own_S[place - 1] + draw.gauss(0, 0.3) if sampled else float("nan")
            for place, sampled in enumerate(history.sampled_mask())
        ]
    choose = exactness.choose

    def padded(policy: Any, max_length: int, streamed: Any = None) -> Any:
        _, transform = choose(policy, max_length, streamed)
        _use_padded_rows(policy)
        return padded_layout, transform

    gradients = []
    for number, chosen in enumerate((choose, padded)):
        with mock.patch.object(exactness, "choose", chosen):
            gradient, metrics = _step(base_dir, folder / str(number), trajectories)
        gradients.append(gradient)
    return {"difference": relative_difference(*gradients), "clipped": metrics.get("clip_fraction")}


def _step(base_dir: Path, folder: Path, trajectories: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Take a step of GRPO and return its gradient and its metrics."""
    gradient: dict[str, torch.Tensor] = {}

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradient.update({str(n): p.grad.detach().double().clone() for n, p in enumerate(parameters)})

    algorithm = GRPOSpec(max_grad_norm=1e9, max_kl=1e9, measure_kl=False)
    model = MODEL.model_copy(update={"name": str(base_dir), "source": "hub"})
    hook = register_optimizer_step_pre_hook(record)
    try:
        _, metrics, _ = train_in(folder, algorithm, base_dir, trajectories, model)
    finally:
        hook.remove()
    return gradient, metrics


# Certificate


def _certificate(base_dir: Path, spec: ModelSpec, scratch: Path) -> dict[str, Any]:
    """Return status, reason and figures of each check of the certificate with the embedded engine; the message in its
    place if the engine refuses the model, and then the checks that need no engine."""
    scratch.mkdir()
    scenarios = Sums().scenarios("train")[:16]
    asked = [{"role": "system", "content": "You add."}, {"role": "user", "content": "Add 3 and 4."}]
    engines: list[Any] = []

    def deliver(folder: Path | None) -> Any:
        if not engines:
            engines.append(TransformersEngine(base_dir, max_length=MAX_LENGTH, device="cpu"))
        version = BASE_POLICY if folder is None else trained_weights.digest(folder)
        engines[0].load_policy(version, folder and str(folder))
        return engines[0]

    subject = Subject(
        model=spec,
        agent=AgentSpec(),
        sampling=Sampling(max_tokens=16),
        base_dir=base_dir,
        openings=[Opening(scenario, [*asked], [LOOK_UP]) for scenario in scenarios[:2]],
        deliver=deliver,
        in_process=True,
        returns_tokens=True,
        loads_policies=True,
        scratch=scratch,
        make_environment=Sums,
        played=scenarios,
        timeout=60.0,
    )
    try:
        checks, refused = certify(subject), None
    except ResourceError as error:
        checks, refused = [check_template(subject), check_tool_calls(subject)], _short_message(error, base_dir.parent)
    return {"refused": refused, "checks": {check.name: _check(check, base_dir.parent) for check in checks}}


def _check(check: PropertyCheck, folder: Path) -> dict[str, Any]:
    return {
        "status": check.status,
        "reason": check.reason.replace(f"{folder}/", ""),
        "figures": {name: value for name, value in check.figures.items() if not isinstance(value, str)},
    }


# Refusals


def refusals(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield what is refused, and the message. folder: empty."""
    options = {"deepseek_v32": {"index_topk": 64}}
    for family in ("bert", "moshi", "deepseek_v32"):
        spec = exact_families.write(family, folder / family, **options.get(family, {}))
        yield f"Training of `{family}`", _message(partial(Policy, folder / family, spec, seed=0), folder)
    for family in ("hrm_text", "laguna"):
        base_dir = families.write(family, folder / family)
        spec = ModelSpec(name=str(base_dir), device="cpu", lora=LoraSpec(rank=4, alpha=8.0))
        yield f"LoRA of `{family}`", _message(partial(Policy, base_dir, spec, seed=0), folder)
    for family in ("deepseek_v32", "minimax", "recurrent_gemma"):
        base_dir = families.write(family, folder / f"engine-{family}" / family)
        make = partial(TransformersEngine, base_dir, max_length=256, device="cpu")
        yield f"Embedded engine with `{family}`", _message(make, base_dir.parent)
    for family in ("deepseek_v3", "mixtral"):
        base_dir = families.write(family, folder / f"vllm-{family}" / family)
        yield f"vLLM with adapters of `{family}`", _message(partial(check_layers, base_dir, "all-linear"), folder)
    for name in trl_templates.REFUSED:
        yield f"Template `{name}`", _message(partial(ChatFormat, trl_templates.published(name)), folder)
    chat = ChatFormat(trl_templates.published("qwen3_5_nothink"))
    messages, tools = trl_templates.TALKS["reasoning"]
    what = "Demonstrations with reasoning under `qwen3_5_nothink`"
    yield what, _message(lambda: trl_templates.trained(chat, messages, tools), folder)


def _message(refused: Callable[[], object], folder: Path) -> str | None:
    """Return the message with which something is refused, without the folder; None if it is not refused."""
    try:
        refused()
    except EspalierError as error:
        return _short_message(error, folder)
    return None


def _short_message(error: EspalierError, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "")
