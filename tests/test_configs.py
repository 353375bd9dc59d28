"""Composition and validation of every file under conf/, with every key of its spec."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from tempfile import TemporaryDirectory
from typing import get_type_hints

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from components.algorithms.choices import ALGORITHMS, AnyAlgorithmSpec
from components.algorithms.spec import AlgorithmSpec, OptimizerSpec
from components.compute.spec import PLACES
from components.errors import SpecError
from components.inference.spec import ENGINES
from components.rewards.llm.spec import JUDGE_MODELS
from components.specs import names_below, validate
from flows.experiment.compose import compose
from flows.experiment.composer import Composer
from flows.experiment.config_loader import CONF
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.flow import SHARED_KEYS
from flows.experiment.guards import GuardsSpec
from flows.experiment.spec import ExperimentSpec
from flows.terminal.help import describe
from tests.environments import alfworld_games

FILES = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.rglob("*.yaml"))
OPTIONS = [file for file in FILES if len(file.parts) == 2]
EXPERIMENTS = [file.name for file in OPTIONS if file.parts[0] == "experiment"]

GROUPS = {
    "agent": 3,
    "algorithm": len(ALGORITHMS),
    "collect": 3,
    "compute": len(PLACES) + 3,  # `fsdp`, `fsdp_offload` and `zero2` of torchrun
    "deploy": 6,
    "environment": 32,
    "evaluate": 1,
    "evolve": 4,
    "experiment": 47,
    "data": 3,
    "feedback": 2,
    "filter": 17,
    "flow": 9,
    "inference": len(ENGINES),
    "judge_model": len(JUDGE_MODELS),
    "model": 4,
    "place": 10,
    "reward": 39,
    "reward_model": 3,
    "size": 2,
    "task": 2,
    "tracking": 1,
    "warmup": 4,
}
"""Least number of files of each group: fails for a lost folder or file, not for an added one."""


TASKS = Path(__file__).parent / "environments" / "tasks.json"
VERIFIERS_TASKS = TASKS.with_name("verifiers_tasks")
ALFWORLD = TemporaryDirectory(prefix="espalier-alfworld-")
alfworld_games.write(Path(ALFWORLD.name))
ANSWERS = Path(ALFWORLD.name) / "feedback"
ANSWERS.mkdir()
(ANSWERS / "answers.jsonl").touch()
LABELS = Path(ALFWORLD.name) / "labels.jsonl"
LABELS.write_text('{"trajectory_id": "a/0", "step": 0, "label": 1}\n')
ACCELERATE = Path(ALFWORLD.name) / "accelerate.yaml"
ACCELERATE.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n")
PROMPTS = Path(ALFWORLD.name) / "prompts.jsonl"
PROMPTS.write_text("".join(f'{{"prompt": "{number} + 1?", "answer": {number + 1}}}\n' for number in range(400)))
PAIRS = PROMPTS.with_name("pairs.jsonl")
PAIRS.write_text("".join(f'{{"prompt": "{n} + 1?", "chosen": "{n + 1}", "rejected": "{n}"}}\n' for n in range(400)))
OFFLINE = {"sft": PROMPTS, "kto": PROMPTS, **dict.fromkeys(("dpo", "ipo", "orpo", "ranking"), PAIRS)}
"""Data of the experiments that learn from a file."""
DATASET = [f"environment.path={PROMPTS}", f"environment.cache={ALFWORLD.name}/cache"]
SERVED = ["reward.model.url=http://there/v1", "reward.model.model=name"]
NEEDED = {
    "hf": ["model.name=organisation/name"],
    "remote": ["inference.url=http://there/v1", "inference.model=name"],
    "litellm": ["inference.model=openai/name", "rounds=0"],
    "taught": ["collect.teacher.model.name=organisation/name", "algorithm=sft", "filter=successful"],
    "teacher": ["warmup.teacher.model.name=organisation/name"],
    "algorithm=distill": ["algorithm.teacher.name=organisation/name", "filter=everything"],
    "learned": ["reward.path=folder"],
    "human": [f"reward.path={ANSWERS}"],
    "aggregated": [f"reward.sources.human.path={ANSWERS}"],
    "feedback=answers": [f"feedback.path={ANSWERS}"],
    "graded": ["reward.model.url=http://there/v1", "reward.model.model=name"],
    "labelled": [f"reward.path={LABELS}"],
    "sky": ["store=s3://bucket/prefix"],
    "compute=accelerate": [f"compute.config_file={ACCELERATE}"],
    "place=accelerate": [f"compute.places.here.config_file={ACCELERATE}"],
    "hub": ["deploy.target.repository=owner/name"],
    "file": [f"data.path={PROMPTS}"],
    "huggingface": ["data.dataset=owner/name"],
    "together": ["deploy.target.source=owner/name", "deploy.target.hardware=id"],
    "by_role": ["agent=planner_worker"],
    "best": ["algorithm=sft"],
    "flow=rlhf": [f"data.path={PROMPTS}", f"reward_model.data.path={PROMPTS}", *DATASET],
    "filter=type": ["filter.drop=[address]"],
    "filter=difficulty": ["filter.drop=[1]"],
    "agent_evol": ["algorithm=sft"],
    "rejection": ["algorithm=sft"],
    "environment=none": ["flow=offline", f"data.path={PROMPTS}", "warmup=none"],
    **{name: ["environment=calculator"] for name in ("exact", "numeric", "choice", "math")},
    "code_tests": ["environment=python_tool", "reward.tests=outcome.tests"],
    "pattern": [r"reward.pattern=\d+"],
    "reward=forbidden": ["reward.costs.content.pattern=no"],
    "columns": ["reward.function=tests.rewards.functions.reward_len", "allow=[tests]"],
    "potential": ["reward.function=tests.rewards.functions.potential", "allow=[tests]"],
    "ruler": ["reward.model.url=http://there/v1", "reward.model.model=name"],
    **dict.fromkeys(("ruler", "critic", "rubric", "pairwise", "constitution"), SERVED),
    "alfworld": [f"environment.data={ALFWORLD.name}", "collect.scenarios=4", "warmup.demonstrations=4"],
    "agentgym": ["environment.kind=textcraft", "environment.url=http://127.0.0.1:36001", "warmup=none"],
    "mcp_rl": ["environment.command=[server]", "flow.author.url=http://there/v1", "flow.author.model=name", *SERVED],
    "mcp": [
        f"environment.scenarios={TASKS}",
        "environment.command=[server]",
        "collect.scenarios=5",
        "warmup.demonstrations=5",
    ],
    "dataset": [*DATASET, "warmup=none"],
    "tasks": [
        f"environment.path={TASKS.with_name('task_folders')}",
        "collect.scenarios=2",
        "evaluate.scenarios=1",
        "warmup.demonstrations=2",
    ],
    "tau_bench": [
        f"environment.data={TASKS.with_name('tau_bench')}",
        "collect.scenarios=3",
        "warmup.demonstrations=3",
    ],
    "openenv": ["environment.name=guess", "environment.url=http://127.0.0.1:8000", "warmup=none"],
    "textarena": ["warmup=none"],
    "verifiers": ["environment.taskset=vf_sums", f"environment.folders=[{VERIFIERS_TASKS}]", "warmup=none"],
}
"""Values that an option needs from the user, by option, or by `group=option` where options share a name."""
JUDGES = {
    "served": SERVED,
    "litellm": ["reward.model.model=provider/name"],
    "embedded": ["reward.model.model.name=organisation/name"],
    "policy": [],
}
"""Values that a judge needs from the user."""


PACKAGES = {
    "alfworld": "fast_downward",
    "babyai": "minigrid",
    "gym": "gymnasium",
    "math": "math_verify",
    "mcp": "mcp",
    "reasoning": "reasoning_gym",
    "reasoning_gym": "reasoning_gym",
    "scienceworld": "scienceworld",
    "textarena": "textarena",
    "textworld": "textworld",
    "verifiers": "verifiers",
}
"""Requirements of an option's environment that an installation may lack."""


