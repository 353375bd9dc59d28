"""Command line of `flows.run`."""

from __future__ import annotations

import textwrap
from unittest.mock import Mock

import pytest
import yaml

from components.errors import Problem, ResourceError, SpecError, TooManyFailures
from flows.experiment import composer
from flows.experiment.compose import check
from tests.flows.processes import python


def test_help_lists_experiments_and_groups_and_imports_nothing_that_only_a_run_needs():
    code = "import sys, flows.run; flows.run.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = python("-c", code)
    assert done.returncode == 0
    heavy = {"torch", "transformers", "mlflow", "prefect", "pandas", "pydantic", "omegaconf"}
    assert heavy & set(done.stderr.split()) == set()
    for words in ("quickstart", "smoke", "+experiment=NAME", "* smollm2_135m", "qwen3_0_6b", "grpo", "Group relative"):
        assert words in done.stdout
    assert len(max(done.stdout.splitlines(), key=len)) <= 120


def test_help_lists_groups_of_a_user(answered, tmp_path):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "maze.yaml").write_text("# A maze of rooms.\n_target_: maze.Maze\n")
    _, out, _ = answered("--help", "--config-dir", str(tmp_path))
    for words in ("maze", "A maze of rooms", "quickstart"):
        assert words in out


def test_cfg_prints_the_composed_config(answered):
    code, out, said = answered("+experiment=smoke", "model.lora.rank=3", "--cfg", "job", "--resolve")
    assert code == 0, said
    config = yaml.safe_load(out)
    assert (config["name"], config["model"]["source"], config["model"]["lora"]["rank"]) == ("smoke", "random", 3)
    assert config["compute"]["stages"]["train"] == "local"
    _, out, _ = answered("name=mine", "model=tiny", "--cfg", "job", "--package", "name")  # without an experiment
    assert "mine" in out


def test_every_mistake_is_named_at_once_without_a_stack_trace(refused):
    said = refused("+experiment=quikstart", "model=tinny", "algoritm.learning_rate=1", "algorithm.learning_rate=fast",
                   "algorithm.clip_hihg=0.3", "rounds=-1", "modle=tiny", "seed=1,2", "a b")  # fmt: skip
    lines = said.splitlines()
    assert lines[0] == "9 problems in the configuration:"
    for path, words in {
        "+experiment": "Did you mean '+experiment=quickstart'?",
        "model": "Did you mean 'model=tiny'?",
        "algoritm.learning_rate": "Did you mean 'algorithm.learning_rate'?",
        "algorithm.learning_rate": "'fast': expected a number",
        "algorithm.clip_hihg": "Did you mean 'algorithm.clip_high'?",
        "rounds": "-1: expected at least 0",
        "modle": "Did you mean 'model=tiny'?",
        "seed": "add -m",
        "a b": "expected key=value",
    }.items():
        assert any(line.startswith(f"  - {path}: ") and words in line for line in lines), (path, said)


MISTAKES = (
    {
        "experiment=smoke": "add one with +. Did you mean '+experiment=smoke'?",
        "+model=tiny": "Did you mean 'model=tiny'?",
        "+experimnt=smoke": "experimnt: there is no such key. Did you mean '+experiment=smoke'?",
        "=3": "has no key",
        "~collect.temprature": "Did you mean 'collect.temperature'?",
        "+algorithm.clip_hihg=1": "Did you mean 'algorithm.clip_high'?",
        "environment.heldut=3": "Did you mean 'environment.heldout'?",
        "compute.stages={trian:process}": "Did you mean 'compute.stages.train'?",
        "root=${foo}": "'foo' not found",
        "early_stopping.patience=2": "Did you mean 'early_stopping={patience: 2}'?",
        "warmup=null": "Did you mean 'warmup=none'?",
        "hydra.sweep.dri=x": "hydra.sweep.dri",
        "rounds": "rounds: has no value; expected rounds=VALUE",
        "learning_rate": "Did you mean 'algorithm.learning_rate=VALUE'?",
        "hydra.mode=RNU": "expected one of [RUN, MULTIRUN]",
    },
    {
        "compute.stages.train=proces": "Did you mean 'process'?",
        "seed=true": "seed: true: expected a whole number",
        "inference.name=true": "inference.name: true: expected one of embedded, litellm, remote, vllm",
        "filter=false": "filter: false: expected one of agent_evol,",
        "environment.train=true": "environment.train: true: expected a whole number",
        "collect.temperature=false": "collect.temperature: false: expected a number",
        "algorithm.learning_rate=1e30": "1e+30: expected at most 1",
        "allow=[nopkg]": "'nopkg' cannot be imported. Check that its folder is in PYTHONPATH",
        "root=": "root: '': expected a folder",
        "model": "model: has no option; expected model=OPTION, one of gemma3_1b,",
        "rounds==3": "Did you mean 'rounds=3'?",
    },
    {
        "rounds: 3": "Did you mean 'rounds=3'?",
        "~model=tiny": "the chosen option is 'smollm2_135m'. Did you mean 'model=tiny'?",
        "collect={group_size: 3": "a mapping as key={a: 1}",
    },
    {"+rounds=4": "+rounds: is already set; omit the +. Did you mean 'rounds=4'?"},
    {"~rounds=5": "~rounds: the key has another value: 4. Did you mean '~rounds'?"},
    {"rounds@x=3": "no such group 'rounds'"},
    {"allow=[no-pkg]": "'no-pkg' is not a package name"},
)
"""Overrides and what answers them. Those of one mapping can stand in one command."""


