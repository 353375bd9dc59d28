"""Model card: what was trained and how, the measured results, usage, and limits.

A card depends on its arguments alone: no clock, no run id, no path of this machine. Equal inputs give an equal card, so
an export can be cached under its stage key. Config keys that only affect where and how fast a run executes are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from components.deployment.spec import Format
from components.models.spec import ModelSpec
from components.redaction import mask

PLACEMENT = frozenset(
    {
        "allow",
        "compute",
        "concurrency",
        "device",
        "fork",
        "key_variable",
        "retry_for",
        "root",
        "timeout",
        "tracking",
        "url",
        "wait_for",
    }
)
"""Config keys that do not affect a result, and the run from which a fork starts: its policy is an input."""


_SELECTED = (
    "- The policy was chosen by these same scenarios, as the best of several: on others it probably does worse than "
    "the results say.\n"
)

_KEPT = (
    "- Prompts keep the reasoning of earlier answers (`model.keep_reasoning`). Espalier's server does so; a server "
    "that renders the chat template drops it, and the model then reads other prompts than in training.\n"
)


@dataclass(frozen=True)
class ModelCard:
    """Facts of a trained model, for the cards of its exports."""

    name: str
    model: ModelSpec
    experiment: Mapping[str, Any]
    """Composed config."""
    step: int
    """Last finished round of the policy; 0 is the start of the rounds."""
    stage_key: str
    """Key of the deploy stage."""
    inputs: Mapping[str, str]
    """Digests of the input artifacts of that stage, by name."""
    results: Mapping[str, Mapping[str, Any]]
    """Summaries of the evaluations (`evaluation.metrics.summarise`) by label, in order of training; the last is that of
    the exported model."""
    attention: str = "sdpa"
    """Attention of transformers that computes the model (`components.models.attention.implementation`)."""
    keeps_reasoning: bool = False
    """True if prompts keep the reasoning of earlier answers (`components.models.chat_template.keeps_reasoning`)."""
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Differences between two evaluations (`evaluation.metrics.paired_difference`), by label such as "start to
    final"."""
    heldout: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of held-out rows of the data (`components.algorithms.likelihood.summary`), `before` and `after` the
    training on it, of a model that no evaluation measured."""

    def text(self, form: Format) -> str:
        """Return the card of an export in this format: Markdown with the YAML front matter of a Hugging Face model
        card."""
        parts = [
            f"---\n{_yaml(self._front_matter())}---",
            f"# {self.name}",
            self._introduction(form),
            "## Measured results",
            self._results(),
            "## Use",
            _use(self.name, form, self.attention),
            "## How it was made",
            self._provenance(),
            f"Deploy stage `{self.stage_key}`, from these artifacts (content digests):\n\n"
            + "\n".join(f"- {artifact}: `{digest}`" for artifact, digest in sorted(self.inputs.items())),
            f"The experiment, as it was composed:\n\n```yaml\n{_yaml(self._config)}```",
            "## Limits",
            self._limits(),
        ]
        return "\n\n".join(parts) + "\n"

    @cached_property
    def _config(self) -> dict[str, Any]:
        return mask(placeless(self.experiment))

    @property
    def _environment(self) -> str:
        return (self._config.get("environment") or {}).get("_target_", "not stated")

    @property
    def _split(self) -> str:
        return self._config.get("evaluate", {}).get("split", "heldout")

    @property
    def _is_best_of_several(self) -> bool:
        return self._config.get("deploy", {}).get("policy") == "best"

    def _front_matter(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["espalier", "agent", "tool-use", "reinforcement-learning", *(["lora"] if self.model.lora else [])],
        }
        name = self.model.name
        if self.model.source != "random" and placeless(name) == name and not Path(name).is_dir():
            data["base_model"] = name  # the Hub reads it as the id of a repository
        if self.results:
            environment = self._environment
            summary = list(self.results.values())[-1]
            metrics = [
                {"type": metric, "name": f"{metric} (mean)", "value": summary[metric]["mean"]}
                for metric in ("success", "reward")
                if summary[metric]["mean"] is not None
            ]
            dataset = {"type": environment, "name": environment.rpartition(".")[2], "split": self._split}
            task = {"type": "text-generation", "name": "agent episodes"}
            data["model-index"] = [
                {"name": self.name, "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}
            ]
        return data

    def _introduction(self, form: Format) -> str:
        model = self.model
        algorithm = self._config.get("algorithm", {}).get("name", "").upper()
        learned = f" with {algorithm}" if algorithm else ""
        base = f"`{placeless(model.name)}`" + (f" (revision `{model.revision}`)" if model.revision else "")
        if model.source == "random":
            base += " (random weights, for tests)"
        method = f"LoRA of rank {model.lora.rank}" if model.lora else "All weights were trained"
        if model.lora and model.lora.roles:
            method += f", one for each of the roles {', '.join(model.lora.roles)}: this folder has that of one role"
        method += ", merged into the weights" if model.lora and form != "adapter" else ""
        if model.quantization != "none":
            method += f" of a base that was rounded to {model.quantization}"
        purpose = f"to act in the environment `{self._environment}` over several turns"
        if self.heldout:
            purpose = "on answers of a data set"
        stored = "GGUF" if form == "gguf" else "safetensors"
        return f"{base}, trained{learned} by Espalier {purpose}. {method}; stored as {stored}."

    def _heldout_results(self) -> str:
        rows = self.heldout["after"]["rows"]
        lines = ["| Policy | Loss | Accuracy |", "|---|---|---|"]
        for label, metrics in self.heldout.items():
            loss, accuracy = (f"{metrics[name]:.3f}" if name in metrics else "–" for name in ("loss", "accuracy"))
            lines.append(f"| {label} training | {loss} | {accuracy} |")
        return (
            "\n".join(lines) + f"\n\n{rows:.0f} answers of the data that training did not see. Loss: negative "
            "log-likelihood per token of accepted answers, in nats. Accuracy: share of the prompts whose best answer "
            "is likelier per token than the worst. No episode was played."
        )

    def _results(self) -> str:
        if not self.results:
            return self._heldout_results() if self.heldout else "Nothing was measured."
        lines = [
            "| Policy | Episodes | Success | Reward | Turns | Failed |",
            "|---|---|---|---|---|---|",
        ]
        for label, summary in self.results.items():
            measures = " | ".join(_measure(summary[metric]) for metric in ("success", "reward", "turns"))
            lines.append(f"| {label} | {summary['episodes']} | {measures} | {summary['failures']['count']} |")
        text = "\n".join(lines)
        temperature = self._config.get("evaluate", {}).get("temperature", 0.0)
        decoding = "greedy answers" if temperature == 0 else f"answers at temperature {temperature:g}"
        text += f"\n\nMean [95 % interval] over scenarios of the split `{self._split}`, {decoding}."
        for label, summary in self.results.items():
            if (sequence := summary.get("sequence")) is not None:
                text += (
                    f"\n\nThe evaluation {label} was to end when its difference was decided, and played "
                    f"{sequence['scenarios']} of {sequence['planned']} scenarios; its intervals are a confidence "
                    f"sequence of level {1 - sequence['alpha']:.4g}."
                )
        for label, difference in self.differences.items():
            text += (
                f"\n\nSuccess, {label}: {difference['difference']:+.3f} {_interval(difference)} on the same "
                f"{difference['n']} scenarios; {len(difference['improved'])} got better, "
                f"{len(difference['regressed'])} worse."
            )
        return text

    def _provenance(self) -> str:
        moment = f"after round {self.step}" if self.step else "at the start of the rounds"
        if self._config.get("rounds") == 0:
            moment = "at the end of the training, which had no rounds"
        chosen = " It was chosen as the best on the held-out scenarios." if self._is_best_of_several else ""
        return f"The policy as it stood {moment}.{chosen}"

    def _limits(self) -> str:
        measured = list(self.results.values())[-1]["scenarios"] if self.results else 0
        seed = self._config.get("seed", "not stated")
        basis = (
            f"{measured} scenarios that training did not see, drawn from the same environment as the training scenarios"
        )
        purpose = "earn a reward"
        if self.heldout:
            basis = f"{self.heldout['after']['rows']:.0f} answers of the same data, which training did not see"
            purpose = "give answers like those of its data"
        note = _KEPT if self.keeps_reasoning else ""
        return (
            f"{note}- Measured on {basis}. This says nothing about other tasks, other tools or real users.\n"
            f"{_SELECTED if self._is_best_of_several else ''}"
            f"- One training run with seed {seed}; other seeds give other policies. The "
            "intervals cover the choice of scenarios, not the choice of the seed.\n"
            f"- The policy was trained to {purpose}, not to be harmless or truthful. What it does with tools has to "
            "be checked where it matters.\n"
            "- The licence and the limits of the base model hold for this one too."
        )


def placeless(value: Any) -> Any:
    """Return the config without machine-dependent parts: keys of `PLACEMENT`, and the folders of file paths."""
    if isinstance(value, Mapping):
        return {key: placeless(part) for key, part in value.items() if key not in PLACEMENT}
    if isinstance(value, list | tuple):
        return [placeless(part) for part in value]
    if isinstance(value, str) and value.startswith(("/", "~/", "file://")) and not any(map(str.isspace, value)):
        return PurePath(value).name
    return value


def _use(name: str, form: Format, attention: str) -> str:
    if form == "gguf":
        return _use_gguf(name)
    # transformers chooses sdpa by itself, also for models whose capped scores sdpa ignores
    options = "" if attention == "sdpa" else f', attn_implementation="{attention}"'
    return _use_adapter(options) if form == "adapter" else _use_merged(name, options)


def _use_adapter(options: str) -> str:
    return f"""\