def needed(group: str, option: str) -> list[str]:
    """Return the values that an option needs from the user."""
    return NEEDED.get(f"{group}={option}", NEEDED.get(option, []))


def missing_requirement(option: str) -> str | None:
    """Return the requirement of the option's environment that this installation lacks, if any."""
    if option in PACKAGES and find_spec(PACKAGES[option]) is None:
        return f"{PACKAGES[option]} is not installed"
    return "there is no Java" if option == "scienceworld" and shutil.which("java") is None else None


def skip_without_package(option: str) -> None:
    """Skip the test if a requirement of the option's environment is missing."""
    if (reason := missing_requirement(option)) is not None:
        pytest.skip(reason)


def overrides(file: Path) -> list[str]:
    group, option = file.parts
    if group == "place":
        store = ["store=s3://bucket/prefix"] if option.startswith("sky") else []
        lines = [f"+place@compute.places.here={option}", "compute.stages.train=here", *store]
        return [*lines, *NEEDED.get(f"{group}={option}", [])]
    if group == "judge_model":
        return ["reward=ruler", f"judge_model@reward.model={option}", *JUDGES[option]]
    if group == "evolve":
        return ["flow=agent_evol", f"evolve={option}"]
    lines = [f"{'+' if group in ('experiment', 'task') else ''}{group}={option}"]
    return [*lines, *needed(group, option)]


