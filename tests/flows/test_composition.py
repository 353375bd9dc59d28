"""What an experiment and the command line compose to, through the command itself: Hydra's composition, printed."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml

from components.errors import SpecError
from flows.experiment.compose import check, compose
from flows.experiment.composer import Composer
from flows.experiment.config_loader import CONF
from flows.experiment.config_tree import ConfigTree
from flows.run import main
from flows.terminal.arguments import CODE

ROOT = Path(__file__).parent.parent.parent
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))

EXPERIMENT_FILES = {
    # As in the README: blocks that the experiment writes out itself.
    "inline": """
        defaults:
          - override /model: tiny
          - override /environment: null
          - override /reward: null
          - override /algorithm: null
          - override /filter: null
        name: inline
        allow: [tests]
        environment: {_target_: components.environments.games.guess.Guess, train: 40, difficulties: [1]}
        reward: {_target_: tests.rewards.functions.reward_len}
        algorithm: {name: reinforce_pp, learning_rate: 0.5}
        filter: {_target_: components.filters.top.Top, share: 0.5}
        warmup: {demonstrations: 16, algorithm: {epochs: 3}}
        """,
    "based": """
        defaults: [inline, _self_]
        name: based
        environment: {train: 50}
        reward: {word_cost: 1}
        """,
    "named": """
        defaults:
          - override /model: hf
        name: named
        model: {name: Organisation/Model, max_length: 99}
        warmup: null
        """,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    for name, text in EXPERIMENT_FILES.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{textwrap.dedent(text)}")
    return tmp_path


@pytest.fixture
def composed(folder, capsys, monkeypatch):
    """Prints the config as the command composes it, and reads it."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; this restores it

    def run(*arguments: str, check: bool = True) -> dict[str, Any]:
        if not check:
            monkeypatch.setattr("flows.experiment.compose.compose_points", lambda *_, **__: ([], None))
        main(["--config-dir", str(folder), *arguments, "--cfg", "job"])
        return yaml.safe_load(capsys.readouterr().out)

    return run


def option(group: str, name: str) -> Any:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


@pytest.mark.parametrize("experiment", ["inline", "based"])
def test_an_option_of_the_command_line_wins_whole_over_an_inline_block(composed, experiment):
    plain = composed(f"+experiment={experiment}", check=False)
    for options in (
        {"reward": "returned", "environment": "guess"},  # the block of the environment has the same target
        {"reward": "outcome", "environment": "shop", "algorithm": "dpo", "filter": "signal", "model": "smollm2_135m"},
    ):
        lines = [f"{group}={name}" for group, name in options.items()]
        expected = {group: option(group, name) for group, name in options.items()}
        assert composed(f"+experiment={experiment}", *lines, check=False) == {**plain, **expected}


def test_no_warmup_is_none_whatever_the_experiment_sets_in_it(composed):
    for experiment in ("inline", "smoke", "agent_evol", "r3"):
        assert composed(f"+experiment={experiment}", "warmup=none", check=False)["warmup"] is None, experiment


def test_a_block_that_names_another_thing_does_not_mix_with_the_chosen_option(composed):
    assert composed("+experiment=named", "model=tiny", check=False)["model"] == option("model", "tiny")
    kept = composed("+experiment=named", "model=hf", check=False)["model"]  # the experiment's own choice
    assert (kept["name"], kept["max_length"]) == ("Organisation/Model", 99)


def test_a_null_of_the_experiment_does_not_replace_the_chosen_option(composed):
    assert composed("+experiment=named", check=False)["warmup"] is None
    assert composed("+experiment=named", "warmup=sft_short", check=False)["warmup"]["demonstrations"] == 8
    assert composed("+experiment=named", "warmup=sft", check=False)["warmup"]["demonstrations"] == 28