With PEFT, in this folder; the base model is the one that `adapter_config.json` names:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoPeftModelForCausalLM.from_pretrained("."{options})
```

vLLM and other servers load it beside the base model."""


def _use_gguf(name: str) -> str:
    return f"""\
With llama.cpp, in this folder:

```sh
llama-server --model {name}-*.gguf --port 8000
```

Ollama takes the file as `FROM` of a Modelfile. In training, tools stood in the prompt as the merged export's server
writes them; other servers may write them differently where the chat template has no place for tools."""


def _use_merged(name: str, options: str) -> str:
    return f"""\
With transformers, in this folder:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained("."{options})
prompt = [{{"role": "user", "content": "Hello"}}]
ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**ids, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
```

As an OpenAI-compatible server, from a checkout of Espalier:

```sh
python -m components.inference.server PATH_OF_THIS_FOLDER --name {name} --port 8000
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello"}}])
print(answer.choices[0].message.content)
```

Espalier's server puts tools into the prompt as they stood in training. Other servers may write them differently where
the chat template has no place for tools."""


def _measure(measure: Mapping[str, Any]) -> str:
    return "–" if measure["mean"] is None else f"{measure['mean']:.3f} {_interval(measure)}".rstrip()


def _interval(measure: Mapping[str, Any]) -> str:
    return "" if measure["low"] is None else f"[{measure['low']:.3f}, {measure['high']:.3f}]"


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