def test_all_files_are_options_of_a_group():
    counts = Counter(file.parts[0] for file in OPTIONS)
    assert {group for group in counts if group not in GROUPS} == set()
    assert {group: counts[group] for group, least in GROUPS.items() if counts[group] < least} == {}
    others = [str(file) for file in FILES if file not in OPTIONS]
    assert others == [
        "config",
        "hydra/hydra_logging/quiet",
        "hydra/job_logging/quiet",
        "hydra/launcher/sky",
        "hydra/sweeper/optuna",
    ]
    assert not [path for path in CONF.rglob("*") if path.is_file() and path.suffix != ".yaml"]


@pytest.mark.parametrize("group", GROUPS)
def test_options_compose_into_valid_experiments_with_every_key_written_out(group):
    files = [file for file in OPTIONS if file.parts[0] == group and file.name not in PACKAGES]
    assert {str(file): missing for file in files if (missing := keys_not_written_out(file))} == {}


@pytest.mark.parametrize("file", [file for file in OPTIONS if file.name in PACKAGES], ids=str)
def test_an_option_with_requirements_composes_into_a_valid_experiment_with_every_key_written_out(file):
    skip_without_package(file.name)
    assert keys_not_written_out(file) == {}


def keys_not_written_out(file: Path) -> dict[str, set[str]]:
    """Return the keys by which the composed mappings differ from their specs: `--cfg job` must show every key, and a
    key must be overridable without a +. Raises SpecError for an invalid experiment."""
    composer = Composer()
    data, problems = composer.point(composer.parse(overrides(file))[0])
    assert data is not None, problems
    assert not problems, (file, problems)
    spec = validate(ExperimentSpec, data)
    assert file.parts[0] != "experiment" or spec.name == file.name
    different = {}
    places = [[], ["warmup", "filter"], ["warmup", "algorithm"], ["model", "lora"], ["reward_model", "algorithm"]]
    places += [[name] for name, value in data.items() if isinstance(value, dict)]
    for place in places:
        inside = data
        for part in place:
            inside = (inside or {}).get(part)
        if inside is not None:
            expected = set(names_below(ExperimentSpec, data, place))
            if not place:
                expected -= set(SHARED_KEYS) - {"data"} - spec.flow.reads
            if set(inside) != expected and not place == ["warmup"] == [file.parts[0]]:
                different[".".join(place)] = set(inside) ^ expected
    return different


def test_every_file_begins_with_a_comment_that_says_what_it_is():
    assert [file for file in FILES if len(describe(CONF / f"{file}.yaml")) <= 10] == []


def test_an_experiment_begins_with_its_command():
    for name in EXPERIMENTS:
        lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
        assert lines[:2] == ["# @package _global_", f"# python -m flows.run +experiment={name}"]
        comment = " ".join(line for line in lines if line.startswith("#"))
        words = ("Shows", "Takes", "minute", "CPU", "memory")
        assert (name, [word for word in words if word not in comment]) == (name, [])


def test_every_file_is_plain_yaml_without_repeated_keys():
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            assert len(keys) == len(set(keys)), (file, keys)
            return super().construct_mapping(node, deep=deep)

    for file in FILES:
        assert isinstance(yaml.load((CONF / f"{file}.yaml").read_text(), Strict), dict | None), file


def test_placement_follows_the_default_and_can_be_set_for_one_stage():
    compute = compose(["compute=process", "compute.stages.judge=local"]).compute
    assert [compute.placement(stage) for stage in ("train", "judge")] == ["process", "local"]


# --- checks across the parts ----------------------------------------------------------------------------------------


def mistakes(*lines: str) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        compose(lines)
    return {problem.path: problem.message for problem in caught.value.problems}


