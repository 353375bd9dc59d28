"""Model card: what was trained and how, the measured results, usage, and limits.

A card depends on its arguments alone: no clock, no run id, no path of this machine. Equal inputs give an equal card, so
an export can be cached under its stage key. Config keys that only affect where and how fast a run executes are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
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
    }
)
"""Config keys that do not affect a result, and the run from which a fork starts: its policy is an input."""


_SELECTED = (
    "- The policy was chosen by these same scenarios, as the best of several: on others it probably does worse than "
    "the results say.\n"
)


def model_card(
    *,
    name: str,
    form: Format,
    model: ModelSpec,
    experiment: Mapping[str, Any],
    step: int,
    stage_key: str,
    inputs: Mapping[str, str],
    results: Mapping[str, Mapping[str, Any]],
    differences: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return Markdown with the YAML front matter of a Hugging Face model card.

    form: format of the export. experiment: the composed config.
    step: last finished round of the policy; 0 is the start of the rounds.
    stage_key: key of the deploy stage. inputs: digests of its input artifacts, by name.
    results: label to `evaluation.metrics.summarise(...)`, in order of training; the last is the exported model.
    differences: label ("start to final") to `evaluation.metrics.paired_difference(...)`.
    """
    config = mask(placeless(experiment))
    parts = [
        f"---\n{_yaml(_front_matter(name, model, config, results))}---",
        f"# {name}",
        _introduction(form, model, config),
        "## Measured results",
        _results(config, results, differences or {}),
        "## Use",
        _use(name, form),
        "## How it was made",
        _which(config, step),
        f"Deploy stage `{stage_key}`, from these artifacts (content digests):\n\n"
        + "\n".join(f"- {artifact}: `{digest}`" for artifact, digest in sorted(inputs.items())),
        f"The experiment, as it was composed:\n\n```yaml\n{_yaml(config)}```",
        "## Limits",
        _limits(config, results),
    ]
    return "\n\n".join(parts) + "\n"


def placeless(value: Any) -> Any:
    """Return the config without machine-dependent parts: keys of `PLACEMENT`, and the folders of file paths."""
    if isinstance(value, Mapping):
        return {key: placeless(part) for key, part in value.items() if key not in PLACEMENT}
    if isinstance(value, list | tuple):
        return [placeless(part) for part in value]
    if isinstance(value, str) and value.startswith(("/", "~/", "file://")) and not any(map(str.isspace, value)):
        return PurePath(value).name
    return value


def _front_matter(
    name: str, model: ModelSpec, config: dict[str, Any], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["espalier", "agent", "tool-use", "reinforcement-learning", *(["lora"] if model.lora else [])],
    }
    if model.source != "random":
        data["base_model"] = placeless(model.name)
    if results:
        environment = _environment(config)
        summary = list(results.values())[-1]
        metrics = [
            {"type": metric, "name": f"{metric} (mean)", "value": summary[metric]["mean"]}
            for metric in ("success", "reward")
            if summary[metric]["mean"] is not None
        ]
        dataset = {"type": environment, "name": environment.rpartition(".")[2], "split": _split(config)}
        task = {"type": "text-generation", "name": "agent episodes"}
        data["model-index"] = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}]
    return data


def _introduction(form: Format, model: ModelSpec, config: dict[str, Any]) -> str:
    algorithm = config.get("algorithm", {}).get("name", "").upper()
    learned = f" with {algorithm}" if algorithm else ""
    base = f"`{placeless(model.name)}`" + (f" (revision `{model.revision}`)" if model.revision else "")
    if model.source == "random":
        base += " (random weights, for tests)"
    method = f"LoRA of rank {model.lora.rank}" if model.lora else "All weights were trained"
    method += ", merged into the weights" if model.lora and form != "adapter" else ""
    if model.quantization != "none":
        method += f" of a base that was rounded to {model.quantization}"
    return (
        f"{base}, trained{learned} by Espalier to act in the environment `{_environment(config)}` over several turns. "
        f"{method}; stored as {'GGUF' if form == 'gguf' else 'safetensors'}."
    )


def _results(
    config: dict[str, Any],
    results: Mapping[str, Mapping[str, Any]],
    differences: Mapping[str, Mapping[str, Any]],
) -> str:
    if not results:
        return "Nothing was measured."
    lines = [
        "| Policy | Episodes | Success | Reward | Turns | Failed |",
        "|---|---|---|---|---|---|",
    ]
    for label, summary in results.items():
        measures = " | ".join(_measure(summary[metric]) for metric in ("success", "reward", "turns"))
        lines.append(f"| {label} | {summary['episodes']} | {measures} | {summary['failures']['count']} |")
    text = "\n".join(lines)
    temperature = config.get("evaluate", {}).get("temperature", 0.0)
    decoding = "greedy answers" if temperature == 0 else f"answers at temperature {temperature:g}"
    text += f"\n\nMean [95 % interval] over scenarios of the split `{_split(config)}`, {decoding}."
    for label, difference in differences.items():
        text += (
            f"\n\nSuccess, {label}: {difference['difference']:+.3f} {_interval(difference)} on the same "
            f"{difference['n']} scenarios; {len(difference['improved'])} got better, "
            f"{len(difference['regressed'])} worse."
        )
    return text


def _which(config: dict[str, Any], step: int) -> str:
    moment = f"after round {step}" if step else "at the start of the rounds"
    chosen = " It was chosen as the best on the held-out scenarios." if _is_best_of_several(config) else ""
    return f"The policy as it stood {moment}.{chosen}"


def _is_best_of_several(config: dict[str, Any]) -> bool:
    return config.get("deploy", {}).get("policy") == "best"


def _use(name: str, form: Format) -> str:
    return {"merged": _use_merged, "adapter": _use_adapter, "gguf": _use_gguf}[form](name)


def _use_adapter(name: str) -> str:
    return """\
With PEFT, in this folder; the base model is the one that `adapter_config.json` names:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoPeftModelForCausalLM.from_pretrained(".")
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


def _use_merged(name: str) -> str:
    return f"""\
With transformers, in this folder:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
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


def _limits(config: dict[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    measured = list(results.values())[-1]["scenarios"] if results else 0
    return (
        f"- Measured on {measured} scenarios that training did not see, drawn from the same environment as the "
        "training scenarios. This says nothing about other tasks, other tools or real users.\n"
        f"{_SELECTED if _is_best_of_several(config) else ''}"
        f"- One training run with seed {config.get('seed', 'not stated')}; other seeds give other policies. The "
        "intervals cover the choice of scenarios, not the choice of the seed.\n"
        "- The policy was trained to earn a reward, not to be harmless or truthful. What it does with tools has to be "
        "checked where it matters.\n"
        "- The licence and the limits of the base model hold for this one too."
    )


def _environment(config: dict[str, Any]) -> str:
    return config.get("environment", {}).get("_target_", "not stated")


def _split(config: dict[str, Any]) -> str:
    return config.get("evaluate", {}).get("split", "heldout")


def _measure(measure: Mapping[str, Any]) -> str:
    return "–" if measure["mean"] is None else f"{measure['mean']:.3f} {_interval(measure)}".rstrip()


def _interval(measure: Mapping[str, Any]) -> str:
    return "" if measure["low"] is None else f"[{measure['low']:.3f}, {measure['high']:.3f}]"


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
