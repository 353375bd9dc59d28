"""`python -m flows.agent_tools.course [--show] '{"action": "train", ...}'`: the tool of HelloAgents' course.

`RLTrainingTool().run` takes the course's parameters and returns its JSON text. Each action is an experiment, whose
command `show` and `--show` print without running it:

    load_dataset    the scenarios of environment=dataset
    create_reward   an option of reward
    train           flows.run with warmup=sft, or with rounds of GRPO; from another output_dir, a fork of that run
    evaluate        flows.evaluate of the untrained model and the run of an output_dir
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import ResourceError, SpecError
from components.specs import Spec, validate
from flows.agent_tools.commands import command, error_message, last_object
from flows.execution.executor import environment
from flows.experiment.compose import model_overrides
from flows.history.records import Records, RunRecord, checkpoints
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import with_exit_codes

GSM8K = "openai/gsm8k"
"""Dataset of the course."""
_LOCAL = (".json", ".jsonl", ".csv", ".parquet")
HELD_OUT = 100
"""Number of held-out questions of GSM8K that a training is evaluated on; of a file, all are."""
MARK = "espalier.json"
"""File in an output folder that names its run."""

RewardType = Literal["accuracy", "length_penalty", "step"]


class RewardRequest(Spec):
    """Reward of the course: accuracy, minus `penalty_weight` for each token above `max_length`, or plus `step_bonus`
    for each step."""

    action: Literal["create_reward"] = "create_reward"
    reward_type: RewardType = "accuracy"
    max_length: Annotated[int, Field(ge=1)] = 1024
    penalty_weight: Annotated[float, Field(ge=0)] = 0.001
    step_bonus: Annotated[float, Field(ge=0)] = 0.1

    def overrides(self) -> list[str]:
        """Return the overrides of the reward."""
        return {
            "accuracy": ["reward=outcome"],
            "length_penalty": [
                "reward=length",
                f"reward.alpha={self.penalty_weight}",
                f"reward.target={self.max_length}",
            ],
            "step": ["reward=steps", f"reward.beta={self.step_bonus}", "reward.pattern='(?m)^.+$'"],
        }[self.reward_type]


class DatasetRequest(Spec):
    """Questions with answers: the course's GSM8K, or a file with the columns `question` and `answer`."""

    action: Literal["load_dataset"] = "load_dataset"
    format: Literal["sft", "rl"] = "sft"
    split: Literal["train", "test"] = "train"
    max_samples: Annotated[int | None, Field(ge=1)] = None
    dataset: str = GSM8K

    def overrides(self) -> list[str]:
        """Return the overrides of the environment."""
        is_file = self.dataset.endswith(_LOCAL)
        path = f"environment.path={json.dumps(str(Path(self.dataset).absolute()))}"
        source = [path] if is_file else [f"environment.dataset={self.dataset}", "environment.config=main"]
        columns = ["environment.prompt=question", "environment.answer=answer", "environment.demonstration=answer"]
        held_out = ["environment.heldout_split=test", f"evaluate.scenarios={HELD_OUT}"]
        after = [] if is_file else ['environment.answer_after="####"', *held_out]
        return ["environment=dataset", *source, *columns, *after]