REFUSED = {
    "collect.group_size=1": ("collect.group_size", "compares"),
    "algorithm.minibatches=3": ("algorithm.minibatches", "1, 2, 4, 8"),
    "collect.temperature=0": ("collect.temperature", "greedy decoding does not sample"),
    "collect.min_p=2": ("collect.min_p", "at most 1"),
    "algorithm.overlong_buffer=5": ("algorithm.overlong_buffer", "the buffer ends at algorithm.overlong=0"),
    "algorithm.dual_clip=0.5": ("algorithm.dual_clip", "more than 1"),
    "collect.scenarios=600": ("collect.scenarios", "512"),
    "warmup.demonstrations=600": ("warmup.demonstrations", "512"),
    "evaluate.scenarios=600": ("evaluate.scenarios", "128"),
    "evaluate.split=test": ("evaluate.split", "'test'"),
    "evaluate.split=train": ("evaluate.split", "is the training split"),
    "'early_stopping={patience: 2}'": ("early_stopping", "evaluate.every=1"),
    "guards.reward_hacking=stop": ("guards.reward_hacking", "evaluate.every=1"),
    "guards.reward_hacking=halt": ("guards.reward_hacking", "off, warn, stop"),
    "guards.no_signal=off": ("guards.no_signal", "warn, stop"),
    "deploy.policy=first": ("deploy.policy", "last, best"),
    "evaluate.every=-1": ("evaluate.every", "at least 0"),
    "environment.heldout=0": ("evaluate.split", "'heldout'"),
    "environment.train=0": ("environment", "'train'"),
    "environment.train=19900": ("environment", "order numbers"),
    "environment.train=-5": ("environment.train", "-5: expected at least 0"),
    "environment.heldout=-5": ("environment.heldout", "-5: expected at least 0"),
    "environment.train=100000000": ("environment.train", "expected at most 1000000"),
    "environment.seed=-99999999999999999999": ("environment.seed", "expected at most 9223372036854775807 and at least"),
    "reward.repetition_ngram=99999999999999999999": ("reward.repetition_ngram", "at most 9223372036854775807"),
    "rounds=99999999999999999999": ("rounds", "99999999999999999999: expected at most 100000"),
    "collect.group_size=10000000000": ("collect.group_size", "expected at most 10000"),
    "seed=99999999999": ("seed", "99999999999: expected less than 2147483648"),
    "allow=hilo": ("allow", "'hilo': expected a list: allow=[hilo]"),
    "agent.max_tokens=2048": ("agent.max_tokens", "model.max_length"),
    "agent.max_thinking_tokens=56 agent.max_tokens=56": ("agent.max_thinking_tokens", "no room for an answer"),
    "agent.max_thinking_tokens=8 inference=vllm": ("agent.max_thinking_tokens", "inference.name=vllm cannot end"),
    "name=../x": ("name", "matches"),
    "'algorithm.costs={turns: {limit: -0.1}}'": ("algorithm.costs.turns.limit", "-0.1: expected at least 0"),
    "reward=forbidden": ("reward.costs", "expected reward.costs.actions.tools=[TOOL] or reward.costs.content.pattern="),
    "reward=forbidden reward.costs.actions.tools=[refnd]": (
        "reward.costs.actions.tools",
        "'refnd': components.environments.worlds.shop.Shop has no such tool; expected one of change_address, ",
    ),
    "reward=forbidden 'reward.costs.actions.tools={refund: \"(\"}'": (
        "reward.costs.actions.tools.refund",
        "'(' is no regular expression",
    ),
    "reward=forbidden 'reward.costs.content.pattern=\"[\"'": (
        "reward.costs.content.pattern",
        "is no regular expression",
    ),
    "seed=-1": ("seed", "at least 0"),
    "rounds=-1": ("rounds", "at least 0"),
    "reward._target_=components.environments.worlds.shop.Shop": ("reward.turn_cost", "no such key"),
}