def test_settings_of_an_experiment_stay_with_another_option(composed):
    """They are no description of another thing: the learning rate of the quickstart is also that of gspo."""
    data = composed("+experiment=quickstart", "algorithm=gspo", "model=qwen3_0_6b", "model.dtype=float32")
    assert data["algorithm"]["name"] == "gspo"
    assert data["algorithm"]["learning_rate"] == 3e-4
    assert data["model"]["name"] == option("model", "qwen3_0_6b")["name"]
    assert data["model"]["max_length"] == 512


def test_values_of_the_command_line_come_after_its_options(composed):
    data = composed("+experiment=inline", "reward=outcome", "reward.turn_cost=0.25", check=False)
    assert data["reward"] == {**option("reward", "outcome"), "turn_cost": 0.25}


def test_a_nested_option_wins_whole(folder, composed):
    (folder / "experiment" / "judged.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /reward: ruler\nname: judged\n"
        "reward: {model: {name: litellm, model: provider/name}, rubric: R}\n"
    )
    chosen = ["judge_model@reward.model=served"]
    reward = composed("+experiment=judged", *chosen, check=False)["reward"]
    assert reward["model"] == composed("reward=ruler", *chosen, check=False)["reward"]["model"]
    assert reward["rubric"] == "R"


def test_what_is_checked_is_what_hydra_composes(composed):
    """Every fourth experiment as it is, with options in place of its own, or with values. `test_configs` checks all."""
    composer = Composer()
    lines = itertools.cycle(
        [[], ["reward=returned", "warmup=none", "environment=guess"], ["seed=3", "agent.max_turns=2"]]
    )
    for experiment, line in zip(EXPERIMENTS[::4], lines, strict=False):
        overrides, problems = composer.parse([f"+experiment={experiment}", *line])
        assert not problems
        checked, problems = composer.point(overrides)
        assert not problems
        assert composed(f"+experiment={experiment}", *line, "--resolve", check=False) == checked, experiment


def test_a_run_and_the_points_of_a_sweep_get_what_was_chosen(folder, recorded):
    base = ["--config-dir", str(folder), "+experiment=inline", f"root={folder}/runs", "environment=shop", "warmup=none"]
    given = []
    for arguments in (["reward=returned"], ["-m", "reward=returned,outcome"]):
        code, calls, said = recorded(*base, *arguments)
        assert code == 0, said
        given += [call.spec.model_dump(mode="json", include={"reward", "environment", "warmup"}) for call in calls]
    rewards = ["components.rewards.rules.returned.Returned"] * 2 + ["components.rewards.rules.outcome.Outcome"]
    assert [one["reward"]["_target_"] for one in given] == rewards
    assert all(one["environment"] == option("environment", "shop") and one["warmup"] is None for one in given)


# --- parsed files and composed configs are kept until they change ----------------------------------------------------


def test_an_edited_file_is_composed_again(folder, tmp_path_factory, monkeypatch):
    project = tmp_path_factory.mktemp("project") / "conf"
    shutil.copytree(CONF, project)
    for module in ("config_loader", "config_tree"):
        monkeypatch.setattr(f"flows.experiment.{module}.CONF", project)

    def composed() -> tuple[str, str]:
        return compose().reward.target, compose(["+experiment=inline"], config_dir=folder).name

    (project / "reward" / ".#outcome.yaml").symlink_to("user@host.1")  # as an editor locks a file
    assert composed() == (option("reward", "outcome")["_target_"], "inline")
    edit(project / "config.yaml", "reward: outcome", "reward: returned")
    edit(folder / "experiment" / "inline.yaml", "name: inline", "name: edited")
    assert composed() == (option("reward", "returned")["_target_"], "edited")
    (project / "reward" / "added.yaml").write_text("# reward\n_target_: components.rewards.rules.outcome.Outcome\n")
    assert compose(["reward=added"]).reward.target == "components.rewards.rules.outcome.Outcome"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_composition_leaves_the_next_one_as_it_would_be_alone():
    """Two configs of one tree share the parsed files, and two points the composed config."""
    lines = ["+experiment=smoke", "reward=outcome", "warmup.demonstrations=9", "~environment.difficulties", "size=tiny"]
    others = ["+experiment=smoke"], ["+experiment=smoke", "hydra.job.name=x", "+environment.seed=3"]
    alone = [_data(ConfigTree(), line) for line in (lines, *others)]
    shared = ConfigTree()
    assert [_data(shared, line) for line in (lines, *others, lines, *others)] == alone * 2