class TrainRequest(RewardRequest):
    """Training by SFT on the solutions of the dataset, or by GRPO on its answers."""

    action: Literal["train"] = "train"  # type: ignore[assignment]
    algorithm: Literal["sft", "grpo"]
    model_name: str = Field(min_length=1)
    """Name on the hub, an option of `model`, or the output folder of an earlier training."""
    output_dir: str = Field(min_length=1)
    max_samples: Annotated[int, Field(ge=1)] = 100
    num_epochs: Annotated[int, Field(ge=1)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 4
    num_generations: Annotated[int, Field(ge=2)] = 8
    learning_rate: Annotated[float | None, Field(gt=0)] = None
    use_lora: bool = True
    dataset: str = GSM8K


class EvaluateRequest(Spec):
    """Evaluation of a trained policy on held-out questions."""

    action: Literal["evaluate"] = "evaluate"
    model_path: str = Field(min_length=1)
    """Output folder of a training."""
    max_samples: Annotated[int | None, Field(ge=1)] = None
    """Number of questions; None: as in the training."""
    use_lora: bool = True


ACTIONS: dict[str, type[Spec]] = {
    "load_dataset": DatasetRequest,
    "create_reward": RewardRequest,
    "train": TrainRequest,
    "evaluate": EvaluateRequest,
}


class RLTrainingTool:
    """Tool of the course. root: folder of its runs; overrides: further settings of each run, as on the command line."""

    def __init__(self, root: str | Path = "runs", overrides: Sequence[str] = ()):
        self._root = Path(root).absolute()
        self._overrides = list(overrides)

    def run(self, parameters: Mapping[str, Any]) -> str:
        """Run an action and return its result as JSON text. Raises SpecError for wrong parameters, and the errors of
        `flows.run`."""
        request = _request(parameters)
        name, overrides = self._command(request)
        if isinstance(request, TrainRequest):
            check_output(Path(request.output_dir))
            result = _result(name, overrides)
            _copy(Path(result["export"]), Path(request.output_dir), result["run_id"])
            figures = {"run_id": result["run_id"], "accuracy": result["success"], "report": result["report"]}
            data = {"algorithm": request.algorithm, "output_dir": request.output_dir, **figures}
        elif isinstance(request, EvaluateRequest):
            result = _result(name, [*overrides, "--json"])
            before, after = result["policies"].values()
            data = {"accuracy": after["success"], "accuracy_before": before["success"], "report": result["html"]}
        elif isinstance(request, DatasetRequest):
            data = self._samples(request, overrides)
        else:
            data = request.model_dump(exclude={"action"})
        return json.dumps({"status": "success", **data, "experiment": _shell(name, overrides)}, ensure_ascii=False)

    def show(self, parameters: Mapping[str, Any]) -> str:
        """Return the command of an action's experiment, without running it. Raises SpecError for wrong parameters."""
        return _shell(*self._command(_request(parameters)))

    def _command(self, request: Spec) -> tuple[str, list[str]]:
        """Return the command of an action, and its overrides."""
        if isinstance(request, TrainRequest):
            return "run", [*self._training(request), *self._overrides, f"root={self._root}"]
        if isinstance(request, EvaluateRequest):
            run = self._trained(request.model_path)
            if run is None:
                text = f"no training below {self._root} has this output_dir; expected that of an earlier train"
                raise SpecError.at("model_path", f"{request.model_path}: {text}")
            sections = ("environment", "reward", "model", "agent", "inference", "allow", "evaluate")
            same = [line for line in run.overrides if line.partition("=")[0].partition(".")[0] in sections]
            same = [line for line in same if request.max_samples is None or not line.startswith("evaluate.scenarios=")]
            count = [] if request.max_samples is None else [f"evaluate.scenarios={request.max_samples}"]
            policies = f"policies=[base,{run.short}]"
            return "evaluate", [f"name={run.name}", "warmup=none", *same, *count, f"root={self._root}", policies]
        assert isinstance(request, DatasetRequest | RewardRequest)
        return "run", request.overrides()

    def _training(self, request: TrainRequest) -> list[str]:
        data = DatasetRequest(dataset=request.dataset).overrides()
        formats = "[adapter]" if request.use_lora else "[merged]"
        lines = [f"name={_name(request.output_dir)}", *data, *request.overrides(), f"deploy.formats={formats}"]
        lines += ["deploy.register_model=false"]
        earlier = self._trained(request.model_name)
        step = 0
        if earlier is not None:
            step = max(checkpoints(earlier), default=0)
            lines += [line for line in earlier.overrides if line.startswith(("model=", "model."))]
        else:
            lines += model_overrides(request.model_name) + ([] if request.use_lora else ["model.lora=null"])
        rate = [] if request.learning_rate is None else [f"learning_rate={request.learning_rate}"]
        if request.algorithm == "sft":
            if earlier is not None:
                text = f"{request.model_name}: SFT of a trained policy is no action of this tool; expected a base model"
                raise SpecError.at("model_name", text)
            settings = [f"epochs={request.num_epochs}", f"batch_size={request.batch_size}", *rate]
            warmup = [
                f"warmup.demonstrations={request.max_samples}",
                *(f"warmup.algorithm.{line}" for line in settings),
            ]
            return [*lines, "warmup=sft", *warmup, "rounds=0"]
        rounds = step + math.ceil(request.max_samples * request.num_epochs / request.batch_size)
        group = [f"collect.scenarios={request.batch_size}", f"collect.group_size={request.num_generations}"]
        start = ["warmup=none", *([] if earlier is None else [f"fork={earlier.id}"])]
        return [*lines, *start, "algorithm=grpo", *(f"algorithm.{line}" for line in rate), *group, f"rounds={rounds}"]

    def _trained(self, output_dir: str) -> RunRecord | None:
        """Return the latest finished run with this output folder; None without one."""
        name = _name(output_dir)
        runs = Records(self._root).all()
        return next((run for run in runs if run.name == name and run.status == "FINISHED"), None)

    def _samples(self, request: DatasetRequest, overrides: Sequence[str]) -> dict[str, Any]:
        from flows.experiment.compose import compose

        environment = compose(["name=course", "warmup=none", *overrides]).required_environment.build()
        scenarios = environment.scenarios("train" if request.split == "train" else "heldout")
        chosen = [scenarios[index] for index in range(min(request.max_samples or len(scenarios), len(scenarios)))]
        columns = ("question", "answer") if request.format == "sft" else ("question",)
        rows = [scenario.input for scenario in chosen[:3]]
        shown = [{"id": scenario.id, **row} for scenario, row in zip(chosen, rows, strict=False)]
        return {
            "format": request.format,
            "split": request.split,
            "num_samples": len(chosen),
            "columns": columns,
            "samples": shown,
        }


def _shell(name: str, overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", f"flows.{name}", *overrides])


def _result(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a command to its end and return its JSON object. Raises ResourceError with its message if it fails."""
    ended = subprocess.run(command(name, arguments), env=environment(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ResourceError(error_message(f"flows.{name}", ended.stderr))
    return last_object(ended.stdout, f"flows.{name}")


def _request(parameters: Mapping[str, Any]) -> Spec:
    action = parameters.get("action")
    if action not in ACTIONS:
        raise SpecError.at("action", f"{action!r}: expected one of {', '.join(ACTIONS)}")
    return validate(ACTIONS[str(action)], dict(parameters))


def _name(output_dir: str) -> str:
    """Return the name of the run of an output folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir).strip("-.") or "course"


def check_output(output: Path) -> None:
    """Raise ResourceError for an output folder with files that are not of this tool."""
    if output.exists() and not (output / MARK).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise ResourceError(f"output_dir = {output}: holds files of something else; expected a new or empty folder")


def _copy(export: Path, output: Path, run: str) -> None:
    """Copy an exported model to an output folder, in place of an earlier one."""
    if output.exists():
        shutil.rmtree(output)
    shutil.copytree(export, output)
    (output / MARK).write_text(json.dumps({"run": run}) + "\n")


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run an action, or show its experiment. Return exit code 0, or 2 for a user error."""
    parser = RootParser(prog="python -m flows.agent_tools.course", description="The tool of HelloAgents' course.")
    parser.add_argument("parameters", help='JSON object: {"action": "train", "algorithm": "sft", ...}')
    parser.add_argument("overrides", nargs="*", help="further settings of the runs: rounds=2, inference=vllm")
    parser.add_argument("--show", action="store_true", help="print the command of the experiment, without running it")
    options = parser.parse_intermixed_args(argv)
    try:
        parameters = json.loads(options.parameters)
    except ValueError as error:
        raise SpecError.at("parameters", f"{error}; expected a JSON object") from None
    tool = RLTrainingTool(options.root, options.overrides)
    print(tool.show(parameters) if options.show else tool.run(parameters))
    return 0


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
