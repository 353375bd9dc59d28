"""Backend of ART's client: a program for `openpipe-art` trains with the stages of a loop.

    backend = ArtBackend(root="runs")
    await model.register(backend)                                          # model: art.TrainableModel
    result = await backend.train(model, groups, learning_rate=1e-5)        # groups: list of art.TrajectoryGroup

Such a program plays its rollouts itself, so each model has a server from its registration until `close`. Each choice of
an answer has its exact tokens in the field `sample` (`components.inference.samples`), from which `train` makes the
histories: nothing is tokenized again, and a choice may be stored and trained on by another process. Messages that are
no choices are not trained on, as in ART.

The checkpoints of a model are listed by step in `ROOT/art/PROJECT/NAME.json`; a program that is started again continues
at `await model.get_step()`. Calls that arrive during a training wait, and are answered by the new policy.

Arguments and settings of ART without an equivalent are refused by name.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from components.artifacts import Artifact
from components.errors import ArtifactError, Problem, SpecError
from components.inference.app import AppOptions
from components.inference.server import ListenOptions, ModelServer
from components.json_text import read_json, write_json
from components.models import trained_weights
from flows.experiment.requests import Requests
from flows.loop.art_trajectories import episodes_of, transcript_of
from flows.loop.model import TrainableModel
from flows.loop.served_policy import ServedPolicy
from flows.recipes.outcome import RunOutcome
from flows.stages.episodes import warm_engine

CALL_SECONDS = 1200.0
"""Time limit of a call, with the training that it waits for; as that of ART's client."""

_SETTINGS = {
    "init_args.max_seq_length": "model.max_length",
    "peft_args.r": "model.lora.rank",
    "peft_args.lora_alpha": "model.lora.alpha",
    "peft_args.lora_dropout": "model.lora.dropout",
}
"""Keys of a model's `_internal_config`, with ours."""
_RATIOS = {"token": "token", "sequence": "sequence_mean"}
"""Values of `importance_sampling_level`, with ours of `algorithm.ratio`."""
TRAIN: dict[str, Any] = {
    "learning_rate": 5e-6,
    "loss_fn": "cispo",
    "ppo": False,
    "epsilon": None,
    "epsilon_high": None,
    "scale_rewards": True,
    "normalize_advantages": True,
    "importance_sampling_level": "token",
    "packed_sequence_length": None,
    "allow_training_without_logprobs": False,
    "verbose": False,
}
"""Arguments of `backend.train` that have an effect, with ART's defaults; `verbose` has none, because stages are always
reported."""
_NEUTRAL: dict[str, Any] = {
    "adam_params": None,
    "advantage_balance": 0.0,
    "kimi_k2_tau": None,
    "kl_penalty_coef": 0.0,
    "kl_penalty_reference_step": None,
    "kl_ref_adapter_path": None,
    "logprob_calculation_chunk_size": 1024,
    "loss_fn_config": None,
    "mask_prob_ratio": False,
    "max_negative_advantage_importance_sampling_weight": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "plot_tensors": False,
    "precalculate_logprobs": False,
    "save_checkpoint": True,
    "scale_learning_rate_by_reward_std_dev": False,
    "truncated_importance_sampling": None,
}
"""Arguments of `train` in ART without an equivalent, with the values that have no effect."""


@dataclass(frozen=True)
class ArtTrainResult:
    """Result of a training, with the fields of `art.LocalTrainResult`."""

    step: int
    metrics: dict[str, float]
    checkpoint_path: str | None
    """Folder of the trained weights; None before the first training."""