def test_threads_compose_what_each_would_compose_alone():
    lines = [
        ["+experiment=smoke", "warmup=none"],
        ["+experiment=quickstart", "seed=3"],
        ["+experiment=quickstart", "algorithm=ppo"],
    ]
    alone = [compose(line) for line in lines]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(compose, lines * 3))
    assert together == alone * 3


def _data(tree: ConfigTree, lines: list[str]) -> Any:
    composer = Composer()
    composer.tree = tree
    return composer.point(composer.parse(lines)[0])


def test_the_internals_of_hydra_are_those_of_a_version_that_was_checked():
    """After an update, compare `flows/experiment/hydra_internals.py` and what `config_loader.py` overrides with it."""
    assert hydra.__version__.rpartition(".")[0] == "1.3"
    imports = [path for path in CODE.rglob("*.py") if path.parts[len(CODE.parts)] in ("components", "flows", "docs")]
    internal = [path for path in imports if re.search(r"^\s*(from|import) hydra\._internal", path.read_text(), re.M)]
    assert [path.name for path in internal] == ["hydra_internals.py"]


# --- what cannot win is refused -------------------------------------------------------------------------------------


def test_several_options_for_a_group_are_refused(folder):
    lines = ["environment=[shop,guess]", "model=[tiny,hf]", "judge_model@reward.model=[served,litellm]"]
    with pytest.raises(SpecError) as caught:
        check(["+experiment=ruler", *lines])
    for line in lines:
        key, _, value = line.partition("=")
        assert f"{key}: {value}: a group has one option" in str(caught.value)
    (folder / "experiment" / "several.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /environment: [shop, guess]\nname: several\n"
    )
    with pytest.raises(SpecError, match=r"environment: \[shop,guess\]: expected one option for a group"):
        check(["+experiment=several"], config_dir=folder)


def test_an_option_that_is_left_out_and_a_block_that_stays_are_refused(folder):
    with pytest.raises(SpecError) as caught:
        check(["+experiment=inline", "~reward", "~warmup"], config_dir=folder)
    for line in ("~reward", "~warmup"):
        assert f"{line}: removes the option, but not the keys that the experiment sets; expected" in str(caught.value)
    assert "Did you mean 'warmup=none'?" in str(caught.value)


REMEDIES = {
    ("+experiment=agent_evol", "algorithm=dpo"): "filter.filters.one.count=2",
    ("+experiment=quickstart", "algorithm=dpo"): "~algorithm.minibatches",
    ("+experiment=r3", "environment=shop"): "~environment.difficulties",
    ("+experiment=chain", "filter=signal"): "~filter.filters",
}
"""Choices that the experiment's file stands against, and the override that the message names."""


def test_what_the_file_stands_against_is_refused_with_the_override_that_works(folder):
    (folder / "experiment" / "chain.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /filter: agent_evol\n  - override /algorithm: sft\n"
        "name: chain\nfilter: {filters: {share: {share: 0.8}}}\n"
    )
    for lines, remedy in REMEDIES.items():
        with pytest.raises(SpecError, match=re.escape(remedy)):
            compose(lines, config_dir=folder)
        compose([*lines, remedy], config_dir=folder)


def test_a_key_of_the_command_line_is_not_blamed_on_the_file():
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=smoke", "environment=shop", "+environment.difficulties=[1]"])
    assert "to remove it" not in str(caught.value)