@pytest.mark.parametrize("mistakes", MISTAKES, ids=len)
def test_a_mistake_is_answered_with_what_to_write(mistakes):
    with pytest.raises(SpecError) as caught:
        check(list(mistakes))
    message = str(caught.value)
    assert [line for line, words in mistakes.items() if words not in message] == [], message
    assert not [own for own in HYDRAS_OWN if own in message]


HYDRAS_OWN = ("EQUAL", "EOF", "token recognition", "viable alternative", "full_key", "append to", "hydra.cc")
"""Terms of Hydra and its grammar that error messages must not contain."""


OPTIONS = {
    ("--confg", "job"): "--confg: unknown option. Did you mean '--cfg'?",
    ("--cfg", "jbo"): "--cfg: 'jbo': expected one of job, hydra, all. Did you mean '--cfg job'?",
    ("--cfg",): "--cfg/-c: expected one argument",
    ("--rounds=3",): "--rounds: unknown option. Did you mean 'rounds=3'?",
    ("--config-name", "x"): "--config-name: unknown option",
    ("-m", "--cfg", "job"): "--run, --multirun, --cfg, --info and --shell-completion exclude each other",
    ("--resolve",): "--resolve: requires --cfg",
    ("--package", "algorithm"): "--package: requires --cfg",
    ("--config-dir", "/nowhere"): "--config-dir: folder '/nowhere' does not exist",
}


def test_a_wrong_option_of_the_command_is_named(refused):
    for arguments, words in OPTIONS.items():
        said = refused("+experiment=smoke", *arguments)
        assert said.startswith("1 problem in the configuration:"), arguments
        assert words in said
        assert "usage:" not in said


def test_the_config_of_what_a_run_would_refuse_or_of_an_unknown_package_is_not_printed(refused, monkeypatch):
    monkeypatch.delenv("NOBODY_SET_IT", raising=False)
    for lines, words in NO_RUN.items():
        assert words in refused(*lines, "--cfg", "job")
    assert "rounds: -1" in refused("+experiment=smoke", "rounds=-1", "--cfg", "all")
    refused("+experiment=smoke", "--cfg", "job", "--package", "nothing")


def test_a_secret_in_place_of_an_option_is_not_repeated(refused):
    for secret in ("hf_" + "aB3dE5gH7j" * 3, "sk-" + "aB3dE5gH7j" * 3):
        for arguments in ([f"--api_key={secret}"], [f"--{secret}"], [f"-r{secret}"], ["--cfg", secret]):
            assert secret not in refused("+experiment=smoke", *arguments), arguments


NO_RUN = {
    ("+experiment=smoke", "rounds=-1"): "rounds: -1: expected at least 0",
    ("+experiment=smoke", "collect.group_size=1"): "collect.group_size: 1: grpo compares",
    ("+experiment=smoke", "model=hf"): "model.name: needs a value",
    ("+experiment=ruler", "reward.model.key_variable=NOBODY_SET_IT"): "NOBODY_SET_IT is not set",
}


def test_without_an_experiment_they_are_listed(refused, capsys):
    from flows import plan
    from flows.explain import calibrate

    for line in (["rounds=2"], ["--cfg", "job"], ["-m", "seed=1,2"]):
        said = refused(*line)
        assert "+experiment: no experiment is chosen; expected +experiment=NAME, one of agent_evol" in said
        assert "smoke" in said
    for other in (plan.main, calibrate.main):
        assert other(["rounds=2"]) == 2
        assert "+experiment: no experiment is chosen" in capsys.readouterr().err
    said = refused("+experiment=zzzzzz")
    assert said.startswith("1 problem")
    assert "'zzzzzz': expected one of" in said


def test_a_run_hands_its_spec_to_the_flow(recorded, tmp_path):
    line = ["+experiment=smoke", f"root={tmp_path}/runs", "algorithm.learning_rate=2e-4"]
    code, calls, said = recorded(*line)
    assert code == 0, said
    (call,) = calls
    assert (call.spec.algorithm.learning_rate, call.spec.root) == (2e-4, f"{tmp_path}/runs")
    assert (call.overrides, call.sweep) == (line, None)
    assert list(tmp_path.iterdir()) == []  # a run's own folder is the flow's business; Hydra makes none


