"""Command line of `flows.run`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "flows.run", *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=600)


def recorded(
    *arguments: str, body: str = "return {'success': 0.5}"
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Run the command with a flow that records its arguments and then executes `body`."""
    code = f"""
    import json, sys, types
    import flows
    def run(spec, *, overrides, sweep=None, prune=None):
        call = dict(learning_rate=spec.algorithm.learning_rate, overrides=overrides, sweep=sweep, root=spec.root)
        print("CALL", json.dumps(call), flush=True)
        from components import errors
        {body}
    flows.session = sys.modules["flows.session"] = types.ModuleType("flows.session")
    flows.session.run = run
    from flows.run import main
    main({list(arguments)!r})
    """
    line = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done, [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CALL ")]


def test_help_imports_nothing_that_only_a_run_needs():
    code = "import sys, flows.run; flows.run.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0
    heavy = {"torch", "transformers", "mlflow", "prefect", "pandas", "pydantic", "omegaconf"}
    assert heavy & set(done.stderr.split()) == set()


def test_help_lists_experiments_and_groups():
    done = command("--help")
    assert done.returncode == 0
    for words in ("quickstart", "smoke", "+experiment=NAME", "* smollm2_135m", "qwen3_0_6b", "grpo", "Group relative"):
        assert words in done.stdout
    assert len(max(done.stdout.splitlines(), key=len)) <= 120


def test_help_lists_groups_of_a_user(tmp_path):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "maze.yaml").write_text("# A maze of rooms.\n_target_: maze.Maze\n")
    done = command("--help", "--config-dir", str(tmp_path))
    assert "maze" in done.stdout
    assert "A maze of rooms" in done.stdout
    assert "quickstart" in done.stdout


def test_cfg_prints_the_composed_config():
    done = command("+experiment=smoke", "model.lora.rank=3", "--cfg", "job", "--resolve")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["name"] == "smoke"
    assert config["model"]["source"] == "random"
    assert config["model"]["lora"]["rank"] == 3
    assert config["compute"]["stages"]["train"] == "local"


