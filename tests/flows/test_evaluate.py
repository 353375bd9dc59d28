"""Comparison of policies: trained, untrained, random, solver and prompted, on the same held-out scenarios."""

from __future__ import annotations

import json
import re

import pytest

from components.errors import SpecError
from flows import evaluate as command
from flows.evaluation.policies import own_keys
from flows.experiment.compose import compose
from tests.docs.pages import ROOT, commands, words
from tests.flows.pretend import pretend, run_stages
from tests.rewards.judge_server import Reply, judge_server

KEY = "sk-of-the-test-0123456789"
SMALL = ["+experiment=smoke", "evaluate.scenarios=4", "warmup=none", "deploy=none", "agent.format=react"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("root_logger")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the record of a real run of one round, and its root."""
    root = tmp_path_factory.mktemp("runs")
    return run_stages(compose([*SMALL, f"root={root}"]))[0], root


@pytest.fixture
def evaluated(trained, capsys):
    """Return a function that calls the command with --json and returns the exit code, the result and stderr."""

    def call(*arguments: str) -> tuple[int, dict, str]:
        code = command.main([*SMALL, f"root={trained[1]}", "--json", *arguments])
        captured = capsys.readouterr()
        return code, json.loads(captured.out.splitlines()[-1]) if captured.out else {}, captured.err

    return call


def test_a_run_is_compared_with_its_start_and_with_baselines(trained, evaluated, tmp_path):
    run, root = trained
    page = tmp_path / "page.html"
    names = f"policies=[base,{run.short}@1,{run.name},random,solver]"
    code, result, stderr = evaluated(names, "--html", str(page))
    assert code == 0, stderr
    policies = result["policies"]
    assert list(policies) == ["base", f"{run.short}@1", run.name, "random", "solver"]
    assert {name: policies[name]["status"] for name in ("base", f"{run.short}@1", run.name)} == {
        "base": "cached", f"{run.short}@1": "cached", run.name: "cached",
    }  # fmt: skip
    assert policies["base"]["key"] == run.stage("evaluate[start]").key
    assert policies[run.name]["key"] == run.stage("evaluate[final]").key
    assert {figures["episodes"] for figures in policies.values()} == {4}
    assert policies["solver"]["success"] == 1.0
    assert policies["solver"]["errors"] == {}
    assert policies["random"]["tokens"] is None
    assert policies["base"]["tokens"] > 0
    assert result["differences"]["solver"]["success"]["scenarios"] == 4
    assert result["differences"]["solver"]["success"]["difference"] == 1.0 - policies["base"]["success"]
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "<script" not in text
    for name in policies:
        assert name in text
    from mlflow import MlflowClient

    from components.tracking.store import local_uri

    logged = MlflowClient(local_uri(root)).get_run(result["mlflow_run"]).data.metrics
    assert logged["solver/success"] == 1.0
    assert logged["solver/success_gain"] == result["differences"]["solver"]["success"]["difference"]


def test_a_prompted_model_answers_over_a_socket_and_its_cost_is_counted(evaluated, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda asked: Reply(say="Answer: Your refund is on its way."), models=["gpt-4.1-mini"]) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.url)
        code, result, stderr = evaluated("policies=[base,openai/gpt-4.1-mini]")
        assert code == 0, stderr
        asked = server.requests[0].body
        assert (asked["model"], asked["temperature"]) == ("gpt-4.1-mini", 0.0)
        calls = len(server.requests)
        assert evaluated("policies=[openai/gpt-4.1-mini]")[1]["policies"]["openai/gpt-4.1-mini"]["status"] == "cached"
        assert len(server.requests) == calls == 4
    figures = result["policies"]["openai/gpt-4.1-mini"]
    assert figures["tokens"] > 0
    assert figures["cost"] > 0
    assert figures["turns"] == 1.0
    assert sum(figures["errors"].values()) == 4


def test_several_samples_give_pass_at_k(evaluated):
    code, result, stderr = evaluated("policies=[random,solver]", "samples=3", "environment=tictactoe")
    assert code == 0, stderr
    assert (result["samples"], result["temperature"]) == (3, 1.0)  # greedy samples would be identical
    assert result["policies"]["random"]["episodes"] == 12
    random, solver = result["policies"]["random"], result["policies"]["solver"]
    assert random["pass_hat_k"] <= random["success"] <= random["pass_at_k"]
    assert (solver["pass_at_k"], solver["pass_hat_k"], solver["episodes"]) == (1.0, 1.0, 4)


def test_the_table_says_who_is_better_by_how_much(trained, capsys):
    assert command.main([*SMALL, f"root={trained[1]}", "policies=[random,solver]"]) == 0  # cached by the first test
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r" *solver +1 \[", line) for line in lines)
    assert any(line.startswith("solver against random: success +1") for line in lines)


REFUSED = [
    ([], "policies: is empty; expected the policies to compare"),
    (["policies=[]"], "policies: is empty"),
    (["policies=[base,base]"], "policies: names base twice"),
    (["policies=[base]", "samples=0"], "samples: is '0'; expected a whole number from 1"),
    (["policies=[base]", "samples=two"], "samples: is 'two'"),
    (["policies=[nothing-like-it]"], "there is no run 'nothing-like-it'"),
    (["policies=[test@9]"], "has no checkpoint of step 9; expected one of 0, 1, 2"),
    (["policies=[b@se]"], "is no policy; expected base, random, solver"),
    (["policies=[nowhere/model]"], "LiteLLM knows no provider nowhere"),
    (["policies=[openai/gpt-4.1-mini]"], "the environment lacks OPENAI_API_KEY"),
    (["policies=[{model: openai/gpt-4.1-mini, key_variable: NOT_SET_1}]"], "variable NOT_SET_1 is not set"),
    (["policies=[{modl: openai/gpt-4.1-mini}]"], "modl"),
    (["policies=[test]", "inference=litellm", "inference.model=openai/x", "rounds=0"], "cannot load a trained"),
]


def test_user_errors_are_sentences(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    pretend(tmp_path)
    for arguments, message in REFUSED:
        code = command.main([*SMALL, f"root={tmp_path}", *arguments])
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), arguments
        assert message in captured.err
        assert "Traceback" not in captured.err


def test_an_environment_of_free_text_has_no_random_policy_and_one_without_solutions_no_solver(tmp_path, capsys):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "mine.yaml").write_text("_target_: tests.flows.free_text.FreeText\n")
    line = [*SMALL, f"root={tmp_path}", "--config-dir", str(tmp_path), "environment=mine", "allow=[tests]"]
    assert command.main([*line, "policies=[random]"]) == 2
    assert "random: FreeText takes free text and lists no legal actions" in capsys.readouterr().err
    assert command.main([*line, "policies=[solver]"]) == 2
    assert "solver: tests.flows.free_text.FreeText has no solver" in capsys.readouterr().err


def guide_commands():
    """Return the arguments of `flows.evaluate` in the commands of the guide."""
    lines = [words(line) for line in commands(ROOT / "docs" / "guides" / "compare_policies.md")]
    return [line[3:] for line in lines if line[2] == "flows.evaluate"]


@pytest.mark.parametrize("arguments", guide_commands(), ids=" ".join)
def test_the_commands_of_the_guide_run(evaluated, monkeypatch, arguments):
    """With the tiny model in place of the quickstart's."""
    assert arguments[0] == "+experiment=quickstart"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda asked: Reply(say="Answer: It is done."), models=["gpt-4.1-mini"]) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.url)
        code, result, stderr = evaluated(*[word for word in arguments[1:] if word != "--json"])
    assert code == 0, stderr
    assert len(result["policies"]) == 1 + arguments[1].split("{")[0].count(",")


def test_names_are_read_as_they_are_written():
    names, samples, rest = own_keys(
        ["policies=['base', 01234567, 12e45678@3, {model: openai/x, timeout: 5}]", "samples=4", "seed=1"]
    )
    assert names == ["base", "01234567", "12e45678@3", {"model": "openai/x", "timeout": 5}]
    assert own_keys(["policies=base,random"])[0] == ["base", "random"]
    assert (samples, rest) == (4, ["seed=1"])
    with pytest.raises(SpecError, match="is no list"):
        own_keys(["policies=[{base]"])
