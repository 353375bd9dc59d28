"""One gradient step of GRPO on the same trajectories: ours, TRL's GRPOTrainer, and padded batches of our own.

    python tests/benchmarks/train_step.py [--json] [--workload a ...] [--repeat 3] [--model smollm2|tiny] [--scale 1]

Groups of 8, LoRA of rank 8 on all linear layers, float32 on a CPU:

    a   one turn: prompt 400 tokens, answers of 100, all different
    b   agent: 1,200 tokens of system, tools and task, 6 turns with answers of 30 and tool results of 60, all different
        from the first answer on
    c   nothing shared, lengths from 100 to 1,500
    d   as b, and branching: at each turn the group splits in two until each is alone
    e   eight groups: prompts of 1,024 tokens, answers of 1,024; only in `tests.benchmarks.gpu`

`ours` is `train_policy_gradient` with its AdamW step; `trl` a step of TRL's trainer, which gets the episodes through
`rollout_func` with `env_mask`, with its own loss (advantages by the sample's standard deviation), no KL and no gradient
checkpointing; `padded` is the common form: rows filled up to the longest, scaled dot-product
attention of transformers, logits of all positions from the first answer on. Each has a micro-batch (ours: tokens of a
pack) that stays below 20 GB. The three run in turn in one process; memory is the most that is resident during a step
beyond what was before it, with all three models loaded. Ratios are of the medians; tokens are those of the
trajectories, padding and repetition not counted.

`bound` is the ratio of counted operations, forward and backward (base weights have no gradient of their own): linear
layers, attention and head of the padded batch, over those of the distinct tokens with the head at the tokens that are
learned. `grad_rel_error` compares the gradients of ours and padded, both in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CODE = Path(__file__).resolve().parents[2]
MODELS = {"tiny": ("tiny", "random"), "smollm2": ("smollm2-135m-instruct", "package")}
FORMS = ("ours", "trl", "padded")
GROUP = 8
ROWS = {"a": 8, "b": 2, "c": 2, "d": 2}
"""Rows of a micro-batch of TRL's and of the padded one: the largest power of two with which TRL's stays below 20 GB
with SmolLM2-135M."""
STEPS = {"a": 2, "b": 1, "c": 1, "d": 1}
"""Of TRL's trainer, of which the last is timed: the first of (a) takes a twentieth longer. Those of the others take
minutes."""
PACK_TOKENS = {"a": 8192, "b": 8192, "c": 4096, "d": 8192}
"""Ours: a whole group in one pack; of c, where nothing is shared, as much as stays below TRL's memory."""


@dataclass(frozen=True)
class Episode:
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    reward: float
    group: int = 0

    @property
    def prompt(self) -> int:
        """Tokens before the first answer."""
        return self.sampled.index(True)