def without_reason(expected: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Return the problems of the overrides whose problems lack the expected one."""
    problems = {lines: mistakes(*shlex.split(lines)) for lines in expected}
    return {
        lines: problems[lines]
        for lines, (path, words) in expected.items()
        if words not in problems[lines].get(path, "")
    }


def test_incompatible_options_are_rejected_with_the_reason():
    assert without_reason(REFUSED) == {}


def test_a_group_scale_without_its_baseline_is_refused():
    for baseline in ("batch", "none"):
        assert (
            without_reason(
                {f"algorithm.baseline={baseline} algorithm.scale=group": ("algorithm.scale", "expected batch or none")}
            )
            == {}
        )
        compose([f"algorithm.baseline={baseline}"])


def test_early_stopping_is_asked_for_in_one_line():
    spec = compose(["evaluate.every=2", "early_stopping={patience: 3, metric: reward}", "guards.reward_hacking=off"])
    assert spec.early_stopping == EarlyStoppingSpec(patience=3, metric="reward", min_gain=0.0)
    assert spec.guards.reward_hacking == "off"
    assert GuardsSpec(reward_hacking=False).reward_hacking == "off"  # YAML reads a bare off so


def test_several_reasons_are_given_together():
    problems = mistakes(
        "collect.group_size=1", "algorithm.minibatches=3", "evaluate.split=test", "collect.temperature=0"
    )
    assert set(problems) == {"collect.group_size", "algorithm.minibatches", "evaluate.split", "collect.temperature"}


def test_limits_of_grpo_do_not_apply_to_other_algorithms():
    assert compose(["algorithm=sft", "filter=successful", "collect.group_size=1", "collect.top_k=5"])
    assert compose(["rounds=0", "collect.group_size=1"])
    assert compose(["algorithm=reinforce_pp", "collect.group_size=1", "filter=everything"])
    assert compose(["algorithm=ppo", "collect.group_size=1", "filter=everything"])
    assert "dpo compares two" in mistakes("algorithm=dpo", "collect.group_size=1")["collect.group_size"]
    assert compose(["algorithm=kto", "collect.group_size=1", "filter=everything"])
    assert "rloo compares" in mistakes("algorithm=rloo", "collect.group_size=1")["collect.group_size"]


def test_a_filter_that_asks_for_differences_has_none_in_groups_of_one():
    assert "filter=everything" in mistakes("algorithm=ppo", "collect.group_size=1")["filter"]


def test_a_coefficient_of_zero_cannot_be_steered():
    assert "no effect on 0" in mistakes("algorithm=ppo", "algorithm.kl_coefficient=0")["algorithm.kl_target"]
    assert compose(["algorithm=ppo", "algorithm.kl_coefficient=0", "algorithm.kl_target=null"])


def test_an_algorithm_is_the_same_in_its_file_and_in_its_class():
    """Settings of the optimizer are excluded, because they belong to an experiment."""
    adapter: TypeAdapter[AlgorithmSpec] = TypeAdapter(AnyAlgorithmSpec)
    for name in [file.name for file in OPTIONS if file.parts[0] == "algorithm"]:
        settings = Composer().tree.plain([f"algorithm={name}"])["algorithm"]
        if name == "distill":
            settings["teacher"]["name"] = "organisation/name"
        spec = adapter.validate_python(settings)
        assert spec.name == name
        own = set(type(spec).model_fields) - set(OptimizerSpec.model_fields)
        required = {key: getattr(spec, key) for key in own if type(spec).model_fields[key].is_required()}
        plain = type(spec)(**required)
        assert {key: getattr(spec, key) for key in own} == {key: getattr(plain, key) for key in own}


REMOTE = "inference=remote inference.url=http://there/v1 inference.model=name"
WEIGHTS = {
    f"model.lora=null {REMOTE}": ("model.lora", "loads adapters, not full weights"),
    "model.lora=null algorithm=ppo algorithm.value=model": ("algorithm.value", "expected head"),
    "model.lora=null model.quantization=nf4": ("model.quantization", "cannot be trained"),
    f"model.quantization=nf4 {REMOTE}": ("model.quantization", "inference=embedded"),
    "model.quantization=int8": ("model.quantization", "nf4"),
    f"model.chat_template=chatml {REMOTE}": ("model.chat_template", "renders conversations with its own"),
    "+model.chat_template_kwargs.a=1 inference=litellm inference.model=openai/name rounds=0": (
        "model.chat_template_kwargs",
        "inference.extra",
    ),
}
"""Options that are incompatible with full fine-tuning, a quantized base and a chat template."""


def test_incompatible_trained_weights_are_rejected():
    assert without_reason(WEIGHTS) == {}


def test_compatible_trained_weights_are_accepted():
    compose(["model.lora=null", "algorithm=ppo", "algorithm.value=head"])
    compose(["model.quantization=nf4", "algorithm=ppo", "algorithm.value=model"])


def test_local_models_must_be_there(tmp_path):
    assert (
        f"folder '{tmp_path}/model' does not exist"
        in mistakes("model=hf", f"model.name={tmp_path}/model")["model.name"]
    )
    (tmp_path / "model").mkdir()
    assert compose(["model=hf", f"model.name={tmp_path}/model"])
    assert "needs a value" in mistakes("model=hf")["model.name"]


def test_root_is_absolute_and_lies_beside_the_code_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose().root == str(CONF.parent / "runs")
    assert compose(["root=there"]).root == str(tmp_path / "there")


ENVIRONMENT = """
from components.environments.protocol import Step
from components.trajectories.schema import Scenario
class World:
    splits = {"train": ["a", "b"], "heldout": ["c"]}
    def scenarios(self, split): return [Scenario(i, {}, split) for i in self.splits.get(split, [])]
    def tools(self): return []
    def reset(self, scenario): return []
    def step(self, action): return Step([], done=True)
    def close(self): pass
class Leaky(World):
    splits = {"train": ["a", "b"], "heldout": ["b"]}
class Twice(World):
    splits = {"train": ["a", "a"], "heldout": ["c"]}
class Marked(World):
    splits = {"train": ["a", "b~second"], "heldout": ["c"]}
class Slow(World):
    async def scenarios(self, split): return World.scenarios(self, split)
class Broken(World):
    def scenarios(self, split): raise KeyError("no data")
class Rows(World):
    def scenarios(self, split): return [{"id": "a"}]
class Half:
    def reset(self, scenario): return []
def kind(trajectory, weight: float = 1.0) -> float: return weight
async def asks(scenario, client, nope): return 1.0
"""


@pytest.fixture
def compose_own(tmp_path, monkeypatch):
    """Create a user's module and config folder, and return a function that composes with them."""
    (tmp_path / "my_world.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf" / "environment").mkdir(parents=True)
    (tmp_path / "conf" / "environment" / "world.yaml").write_text("_target_: my_world.World\n")

    def run(name: str, *lines: str) -> ExperimentSpec | dict[str, str]:
        overrides = ["environment=world", f"environment._target_=my_world.{name}", "allow=[my_world]", *lines]
        try:
            return compose([*overrides, "collect.scenarios=2"], config_dir=tmp_path / "conf")
        except SpecError as error:
            return {problem.path: problem.message for problem in error.problems}

    return run


def test_environments_of_a_user_are_held_to_the_protocol(compose_own):
    assert isinstance(compose_own("World", "warmup=none"), ExperimentSpec)
    assert isinstance(compose_own("Slow", "warmup=none"), ExperimentSpec)
    assert "warmup=none" in compose_own("World")["warmup"]
    assert "'b'" in compose_own("Leaky", "warmup=none")["environment"]
    assert "same id" in compose_own("Twice", "warmup=none")["environment"]
    assert "the scenario id 'b~second'; expected one without '~'" in compose_own("Marked", "warmup=none")["environment"]
    assert "KeyError: 'no data'" in compose_own("Broken", "warmup=none")["environment"]
    assert "returned {'id': 'a'} (dict); expected" in compose_own("Rows", "warmup=none")["environment"]
    assert "scenarios, tools, step, close" in compose_own("Half", "warmup=none")["environment._target_"]


def test_agent_with_an_unknown_parameter_is_rejected(compose_own):
    problems = compose_own("World", "warmup=none", "agent.function=my_world.asks")
    assert set(problems) == {"agent.function"}
    assert "my_world.asks requires nope; expected some of scenario, sample, client" in problems["agent.function"]
    assert isinstance(
        compose_own("World", "warmup=none", "agent.function={_target_: my_world.asks, nope: 3}"), ExperimentSpec
    )


def test_missing_value_is_reported_once_and_environment_errors_are_not_wrapped(tmp_path):
    assert mistakes("environment=mcp", "environment.command=[server]") == {
        "environment.scenarios": "needs a value: environment.scenarios=VALUE"
    }
    (tmp_path / "tasks.json").write_text("[{}]")
    problems = mistakes(
        "environment=mcp", "environment.command=[server]", f"environment.scenarios={tmp_path}/tasks.json"
    )
    assert all(path.startswith("environment") for path in problems)
    assert not any("problem in the configuration" in message for message in problems.values())


def test_class_in_place_of_an_option_is_rejected_with_advice():
    message = mistakes("environment={_target_: my_world.World}")["environment"]
    assert "write DIR/environment/NAME.yaml and add --config-dir DIR environment=NAME" in message
    assert "NAME.yaml" not in mistakes("environment=shopp")["environment"]


def test_experiment_without_its_package_line_is_rejected(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("rounds: 1\n")
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=mine"], config_dir=tmp_path)
    assert {problem.path: problem.message for problem in caught.value.problems} == {
        "+experiment": f"{tmp_path}/experiment/mine.yaml must begin with the line '# @package _global_'"
    }
    (tmp_path / "experiment" / "mine.yaml").write_text("defaults:\n  - override /model: tiny\n")
    with pytest.raises(SpecError, match=r"mine.yaml must begin with the line '# @package _global_'$"):
        compose(["+experiment=mine"], config_dir=tmp_path)


@pytest.mark.parametrize("more", [[], ["reward_model=bradley_terry", "reward_model.scenarios=1"]], ids=" ".join)
def test_the_small_experiment_takes_any_environment_and_any_reward(compose_own, tmp_path, more):
    """It defines no key of its own in either."""
    (tmp_path / "conf" / "reward").mkdir()
    (tmp_path / "conf" / "reward" / "kind.yaml").write_text("_target_: my_world.kind\nweight: 2\n")
    own = ["warmup=none", "reward=kind", "+experiment=smoke", "evaluate.scenarios=1", *more]
    assert isinstance(compose_own("World", *own), ExperimentSpec)


def test_rewards_are_put_together_from_options():
    options = ["reward=combined", "+reward@reward.parts.style.reward=format", "+reward.parts.style.needs={task: 0.5}"]
    spec = compose([*options, "reward.parts.style.reward.tags=[answer]", "+reward.parts.task.weight=2"])
    built = spec.reward.build()
    assert list(built.parts) == ["task", "style"]
    assert built.parts["style"].reward.tags == ["answer"]
    assert spec.reward.resolved()["parts"]["task"]["weight"] == 2.0


PART = "+reward.parts.more.reward"
OUTCOME = "{_target_: components.rewards.rules.outcome.Outcome}"
REWARDS = {
    ("+reward.parts.more={weight: 2}",): ("reward.parts.more.reward", "needs a value"),
    (f"{PART}={{_target_: components.rewards.rules.outcom.Outcome}}",): (
        "reward.parts.more.reward._target_",
        "no module",
    ),
    (f"{PART}={{_target_: components.rewards.rules.outcome.Outcome, turn_costs: 1}}",): (
        "reward.parts.more.reward.turn_costs",
        "no such key",
    ),
    (f"+reward.parts.more={{reward: {OUTCOME}, wieght: 2}}",): ("reward.parts.more.wieght", "no such key"),
    (f"+reward.parts.more={{reward: {OUTCOME}, weight: heavy}}",): ("reward.parts.more.weight", "heavy"),
    (f"+reward.parts.more={{reward: {OUTCOME}, needs: {{tsak: 1}}}}",): ("reward.parts.more.needs", "part 'tsak'"),
    (f"+reward.parts.more={{reward: {OUTCOME}, weight: 2}}", "reward.how=product"): (
        "reward.parts.more.weight",
        "a product has no weights",
    ),
    (f"{PART}=3",): ("reward.parts.more", "int is no reward"),
    (f"{PART}={{_target_: components.environments.worlds.shop.Shop}}",): ("reward.parts.more", "Shop is no reward"),
    (f"{PART}={{_target_: components.rewards.composition.clipped.Clipped, reward: {OUTCOME}, low: 2, high: 1}}",): (
        "reward.parts.more.reward.low",
        "2 is more than high=1",
    ),
    (f"{PART}={{_target_: tests.rewards.functions.math_only}}", "allow=[tests]"): (
        "reward.parts.more.reward._target_",
        "expected reward=columns reward.function=tests.rewards.functions.math_only",
    ),
    (f"{PART}={{_target_: tests.rewards.functions.Broken}}", "allow=[tests]"): (
        "reward.parts.more.reward",
        "tests.rewards.functions.Broken cannot be built: KeyError: 'no data'",
    ),
    ("reward=columns", "reward.function=tests.rewards.functions.with_state", "allow=[tests]"): (
        "reward.function",
        "asks for trainer_state",
    ),
    ("reward=columns", "reward.function=tests.rewards.functions.nothing", "allow=[tests]"): (
        "reward.function",
        "'nothing' does not exist",
    ),
    ("reward=columns", "reward.function=tests.rewards.functions.scaled"): ("reward.function", "allow=[tests]"),
    ("reward=pattern", "reward.pattern='('"): ("reward.pattern", "is no regular expression"),
    ("reward=exact", "reward.answer=last"): ("reward.answer", "is no place of an answer"),
    ("reward=json_schema", "reward.schema={type: integr}"): ("reward.schema", "is no JSON schema"),
    ("reward=language", "reward.scripts=[English]"): ("reward.scripts", "is no script of Unicode"),
}
"""Errors of rewards that are reported before anything runs."""


def test_mistakes_in_rewards_are_found_before_the_run():
    for overrides, (path, expected) in REWARDS.items():
        problems = mistakes(*([] if overrides[0].startswith("reward=") else ["reward=combined"]), *overrides)
        assert (overrides, list(problems)) == (overrides, [path])
        assert expected in problems[path]


ANSWER = (
    "'answer': no scenario of components.environments.worlds.shop.Shop has this input field (available: address, order,"
)
UNREAD = {
    ("reward=exact",): ("reward.expected", ANSWER),
    ("reward=numeric", "reward.expected=input.answer"): ("reward.expected", "'input.answer': no scenario"),
    ("reward=choice",): ("reward.expected", ANSWER),
    ("reward=code_tests",): ("reward.tests", "'input.tests': no scenario"),
    ("reward=json_schema", "reward.schema=input.schema"): ("reward.schema", "'input.schema': no scenario"),
    ("reward=tool_use", "reward.needed=needed"): ("reward.needed", "'needed': no scenario"),
    ("reward=combined", "+reward@reward.parts.right.reward=exact"): ("reward.parts.right.reward.expected", ANSWER),
    ("+reward@evaluate.reward=exact",): ("evaluate.reward.expected", ANSWER),
}
"""Rewards that read a field that no scenario of the shop has."""


def test_a_reward_without_anything_to_compare_with_is_refused_before_the_run():
    for lines, (path, expected) in UNREAD.items():
        problems = mistakes(*lines)
        assert (lines, list(problems)) == (lines, [path])
        assert expected in problems[path]


def test_mathematics_without_answers_is_refused_before_the_run():
    pytest.importorskip("math_verify")
    assert ANSWER in mistakes("+experiment=smoke", "reward=math")["reward.expected"]
    assert compose(["+experiment=smoke", "reward=math", "environment=calculator"])


def test_fields_of_an_outcome_are_not_checked_before_an_episode():
    assert compose(["reward=exact", "reward.expected=outcome.right"])
    assert compose(["reward=exact", "reward.expected=order"])


def test_a_reward_of_a_user_may_be_a_function(compose_own, tmp_path):
    (tmp_path / "conf" / "reward").mkdir()
    (tmp_path / "conf" / "reward" / "kind.yaml").write_text("_target_: my_world.kind\nweight: 2\n")
    spec = compose_own("World", "warmup=none", "reward=kind")
    assert spec.reward.build()("episode") == 2.0
    (tmp_path / "conf" / "reward" / "wrong.yaml").write_text("_target_: my_world.World\n")
    assert "score_group" in compose_own("World", "warmup=none", "reward=wrong")["reward._target_"]
    (tmp_path / "conf" / "filter").mkdir()
    (tmp_path / "conf" / "filter" / "wrong.yaml").write_text("_target_: my_world.World\n")
    assert "select" in compose_own("World", "warmup=none", "filter=wrong")["filter._target_"]


def test_every_number_of_scenarios_has_bounds():
    """Rejected before the environment is built: so many scenarios would take all memory."""
    bounded = []
    for file in (CONF / "environment").glob("*.yaml"):
        settings = yaml.safe_load(file.read_text())
        if file.stem == "none":
            continue
        hints = get_type_hints(locate(settings["_target_"]).__init__, include_extras=True)
        for key in {"train", "heldout"} & {key for key, value in settings.items() if isinstance(value, int)}:
            if file.stem == "agentgym":  # a number or a range, which the environment reads
                continue
            for value in (-5, 10**20):
                with pytest.raises(ValidationError):
                    TypeAdapter(hints[key]).validate_python(value)
            bounded.append(f"{file.stem}.{key}")
    assert len(bounded) > 30
    gym = overrides(Path("environment/agentgym"))
    assert "-5 items; expected 1 to 1000000" in mistakes(*gym, "environment.train=-5")["environment.train"]


def test_allow_as_text_is_rejected():
    problems = mistakes("reward._target_=hilo.reward", "allow=hilo")
    assert problems["allow"] == "'hilo': expected a list: allow=[hilo]"
    assert "(components)" in problems["reward._target_"]