def test_every_mistake_is_named_at_once_without_a_stack_trace():
    done = command("+experiment=quikstart", "model=tinny", "algoritm.learning_rate=1", "algorithm.learning_rate=fast",
                   "algorithm.clip_hihg=0.3", "rounds=-1", "modle=tiny", "seed=1,2", "a b")  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
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
        assert any(line.startswith(f"  - {path}: ") and words in line for line in lines), (path, done.stderr)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("experiment=smoke", "Did you mean '+experiment=smoke'?"),
        ("+model=tiny", "Did you mean 'model=tiny'?"),
        ("+experimnt=smoke", "Did you mean '+experiment=smoke'?"),
        ("=3", "has no key"),
        ("~collect.temprature", "Did you mean 'collect.temperature'?"),
        ("+algorithm.clip_hihg=1", "Did you mean 'algorithm.clip_high'?"),
        ("environment.heldut=3", "Did you mean 'environment.heldout'?"),
        ("compute.stages={trian:process}", "Did you mean 'compute.stages.train'?"),
        ("compute.stages.train=proces", "Did you mean 'process'?"),
        ("root=${foo}", "'foo' not found"),
        ("early_stopping.patience=2", "Did you mean 'early_stopping={patience: 2}'?"),
        ("warmup=null", "Did you mean 'warmup=none'?"),
        ("hydra.sweep.dri=x", "hydra.sweep.dri"),
        ("seed=true", "seed: 'true': expected a whole number"),
        ("environment.train=true", "environment.train: 'true': expected a whole number"),
        ("collect.temperature=false", "collect.temperature: 'false': expected a number"),
        ("algorithm.learning_rate=1e30", "1e+30: expected at most 1"),
        ("allow=[nopkg]", "'nopkg' cannot be imported. Check that its folder is in PYTHONPATH"),
        ("allow=[no-pkg]", "'no-pkg' is not a package name"),
        ("root=", "root: '': expected a folder"),
        ("rounds", "rounds: has no value; expected rounds=VALUE"),
        ("model", "model: has no option; expected model=OPTION, one of hf,"),
        ("learning_rate", "Did you mean 'algorithm.learning_rate=VALUE'?"),
        ("rounds==3", "Did you mean 'rounds=3'?"),
        ("rounds: 3", "Did you mean 'rounds=3'?"),
        ("+rounds=4", "+rounds: is already set; omit the +. Did you mean 'rounds=4'?"),
        ("~rounds=5", "~rounds: the key has another value: 4. Did you mean '~rounds'?"),
        ("~model=tiny", "the chosen option is 'smollm2_135m'. Did you mean 'model=tiny'?"),
        ("rounds@x=3", "no such group 'rounds'"),
        ("collect={group_size: 3", "a mapping as key={a: 1}"),
        ("hydra.mode=RNU", "expected one of [RUN, MULTIRUN]"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(line, words):
    from components.errors import SpecError
    from flows.experiment.compose import check

    with pytest.raises(SpecError) as caught:
        check([line])
    message = str(caught.value)
    assert words in message
    assert not [own for own in HYDRAS_OWN if own in message]


HYDRAS_OWN = ("EQUAL", "EOF", "token recognition", "viable alternative", "full_key", "append to", "hydra.cc")
"""Terms of Hydra and its grammar that error messages must not contain."""


def answered(capsys, *arguments: str) -> tuple[object, str]:
    """Run the command in this process; return the exit code and standard error."""
    from flows.run import main

    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    printed = capsys.readouterr()
    assert printed.out == ""
    return end.value.code, printed.err


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


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_a_wrong_option_of_the_command_is_named(capsys, arguments):
    code, said = answered(capsys, "+experiment=smoke", *arguments)
    assert code == 2
    assert said.startswith("1 problem in the configuration:")
    assert OPTIONS[arguments] in said
    assert "usage:" not in said


def test_a_wrong_option_is_answered_without_a_stack_trace(tmp_path):
    for arguments in (["--confg", "job"], ["--cfg", "job", "--package", "nothing"]):
        done = command("+experiment=smoke", *arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("secret", ["hf_" + "aB3dE5gH7j" * 3, "sk-" + "aB3dE5gH7j" * 3])
def test_a_secret_in_place_of_an_option_is_not_repeated(capsys, secret):
    for arguments in ([f"--api_key={secret}"], [f"--{secret}"], [f"-r{secret}"], ["--cfg", secret]):
        code, said = answered(capsys, "+experiment=smoke", *arguments)
        assert code == 2
        assert secret not in said


NO_RUN = {
    ("+experiment=smoke", "rounds=-1"): "rounds: -1: expected at least 0",
    ("+experiment=smoke", "collect.group_size=1"): "collect.group_size: 1: grpo compares",
    ("+experiment=smoke", "model=hf"): "model.name: needs a value",
}


@pytest.mark.parametrize("part", ["job", "all"])
@pytest.mark.parametrize("lines", NO_RUN, ids=" ".join)
def test_the_config_of_what_a_run_would_refuse_is_not_printed(capsys, lines, part):
    code, said = answered(capsys, *lines, "--cfg", part)
    assert code == 2
    assert NO_RUN[lines] in said


def test_a_key_that_a_run_lacks_is_named_with_its_config_too(capsys, monkeypatch):
    monkeypatch.delenv("NOBODY_SET_IT", raising=False)
    judge = ["reward.model.key_variable=NOBODY_SET_IT"]
    code, said = answered(capsys, "+experiment=ruler", *judge, "--cfg", "job")
    assert (code, "NOBODY_SET_IT is not set" in said) == (2, True)


def test_without_an_experiment_they_are_listed(capsys):
    from flows import plan
    from flows.explain import calibrate

    for line in (["rounds=2"], ["--cfg", "job"], ["-m", "seed=1,2"]):
        code, said = answered(capsys, *line)
        assert code == 2
        assert "+experiment: no experiment is chosen; expected +experiment=NAME, one of agent_evol" in said
        assert "smoke" in said
    for main in (plan.main, calibrate.main):
        assert main(["rounds=2"]) == 2
        assert "+experiment: no experiment is chosen" in capsys.readouterr().err


def test_a_run_of_the_defaults_has_a_name_of_its_own(capsys):
    from flows.run import main

    main(["name=mine", "model=tiny", "--cfg", "job", "--package", "name"])
    assert "mine" in capsys.readouterr().out


def test_a_misspelt_experiment_is_one_problem(capsys):
    code, said = answered(capsys, "+experiment=zzzzzz")
    assert code == 2
    assert said.startswith("1 problem")
    assert "'zzzzzz': expected one of" in said


def test_a_run_hands_its_spec_to_the_flow(tmp_path):
    done, calls = recorded("+experiment=smoke", f"root={tmp_path}/runs", "algorithm.learning_rate=2e-4")
    assert done.returncode == 0, done.stderr
    assert calls == [
        {
            "learning_rate": 2e-4,
            "overrides": ["+experiment=smoke", f"root={tmp_path}/runs", "algorithm.learning_rate=2e-4"],
            "sweep": None,
            "root": f"{tmp_path}/runs",
        }
    ]
    assert list(tmp_path.iterdir()) == []  # a run's own folder is the flow's business; Hydra makes none


def test_a_sweep_runs_every_point_under_one_id(tmp_path):
    line = [f"root={tmp_path}/runs", "algorithm.learning_rate=1e-4,3e-4", "seed=range(2)"]
    done, calls = recorded("-m", "+experiment=smoke", *line)
    assert done.returncode == 0, done.stderr
    assert [call["learning_rate"] for call in calls] == [1e-4, 1e-4, 3e-4, 3e-4]
    assert len({call["sweep"] for call in calls}) == 1
    assert calls[0]["sweep"]
    assert "seed=1" in calls[1]["overrides"]
    folder = tmp_path / "runs" / "sweeps" / calls[0]["sweep"]
    left = {str(path.relative_to(folder)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"multirun.yaml", "summary.json", *(f"points/000{number}.json" for number in range(4))}


def test_a_sweep_is_checked_point_by_point_before_it_starts(tmp_path):
    line = [f"root={tmp_path}/runs", "algorithm.minibatches=1,2,3", "model=tiny,tinny", "seed=choice(1,x)"]
    done, calls = recorded("-m", "+experiment=smoke", *line)
    assert done.returncode == 2
    assert calls == []
    assert list(tmp_path.iterdir()) == []
    assert "3 problems" in done.stderr
    for words in ("3 does not divide", "'tinny'", "'x': expected a whole number"):
        assert words in done.stderr


def test_the_parameters_of_a_sweeper_are_checked_too(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "sweep.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2', rounds: '1,many'}}}\n"
    )
    done, calls = recorded("+experiment=sweep", "--config-dir", str(tmp_path), f"root={tmp_path}/runs")
    assert (done.returncode, calls) == (2, [])
    assert "rounds: 'many': expected a whole number" in done.stderr
    done, calls = recorded("+experiment=sweep", "--config-dir", str(tmp_path), f"root={tmp_path}/runs",
                           "hydra.sweeper.params.rounds='1'")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(calls) == 2


def test_large_and_continuous_sweeps_are_checked_value_by_value():
    from components.errors import SpecError
    from flows.experiment.compose import check
    from flows.experiment.composer import MOST_POINTS

    assert len(check(["seed=range(100)", "rounds=1,2"], multirun=True)) == 102 > MOST_POINTS
    searched = ["hydra/sweeper=optuna", "algorithm.learning_rate=interval(1e-5,1e-3)"]
    assert check(searched, multirun=True)[1].algorithm.learning_rate == 1e-3
    for line, words in {
        "algorithm.learning_rate=interval(0,1)": "more than 0",
        "seed=range(-1,100)": "at least 0",
        "seed=range(3,3)": "sweeps over an empty list; expected at least one value",
    }.items():
        with pytest.raises(SpecError, match=words):
            check([line, "rounds=1,2"], multirun=True)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise errors.ResourceError('no disk space')", 2, "no disk space"),
        ("raise errors.SpecError([errors.Problem('model', 'has no chat template')])", 2, "model: has no chat template"),
        ("raise errors.TooManyFailures('9 of 10 failed')", 1, "TooManyFailures: 9 of 10 failed"),
        ("raise KeyboardInterrupt", 130, "run the same command again to resume"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["-m"]], ids=["run", "sweep"])
def test_what_ends_a_run_decides_the_exit_code(tmp_path, body, code, words, mode):
    done, _ = recorded(*mode, "+experiment=smoke", f"root={tmp_path}/runs", body=body)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_of_our_own_shows_its_trace(tmp_path):
    done, _ = recorded("+experiment=smoke", f"root={tmp_path}/runs", body="raise RuntimeError('a bug')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a bug" in done.stderr


def test_hydra_leaves_logging_alone(tmp_path):
    body = "import logging; assert logging.getLogger().handlers == []; return {'success': 0.5}"
    for mode in ([], ["-m"]):
        done, calls = recorded(*mode, "+experiment=smoke", f"root={tmp_path}/runs", body=body)
        assert done.returncode == 0, done.stderr
        assert len(calls) == 1
        assert "[INFO]" not in done.stderr


def test_a_root_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("+experiment=smoke", f"root={tmp_path}/file")
    assert done.returncode == 2
    assert done.stderr.startswith(f"root={tmp_path}/file: not writable: ")
    assert "root=DIR" in done.stderr
    assert "Traceback" not in done.stderr