def test_a_sweep_runs_every_point_under_one_id(recorded, tmp_path):
    line = [f"root={tmp_path}/runs", "algorithm.learning_rate=1e-4,3e-4", "seed=range(2)"]
    code, calls, said = recorded("-m", "+experiment=smoke", *line)
    assert code == 0, said
    assert [call.spec.algorithm.learning_rate for call in calls] == [1e-4, 1e-4, 3e-4, 3e-4]
    (sweep,) = {call.sweep for call in calls}
    assert "seed=1" in calls[1].overrides
    folder = tmp_path / "runs" / "sweeps" / sweep
    left = {str(path.relative_to(folder)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"multirun.yaml", "summary.json", *(f"points/000{number}.json" for number in range(4))}


def test_a_sweep_is_checked_point_by_point_before_it_starts(recorded, tmp_path):
    line = [f"root={tmp_path}/runs", "algorithm.minibatches=1,2,3", "model=tiny,tinny", "seed=choice(1,x)"]
    code, calls, said = recorded("-m", "+experiment=smoke", *line)
    assert (code, calls) == (2, [])
    assert list(tmp_path.iterdir()) == []
    for words in ("3 problems", "3 does not divide", "'tinny'", "'x': expected a whole number"):
        assert words in said


def test_the_parameters_of_a_sweeper_are_checked_too(recorded, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "sweep.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2', rounds: '1,many'}}}\n"
    )
    line = ["+experiment=sweep", "--config-dir", str(tmp_path), f"root={tmp_path}/runs"]
    code, calls, said = recorded(*line)
    assert (code, calls) == (2, [])
    assert "rounds: 'many': expected a whole number" in said
    code, calls, said = recorded(*line, "hydra.sweeper.params.rounds='1'")
    assert code == 0, said
    assert len(calls) == 2


def test_large_and_continuous_sweeps_are_checked_value_by_value(monkeypatch):
    monkeypatch.setattr(composer, "MOST_POINTS", 7)
    assert len(check(["seed=range(4)", "rounds=1,2"], multirun=True)) == 6  # in place of the 8 points
    searched = ["hydra/sweeper=optuna", "algorithm.learning_rate=interval(1e-5,1e-3)"]
    assert check(searched, multirun=True)[1].algorithm.learning_rate == 1e-3
    for line, words in {
        "algorithm.learning_rate=interval(0,1)": "more than 0",
        "seed=range(-1,5)": "at least 0",
        "seed=range(3,3)": "sweeps over an empty list; expected at least one value",
    }.items():
        with pytest.raises(SpecError, match=words):
            check([line, "rounds=1,2"], multirun=True)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ResourceError("no disk space"), 2, "no disk space"),
        (SpecError([Problem("model", "has no chat template")]), 2, "model: has no chat template"),
        (TooManyFailures("9 of 10 failed"), 1, "TooManyFailures: 9 of 10 failed"),
        (KeyboardInterrupt(), 130, "run the same command again to resume"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_run_decides_the_exit_code(recorded, tmp_path, error, code, words):
    for mode in ([], ["-m"]):
        ends = Mock(side_effect=error)
        ended, _, said = recorded(*mode, "+experiment=smoke", f"root={tmp_path}/runs", ends=ends)
        assert (ended, words in said, "Traceback" in said) == (code, True, False), mode


def test_hydra_leaves_logging_alone_and_a_failure_of_our_own_shows_its_trace(tmp_path):
    code = f"""
    import logging, sys, types
    def run(spec, **_):
        assert logging.getLogger().handlers == []
        print("RAN", flush=True)
        if spec.seed == 9:
            raise RuntimeError("a bug")
        return {{"success": 0.5}}
    sys.modules["flows.session"] = types.ModuleType("flows.session")
    sys.modules["flows.session"].run = run
    from flows.run import main
    for more in ([], ["-m"], ["seed=9"]):
        main([*more, "+experiment=smoke", "root={tmp_path}/runs"])
    """
    done = python("-c", textwrap.dedent(code))
    assert done.stdout.splitlines().count("RAN") == 3, done.stderr
    assert (done.returncode, "Traceback" in done.stderr, "a bug" in done.stderr) == (1, True, True)
    assert "[INFO]" not in done.stderr


def test_a_root_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    done = python("-m", "flows.run", "+experiment=smoke", f"root={tmp_path}/file")
    assert done.returncode == 2
    assert done.stderr.startswith(f"root={tmp_path}/file: not writable: ")
    assert "root=DIR" in done.stderr
    assert "Traceback" not in done.stderr
