"""Attacks on a served experiment by someone who may start its runs: what the operator does not list is refused."""

from __future__ import annotations

import pytest

from components.errors import ResourceError, SpecError
from flows.experiment.compose import compose
from flows.scheduling import parameters
from flows.scheduling.parameters import ServedExperiment
from tests.refusals import wrong_refusals

pytestmark = pytest.mark.security

ALLOWED = "serve.overrides=[rounds,model,algorithm.learning_rate,deploy.formats,name]"
TRICKS = [
    "environment=mcp",
    "environment.command=[touch,/tmp/planted]",
    "+environment.command=[touch,/tmp/planted]",
    "++environment.command=[touch,/tmp/planted]",
    "environment._target_=os.system",
    "environment={_target_: subprocess.Popen, args: [touch, /tmp/planted]}",
    "rounds={_target_: subprocess.Popen}",
    "algorithm={learning_rate: 1, _target_: os.system}",
    "algorithm.learning_rate={nested: {_target_: os.system}}",
    "model={_target_: os.system}",
    "model=[tiny,{_target_: os.system}]",
    "model.path=/etc",
    "model.name=/etc",
    "model@environment=tiny",
    "/model@_global_=tiny",
    "+model=tiny",
    "++model=tiny",
    "~model",
    "~model=tiny",
    "~rounds",
    "+rounds=2",
    "++rounds=2",
    "rounds@x=2",
    "rounds=${oc.env:HOME}",
    "name=${oc.env:HOME}",
    "name='${oc.env:HOME}'",
    r"name=$\{oc.env:HOME\}",
    r"name='$\{oc.env:HOME}'",
    "deploy.formats=['${oc.env:HOME}']",
    r"deploy.formats=[$\{oc.env:HOME\}]",
    "name=env:HOME",
    "name='env:HOME'",
    "deploy.formats=[merged,env:HOME]",
    "name=${root}",
    "rounds=1,2",
    "rounds=range(1,3)",
    "rounds=choice(1,2)",
    "rounds=interval(1,2)",
    "model=glob(*)",
    "rounds=int(2)",
    "rounds=int('2')",
    "rounds=tag(x,2)",
    "rounds=shuffle(1,2)",
    "algorithm.learning_rate=float(1)",
    "model=str(tiny)",
    "name=str(a)",
    "deploy.formats=[str(merged)]",
    "deploy.formats=sort([merged])",
    "'rounds'=2",
    '"rounds"=2',
    "rounds.x=2",
    "rounds",
    "=2",
    "",
    "hydra.run.dir=/tmp",
    "hydra.mode=MULTIRUN",
    "hydra/launcher=joblib",
    "+hydra.searchpath=[file:///tmp]",
    "experiment=ppo",
    "+experiment=ppo",
    "serve.overrides=[environment]",
    "root=/tmp/elsewhere",
    "store=s3://evil/x",
    "tracking.uri=http://evil.test",
    "allow=[os]",
    "--config-dir=/tmp",
    "rounds=2\nenvironment=mcp",
    "rounds=" + "[" * 900,
    "rounds=" + "9" * 100_000,
]


def resolve(served: ServedExperiment, *lines: str):
    return parameters.resolve(served, list(lines))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> ServedExperiment:
    root = tmp_path_factory.mktemp("root")
    return ServedExperiment("a", "smoke", (ALLOWED, f"root={root}"))


def test_an_override_that_is_not_allowed_is_refused(served, monkeypatch):
    monkeypatch.setenv("HOME", "/home/planted-secret")
    allowed = ["rounds", "model", "algorithm.learning_rate", "deploy.formats", "name"]
    assert [line for line in TRICKS if not list(parameters.not_allowed(["rounds=2", line], allowed))] == []
    for some in (TRICKS[:50], TRICKS[50:]):  # at most 64 overrides are read
        with pytest.raises(SpecError) as error:
            parameters.resolve(served, some)
        assert len(error.value.problems) >= len(some)
        assert "planted-secret" not in str(error.value)


def test_a_group_has_only_the_options_of_the_operator(served):
    options = ["../environment/mcp", "/etc/passwd", "tiny@environment", "null", "''"]
    assert (
        wrong_refusals([(f"model={option}", "model") for option in options], lambda line: resolve(served, line)) == []
    )


def test_what_the_operator_lists_is_allowed(served):
    lines = ["rounds=2", "model=tiny", "algorithm.learning_rate=1e-5", "deploy.formats=[merged]", "name='a-b'"]
    assert not list(parameters.not_allowed(["name='int(2)'"], ["name"]))  # text, no call
    assert parameters.resolve(served, lines) == compose([*served.lines, *lines])


def test_without_a_list_nothing_is_allowed():
    served = ServedExperiment("a", "smoke")
    assert parameters.resolve(served) == compose(["+experiment=smoke"])
    cases = [(line, r"serve\.overrides lists no key") for line in ("rounds=2", "seed=1", "name=x")]
    assert wrong_refusals(cases, lambda line: resolve(served, line)) == []


def test_a_key_that_is_named_is_allowed_whatever_it_is(tmp_path):
    served = ServedExperiment("a", "smoke", ("serve.overrides=[root,environment]",))
    assert parameters.resolve(served, [f"root={tmp_path}", "environment=shop"]).root == str(tmp_path)


def test_a_list_with_what_is_no_key_of_the_experiment_is_refused():
    keys = ["serve.overrides", "experiment", "task", "hydra.run.dir", "hydra/launcher", "+rounds", "a b"]
    cases = [(key, r"serve\.overrides") for key in keys]
    cases += [("algorithm.learning_rat", r"serve\.overrides: 'algorithm\.learning_rat': no such key")]

    def serve(key: str) -> None:
        resolve(ServedExperiment("a", "smoke", (f"serve.overrides=['{key}']",)))

    assert wrong_refusals(cases, serve) == []


def test_too_many_overrides_are_refused_before_they_are_read(served):
    with pytest.raises(SpecError, match="100000 overrides; expected at most 64"):
        parameters.resolve(served, ["rounds=2"] * 100_000)


def test_a_process_that_was_told_of_no_such_deployment_runs_nothing(monkeypatch):
    monkeypatch.delenv(parameters.VARIABLE, raising=False)
    with pytest.raises(ResourceError, match="ESPALIER_DEPLOYMENTS"):
        parameters.from_environment("a")
    for text in ("", "{}", '{"b": {}}', "[]", "nonsense", '{"a": {"experiment": "smoke"}}'):
        monkeypatch.setenv(parameters.VARIABLE, text)
        with pytest.raises(ResourceError, match="ESPALIER_DEPLOYMENTS"):
            parameters.from_environment("a")