def _refuse(where: str, values: Mapping[str, Any], neutral: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Raise SpecError for each value without an equivalent. neutral: values that may be given; expected: names that
    have an equivalent."""
    text = f"has no equivalent in Espalier; leave it out. Expected {', '.join(expected)}"
    problems = [
        Problem(f"{where}({name})", f"{value!r:.60}: {text}")
        for name, value in values.items()
        if name not in neutral or value != neutral[name]
    ]
    if problems:
        raise SpecError(problems)


def _choice(name: str, value: str, choices: Mapping[str, Any]) -> Any:
    """Return ours of a value of ART. Raises SpecError for another one."""
    if value not in choices:
        raise SpecError.at(f"backend.train({name})", f"{value!r}: expected one of {', '.join(choices)}")
    return choices[value]


def _metrics(checkpoint: Artifact) -> dict[str, float]:
    """Return the metrics of a training under the names that ART logs."""
    named = {"loss": "loss/train", "grad_norm": "loss/grad_norm"}
    return {named.get(name, f"train/{name}"): value for name, value in checkpoint.metrics.items()}


class _ArtModel:
    """Registered model: its policy, its server, and its checkpoints by step."""

    def __init__(self, policy: TrainableModel, file: Path, name: str):
        self.policy, self.file, self.name = policy, file, name
        self.steps = _steps(file)
        self.engine = ServedPolicy()
        self.server: ModelServer | None = None
        self.key = secrets.token_urlsafe(24)
        self.lock = asyncio.Lock()
        policy.step = max(self.steps, default=0)
        if policy.step:
            key = self.steps[policy.step]
            policy.checkpoint = policy.context.store.find(key) if key else None
            if key and policy.checkpoint is None:
                raise ArtifactError(
                    f"the checkpoint of step {policy.step} of {name} is not in {policy.context.store}; delete {file} "
                    "to train from the base model, or remove its last step"
                )
            policy.run.outcome = RunOutcome(checkpoint=policy.checkpoint, step=policy.step, begin=policy.step)

    def load(self) -> None:
        """Serve the checkpoint of the last step."""
        policy, spec = self.policy, self.policy.spec
        model = spec.resolve_dtypes(spec.model, "collect")
        engine = warm_engine(model, policy.checkpoint, policy.context, Requests(spec).inference)
        self.engine.use(engine, policy.step)

    def folder(self, step: int) -> Path:
        """Return the folder with the trained weights of a step. Raises SpecError for one without a checkpoint."""
        key = self.steps.get(step)
        artifact = self.policy.context.store.find(key) if key else None
        if artifact is None:
            have = ", ".join(str(step) for step, key in sorted(self.steps.items()) if key) or "none yet"
            raise SpecError.at("step", f"{step}: has no checkpoint; those of {self.name} are {have}")
        return Path(trained_weights.folder_of(artifact.path))


def _steps(file: Path) -> dict[int, str]:
    """Return the keys of the checkpoints of a model by step; empty for a step before the first training."""
    return {int(step): key for step, key in read_json(file).items()} if file.is_file() else {}


def _restore_transformers() -> None:
    """Undo the patch that importing ART applies to transformers: it is for older versions, and breaks each model."""
    if (patches := sys.modules.get("art.transformers.patches")) is not None:
        from transformers import masking_utils

        masking_utils._preprocess_mask_arguments = patches._preprocess_mask_arguments


class ArtBackend:
    """Backend for `art.TrainableModel.register`.

    root: folder of all files. seed: of the trainings. overrides: further settings as on the command line, such as
    `collect.temperature=0.7` or `inference=vllm`; they hold for each model. A model's `base_model` is an option of
    `model` (`conf/model`), or a name on the hub. Methods raise SpecError for what ART can do and Espalier cannot."""

    def __init__(self, root: str | Path = "runs", *, seed: int = 0, overrides: Sequence[str] = ()):
        self._root, self._seed, self._overrides = Path(root).absolute(), seed, overrides
        self._models: dict[Path, _ArtModel] = {}

    async def register(self, model: Any) -> None:
        """Compose the settings of a model, and read its checkpoints. A prompted model (`art.Model`) needs none."""
        _restore_transformers()
        file = self._file(model.project, model.name)
        if not model.trainable or file in self._models:
            return
        internal = dict(getattr(model, "_internal_config", None) or {})
        flat = {
            f"{section}.{key}" if isinstance(values, Mapping) else section: value
            for section, values in internal.items()
            for key, value in (values.items() if isinstance(values, Mapping) else [("", values)])
        }
        unknown = {name: value for name, value in flat.items() if name not in _SETTINGS}
        _refuse("_internal_config", unknown, {}, [*_SETTINGS, "or overrides of the backend"])
        settings = [f"{_SETTINGS[name]}={value}" for name, value in flat.items()]
        overrides = [*settings, *self._overrides] if settings else self._overrides
        policy = TrainableModel(
            model.name, base=model.base_model, root=self._root, seed=self._seed, overrides=overrides
        )
        self._models[file] = _ArtModel(policy, file, model.name)

    async def _prepare_backend_for_training(self, model: Any, config: Mapping[str, Any] | None) -> tuple[str, str]:
        """Start the model's server and return its address and its key."""
        served, arguments = self._model(model), dict((config or {}).get("server_args") or {})
        other = {name: value for name, value in (config or {}).items() if name != "server_args"}
        listening = {name: arguments.pop(name) for name in ("host", "port", "api_key") if name in arguments}
        _refuse("_openai_client_config", {**other, **arguments}, {}, ["server_args with host, port, api_key"])
        if served.server is None:
            served.key = listening.get("api_key") or served.key
            listen = ListenOptions(listening.get("host") or "127.0.0.1", listening.get("port") or 0, key=served.key)
            await served.policy.run.do(served.load)
            tokens = served.policy.spec.agent.max_tokens
            options = AppOptions(timeout=CALL_SECONDS, default_max_tokens=tokens, samples=True)
            server = ModelServer(served.engine, served.name, options, listen)  # type: ignore[arg-type]  # loads no adapters
            served.server = server.__enter__()
        return served.server.url, served.key

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """Return the model's name in requests. step: None: the last one; another step is answered with HTTP 409."""
        name = str(getattr(model, "inference_model_name", None) or model.name) if not model.trainable else model.name
        return name if step is None else f"{name}@{step}"

    async def _get_step(self, model: Any) -> int:
        return self._model(model).policy.step

    async def train(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        **arguments: Any,
    ) -> ArtTrainResult:
        """Train a model on groups as one step and return ART's result, with the loss of ART: CISPO or PPO, advantages
        divided by the deviation of their group, the mean of trajectories. The step counts even if all rewards of each
        group are equal, and nothing is trained. arguments: those of TRAIN, with its defaults.

        Raises SpecError for arguments without an equivalent, and for trajectories without the tokens that the policy
        sampled unless `allow_training_without_logprobs`."""
        served, groups, started = self._model(model), list(trajectory_groups), time.monotonic()
        others = {name: value for name, value in arguments.items() if name not in TRAIN}
        _refuse("backend.train", others, _NEUTRAL, [*TRAIN])
        wanted = {**TRAIN, **arguments}
        epsilon, packed_sequence_length = wanted["epsilon"], wanted["packed_sequence_length"]
        loss = _choice(
            "loss_fn",
            "ppo" if wanted["ppo"] else wanted["loss_fn"],
            {"cispo": ("cispo", 1.0, 4.0), "ppo": ("grpo", 0.2, None)},
        )
        algorithm, low, high = loss
        low = low if epsilon is None else epsilon
        settings: dict[str, Any] = {
            "learning_rate": wanted["learning_rate"],
            "clip_low": low,
            "clip_high": next(value for value in (wanted["epsilon_high"], high, low) if value is not None),
            "dual_clip": None,
            "scale": "group" if wanted["scale_rewards"] and wanted["normalize_advantages"] else "none",
            "normalization": "sequences",
            "ratio": _choice("importance_sampling_level", wanted["importance_sampling_level"], _RATIOS),
            **({} if packed_sequence_length is None else {"pack_tokens": packed_sequence_length}),
        }
        trainable = [group for group in groups if len({trajectory.reward for trajectory in group}) > 1]
        metrics = {"data/step_num_groups_trainable": float(len(trainable))}
        policy = served.policy
        episodes = episodes_of(groups, policy.spec.collect, with_messages=wanted["allow_training_without_logprobs"])
        metrics |= await self._step(
            served, (lambda: policy.train(episodes, algorithm, **settings)) if trainable else None
        )
        metrics["time/step_trainer_s"] = time.monotonic() - started
        folder = str(served.folder(policy.step)) if policy.checkpoint is not None else None
        return ArtTrainResult(policy.step, metrics, folder)

    async def _train_sft(
        self, model: Any, trajectories: Iterable[Any], config: Any, dev_config: Mapping[str, Any], verbose: bool = False
    ) -> AsyncIterator[dict[str, float]]:
        """Train a model on all assistant messages as one step, and yield its metrics."""
        _refuse("train_sft", dev_config, {}, ["TrainSFTConfig with learning_rate, batch_size"])
        if not isinstance(config.learning_rate, float | int):
            raise SpecError.at("train_sft(learning_rate)", "a list of rates has no equivalent; expected a number")
        served, groups = self._model(model), [[transcript_of(trajectory)] for trajectory in trajectories]
        settings: dict[str, Any] = {"learning_rate": config.learning_rate, "schedule": "constant"}
        settings |= {} if config.batch_size == "auto" else {"batch_size": config.batch_size}
        train = served.policy.train
        yield await self._step(served, lambda: train(groups, "sft", filter="everything", **settings))

    async def _step(self, served: _ArtModel, train: Callable[[], Any] | None) -> dict[str, float]:
        """Count a step, train, serve its policy, and return the metrics. train: None: the policy stays. Calls wait for
        the end."""
        policy = served.policy
        async with served.lock, served.engine.replaced():
            if train is not None:
                await train()
            else:
                policy.step += 1
            served.steps[policy.step] = "" if policy.checkpoint is None else policy.checkpoint.key
            write_json(served.file, served.steps)
            await policy.run.do(served.load)
        return {} if train is None or policy.checkpoint is None else _metrics(policy.checkpoint)

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: Sequence[int]) -> None:
        """Delete the checkpoints of other steps, except those that another step or another model needs."""
        served = self._model(model)
        remaining = {step: key for step, key in served.steps.items() if step in (*steps_to_keep, served.policy.step)}
        write_json(served.file, remaining)
        needed = {key for file in self._root.glob("art/**/*.json") for key in _steps(file).values()}
        for key in set(served.steps.values()) - needed - {""}:
            served.policy.context.store.discard(key, "deleted by delete_checkpoints")
        served.steps = remaining

    async def _experimental_pull_model_checkpoint(
        self,
        model: Any,
        *,
        step: int | str | None = None,
        local_path: str | None = None,
        verbose: bool = False,
        **s3: Any,
    ) -> str:
        """Return the folder with the trained weights of a step, or copy it to `local_path`."""
        _refuse("pull_model_checkpoint", s3, {"s3_bucket": None, "prefix": None}, ["step, local_path"])
        served = self._model(model)
        folder = served.folder(served.policy.step if step in (None, "latest") else int(step))
        if local_path is not None:
            shutil.copytree(folder, local_path, dirs_exist_ok=True)
        return str(local_path or folder)

    async def _experimental_fork_checkpoint(
        self,
        model: Any,
        from_model: str,
        from_project: str | None = None,
        not_after_step: int | None = None,
        verbose: bool = False,
        **s3: Any,
    ) -> None:
        """Begin a model with the last checkpoint of another one. Call it before the model is registered."""
        _refuse("fork_checkpoint", s3, {"from_s3_bucket": None, "prefix": None}, ["from_model, not_after_step"])
        file, steps = (
            self._file(model.project, model.name),
            _steps(self._file(from_project or model.project, from_model)),
        )
        chosen = [
            step
            for step, key in steps.items()
            if key and step <= (math.inf if not_after_step is None else not_after_step)
        ]
        if not chosen:
            have = ", ".join(map(str, sorted(steps))) or "none"
            raise SpecError.at("from_model", f"{from_model}: no checkpoint to begin with; its steps are {have}")
        if file in self._models or file.exists():
            raise SpecError.at("fork_checkpoint", f"{model.name} has begun; expected a model that is not registered")
        write_json(file, {max(chosen): steps[max(chosen)]})

    async def close(self) -> None:
        """Stop the servers and end the runs, with their reports."""
        for served in self._models.values():
            if served.server is not None:
                served.server.close()
            await served.policy.run.do(served.policy.run.close)
            served.policy.context.warm.close()
        self._models = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _file(self, project: str, name: str) -> Path:
        for part in (project, name):
            if not re.fullmatch(r"\w[\w .-]*", part):
                text = "expected letters, digits, spaces, '.', '_' and '-', because it names a file"
                raise SpecError.at("art.TrainableModel", f"{part!r}: {text}")
        return self._root / "art" / project / f"{name}.json"

    def _model(self, model: Any) -> _ArtModel:
        file = self._file(model.project, model.name)
        if file not in self._models:
            raise SpecError.at("model", f"{model.name}: is not registered; await model.register(backend) first")
        return self._models[file]