def workload(name: str, vocabulary: int, scale: float) -> list[Episode]:
    draw = random.Random(name)

    def tokens(count: float) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(max(2, round(count * scale))))

    def episode(*parts: tuple[bool, tuple[int, ...]], group: int = 0) -> Episode:
        return Episode(
            tuple(token for _, each in parts for token in each),
            tuple(sampled for sampled, each in parts for _ in each),
            draw.random(),
            group,
        )

    if name == "a":
        prompt = tokens(400)
        return [episode((False, prompt), (True, tokens(100))) for _ in range(GROUP)]
    if name == "c":
        lengths = [100 + index * 1400 / (GROUP - 1) for index in range(GROUP)]
        return [episode((False, tokens(length / 2)), (True, tokens(length / 2))) for length in lengths]
    if name == "e":
        prompts = [tokens(1024) for _ in range(8)]
        parts = [(number, prompt, tokens(1024)) for number, prompt in enumerate(prompts) for _ in range(GROUP)]
        return [episode((False, prompt), (True, answer), group=number) for number, prompt, answer in parts]
    histories = [[(False, tokens(1200))]] * GROUP
    for turn in range(6):
        apart = GROUP if name == "b" else min(GROUP, 2 ** (turn + 1))
        answers = [[(True, tokens(30)), (False, tokens(60))] for _ in range(apart)]
        histories = [[*history, *answers[index * apart // GROUP]] for index, history in enumerate(histories)]
    return [episode(*history) for history in histories]


# --- counted operations -----------------------------------------------------------------------------------------------


def multiplications(config: Any, linear: int, tokens: int, seen: int, predicted: int) -> float:
    """Return the multiplications of a gradient step, forward and backward. Gradients of attention cost two and a half
    times its forward pass, those of a frozen linear layer as much as it.

    linear: weights of all linear layers but the head. tokens: computed tokens. seen: pairs of a token and one that it
    attends to. predicted: tokens whose logits are computed.
    """
    pairs = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # score and value, one each
    return 2 * linear * tokens + 3.5 * pairs * seen + 2 * config.hidden_size * config.vocab_size * predicted


@dataclass(frozen=True)
class Trie:
    """Counts of the prefix tries of all groups. The last token of an episode is predicted and is no node."""

    nodes: int
    seen: int
    """Pairs of a node and one on its path."""
    predicting: int
    """Nodes after which a token was sampled."""


def trie(episodes: list[Episode]) -> Trie:
    numbers: dict[tuple[int, int], int] = {}
    seen, predicting = 0, set()
    for one in episodes:
        node = -1 - one.group
        for at, token in enumerate(one.token_ids[:-1]):
            if (node, token) not in numbers:
                numbers[node, token] = len(numbers)
                seen += at + 1
            node = numbers[node, token]
            if one.sampled[at + 1]:
                predicting.add(node)
    return Trie(len(numbers), seen, len(predicting))


def bound(episodes: list[Episode], rows: int, config: Any, linear: int) -> float:
    padded = 0.0
    for start in range(0, len(episodes), rows):
        part = episodes[start : start + rows]
        longest = max(len(one.token_ids) for one in part)
        predicted = longest - min(one.prompt for one in part)
        seen = longest * (longest + 1) // 2
        padded += len(part) * multiplications(config, linear, longest, seen, predicted)
    shared = trie(episodes)
    return padded / multiplications(config, linear, shared.nodes, shared.seen, shared.predicting)


# --- the three forms --------------------------------------------------------------------------------------------------


def model_spec(name: str) -> Any:
    from components.models.spec import LoraSpec, ModelSpec

    package, source = MODELS[name]
    return ModelSpec(name=package, source=source, device="cpu", lora=LoraSpec(rank=8, alpha=16.0))  # type: ignore[arg-type]


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-9)  # so small that every step starts from the same policy


def synchronize(device: str) -> None:
    """Wait for the kernels that run on a GPU, before the clock is read."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


class Ours:
    def __init__(
        self,
        base_dir: Path,
        spec: Any,
        episodes: list[Episode],
        rows: int,
        scratch: Path,
        settings: dict[str, Any] | None = None,
    ):
        """settings: options of the algorithm besides the learning rate; None leaves out what the others do not compute,
        and packs `rows` tokens."""
        from components.algorithms.policy.policy import Policy
        from components.algorithms.policy_gradient.spec import GRPOSpec

        self.policy = Policy(base_dir, spec, seed=0)
        self.optimizer = adamw(list(self.policy.parameters.values()))
        if settings is None:
            settings = {"pack_tokens": rows, "max_grad_norm": 1e9, "measure_kl": False}
        self.spec = GRPOSpec(learning_rate=1e-9, **settings)
        self.scratch = scratch
        self.use(episodes)

    def use(self, episodes: list[Episode]) -> None:
        """Take further steps on these episodes."""
        from components.trajectories.schema import History, Message, Scenario, Trajectory

        self.trajectories = []
        for index, one in enumerate(episodes):
            messages, start = [], 0
            for at in range(1, len(one.sampled) + 1):
                if at == len(one.sampled) or one.sampled[at] != one.sampled[start]:
                    role = "assistant" if one.sampled[start] else "tool"
                    messages.append(Message(role, "", span=(start, at) if one.sampled[start] else None))  # type: ignore[arg-type]
                    start = at
            unknown = [float("nan")] * len(one.token_ids)  # the sampler is the policy itself
            history = History(messages, list(one.token_ids), unknown)
            scenario = Scenario(f"s{one.group}", {}, "train")
            made = Trajectory(f"e{index}", scenario, index, [history], sampling={"temperature": 1.0})
            made.reward = one.reward
            self.trajectories.append(made)

    def step(self) -> float:
        from components.algorithms.policy_gradient.trainer import train_policy_gradient
        from components.algorithms.trainer import TrainingContext

        seconds: list[float] = []

        def stop(metrics: Any) -> None:
            synchronize(self.policy.device)
            seconds.append(time.perf_counter() - start)

        context = TrainingContext(
            policy=self.policy,
            optimizer=self.optimizer,
            model=self.policy.spec,
            base_dir=Path(),
            out=Path(),
            trajectories=self.trajectories,
            scratch=self.scratch,
            seed=0,
            on_step=stop,
        )
        synchronize(self.policy.device)
        start = time.perf_counter()
        train_policy_gradient(self.spec, context)
        return seconds[0]

    def gradient(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        hook = self.optimizer.register_step_pre_hook(lambda *_: kept.update(grads(self.policy.model)))
        while not kept:  # with float16, a step whose scaled gradients overflow is skipped, and the scale is halved
            self.step()
        hook.remove()
        return kept


class Plain:
    """A PEFT model of transformers with the adapter of a fresh policy."""

    def __init__(self, base_dir: Path, spec: Any, dtype: str | None = None):
        """dtype: that of all weights, adapter included; None means that of `spec` with an adapter in float32."""
        import torch
        from peft import LoraConfig, get_peft_model

        from components.models.weights import load_model, pick_device

        self.spec, self.device = spec, pick_device(spec.device)
        base = load_model(base_dir, dtype=spec.dtype, device=self.device)
        base.set_attn_implementation("sdpa")
        torch.manual_seed(0)
        lora = spec.lora
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        self.model = get_peft_model(base, config)
        if dtype is not None:
            self.model.to(getattr(torch, dtype))


class Padded(Plain):
    def __init__(
        self, base_dir: Path, spec: Any, episodes: list[Episode], rows: int, scratch: Path, dtype: str | None = None
    ):
        from components.algorithms.loop.loss_scale import LossScale

        super().__init__(base_dir, spec, dtype)
        self.model.eval()
        self.loss_scale = LossScale.of(spec.dtype)
        self.episodes, self.rows = episodes, rows
        self.optimizer = adamw([one for one in self.model.parameters() if one.requires_grad])

    def _backward(self) -> None:
        import torch

        rewards = torch.tensor([one.reward for one in self.episodes], device=self.device)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        count = sum(sum(one.sampled) for one in self.episodes)
        for start in range(0, len(self.episodes), self.rows):
            logps_BTV, logps_BT, learned_BT = self._forward(self.episodes[start : start + self.rows])
            with torch.no_grad():
                -(logps_BTV.exp() * logps_BTV).sum(-1).mean()  # the entropy, which every trainer shows
            ratio_BT = (logps_BT - logps_BT.detach()).exp()
            advantage_B1 = advantages[start : start + self.rows, None]
            loss_BT = -torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(0.8, 1.2) * advantage_B1)
            self.loss_scale.backward((loss_BT * learned_BT).sum() / count)
        self.loss_scale.unscale(self.model.parameters())

    def _forward(self, part: list[Episode]) -> tuple[Any, Any, Any]:
        """Return the log-probabilities of all tokens and of the next ones, and the mask of sampled ones, from the first
        answer on."""
        import torch

        def tensor(rows: list[list[Any]]) -> Any:
            return torch.tensor(rows, device=self.device)

        longest = max(len(one.token_ids) for one in part)
        first = min(one.prompt for one in part)
        ids_BT = tensor([[*one.token_ids, *[0] * (longest - len(one.token_ids))] for one in part])
        real_BT = tensor([[1] * len(one.token_ids) + [0] * (longest - len(one.token_ids)) for one in part])
        learned_BT = tensor([[*one.sampled, *[False] * (longest - len(one.token_ids))] for one in part])
        given = {"input_ids": ids_BT, "attention_mask": real_BT, "use_cache": False}
        logits_BTV = self.model(**given, logits_to_keep=longest - first + 1).logits[:, :-1]
        if logits_BTV.itemsize < 4:
            logits_BTV = logits_BTV.float()
        logps_BTV = logits_BTV.log_softmax(-1)
        return logps_BTV, logps_BTV.gather(-1, ids_BT[:, first:, None])[..., 0], learned_BT[:, first:]

    def logprobs(self) -> Any:
        """Return the log-probabilities of the sampled tokens of all episodes, in their order."""
        import torch

        parts = []
        with torch.no_grad():
            for start in range(0, len(self.episodes), self.rows):
                _, logps_BT, learned_BT = self._forward(self.episodes[start : start + self.rows])
                parts.append(logps_BT[learned_BT])
        return torch.cat(parts)

    def step(self) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return time.perf_counter() - start

    def gradient(self) -> dict[str, Any]:
        while True:
            self._backward()
            found = grads(self.model)
            self.optimizer.zero_grad(set_to_none=True)
            if not self.loss_scale.enabled or all(bool(one.isfinite().all()) for one in found.values()):
                return found
            self.loss_scale.update(overflowed=True)


class Clock:
    """Reads the clock at both ends of steps."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: list[float] = []

    def begin(self) -> None:
        synchronize(self.device)
        self._start = time.perf_counter()

    def end(self) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._start)


class Trl(Plain):
    steps = 1

    def __init__(self, base_dir: Path, spec: Any, episodes: list[Episode], rows: int, scratch: Path):
        import trl  # noqa: F401  so that its imports are not taken for memory of the step

        super().__init__(base_dir, spec)
        self.base_dir, self.episodes, self.rows, self.scratch = base_dir, episodes, rows, scratch

    def step(self) -> float:
        clock = Clock(self.device)
        self.train(self.steps, clock)
        return clock.seconds[-1]

    def train(self, steps: int, clock: Any, **settings: Any) -> None:
        """Take steps between `clock.begin()` and `clock.end()`. settings: further ones of `GRPOConfig`."""
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import torch
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from components.models.weights import load_tokenizer

        episodes = self.episodes

        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            return {
                "prompt_ids": [list(one.token_ids[: one.prompt]) for one in episodes],
                "completion_ids": [list(one.token_ids[one.prompt :]) for one in episodes],
                "logprobs": [[0.0] * (len(one.token_ids) - one.prompt) for one in episodes],
                "env_mask": [[int(sampled) for sampled in one.sampled[one.prompt :]] for one in episodes],
                "judged": [one.reward for one in episodes],
            }

        def reward(judged: list[float], **others: Any) -> list[float]:
            return judged

        class Ends(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.end()

        config = GRPOConfig(
            output_dir=str(self.scratch / "trl"),
            per_device_train_batch_size=self.rows,
            gradient_accumulation_steps=len(episodes) // self.rows,
            num_generations=GROUP,
            max_steps=steps,
            learning_rate=1e-9,
            max_grad_norm=1e9,
            beta=0.0,
            loss_type="dapo",
            max_completion_length=max(len(one.token_ids) - one.prompt for one in episodes),
            gradient_checkpointing=False,  # its default recomputes the forward pass: slower, and it fits without
            bf16=self.spec.dtype == "bfloat16",
            fp16=self.spec.dtype == "float16",
            use_cpu=self.device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            **settings,
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer = GRPOTrainer(
                model=self.model,
                reward_funcs=reward,
                args=config,
                train_dataset=Dataset.from_dict({"prompt": [f"x{number}" for number in range(len(episodes) // GROUP)]}),
                processing_class=load_tokenizer(self.base_dir),
                rollout_func=rollout,
                callbacks=[Ends()],
            )
            trainer.train()
        torch.manual_seed(0)


def grads(model: Any) -> dict[str, Any]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


CLASSES: dict[str, Any] = {"ours": Ours, "trl": Trl, "padded": Padded}


# --- measuring --------------------------------------------------------------------------------------------------------


def rows_of(form: str, name: str, options: argparse.Namespace) -> int:
    if form == "ours":
        return options.pack_tokens or PACK_TOKENS[name]
    return options.rows or ROWS[name]


def build(form: str, name: str, episodes: list[Episode], options: argparse.Namespace, folder: Path) -> Any:
    from components.models import weights

    base_dir = weights.prepare(model_spec(options.model), options.cache)
    return CLASSES[form](base_dir, model_spec(options.model), episodes, rows_of(form, name, options), folder / form)


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    from components.models import weights

    vocabulary = json.loads((weights.prepare(model_spec(options.model), options.cache) / "config.json").read_text())
    episodes = workload(name, vocabulary["vocab_size"], options.scale)
    tokens = sum(len(one.token_ids) for one in episodes)
    forms = {form: build(form, name, episodes, options, folder) for form in FORMS}
    ours, padded = forms["ours"].gradient(), forms["padded"].gradient()
    difference = sum((ours[key] - padded[key]).square().sum() for key in ours).sqrt()
    size = sum(value.square().sum() for value in padded.values()).sqrt()
    config = forms["padded"].model.get_base_model().config
    linear = sum(
        module.weight.numel()
        for where, module in forms["ours"].policy.model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in where
    )
    most = bound(episodes, rows_of("padded", name, options), config, linear)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    forms["trl"].steps = STEPS[name]
    peaks: dict[str, float] = dict.fromkeys(FORMS, 0.0)
    for _ in range(options.repeat):
        for form in FORMS:
            took, peak = with_peak(forms[form].step)
            seconds[form].append(took)
            peaks[form] = max(peaks[form], peak)
    middle = {form: statistics.median(each) for form, each in seconds.items()}
    return {
        "tokens": tokens,
        "distinct_tokens": trie(episodes).nodes,
        **{f"{form}_seconds": summary(each) for form, each in seconds.items()},
        **{f"{form}_tokens_per_s": round(tokens / each, 1) for form, each in middle.items()},
        **{f"{form}_peak_mb": each for form, each in peaks.items()},
        "ratio_vs_trl": round(middle["trl"] / middle["ours"], 3),
        "ratio_vs_padded": round(middle["padded"] / middle["ours"], 3),
        "bound": round(most, 3),
        "fraction_of_bound": round(middle["padded"] / middle["ours"] / most, 3),
        "memory_ratio_vs_trl": round(peaks["ours"] / peaks["trl"], 3),
        "grad_rel_error": float(difference / size),
    }


def summary(values: list[float]) -> dict[str, float]:
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def with_peak(step: Callable[[], T]) -> tuple[T, float]:
    """Return the step's result, and the MB that it needed beyond what was resident before it."""
    before = trimmed_mb()
    result = step()
    return result, round(highest_mb() - before, 1)


def trimmed_mb() -> float:
    """Return freed memory to the system, and the resident MB, from which `highest_mb` starts again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc: what the others have freed goes back
    Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS
    return highest_mb()


def highest_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    parser.add_argument("--workload", nargs="+", choices="abcd", default=list("abcd"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a quick look")
    parser.add_argument("--rows", type=int, help="of a micro-batch of TRL's and of the padded one")
    parser.add_argument("--pack-tokens", type=int)
    parser.add_argument("--cache", type=Path, help="folder of converted weights; without it they are converted anew")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="espalier-train-step-") as temporary:
        folder = Path(temporary)
        options.cache = options.cache or folder
        results = {}
        for name in options.workload:
            results[name] = found = measure(name, options, folder)
            if not options.json:
                print(name, json.dumps(found, indent=1), flush=True)
    print(json.dumps({"model": options.model, **results}))


if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    main()
