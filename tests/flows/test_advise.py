"""Advice: every rule composes, and every situation gets an answer or a clear refusal."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import SpecError
from flows import advise as command
from flows.advice.advice import advise
from flows.advice.rules import ADDITIONS, RULES
from flows.advice.situation import Situation, with_data
from flows.experiment.compose import check
from tests.test_configs import PROMPTS, TASKS

SITUATIONS = {
    "SFT + R3": Situation(environment="tictactoe", goal="reasoning"),
    "SFT + self-evolution": Situation(environment="retail", success=False, goal="self-improvement"),
    "IPO": Situation(preferences=500, form="pairs", goal="regularized"),
    "SFT + AgentEvol": Situation(environment="mixture"),
    "MCP RL": Situation(environment="mcp", success=False),
    "generated scenarios + RULER": Situation(environment="mcp", success=False, judge="anthropic/claude-sonnet-4-5"),
    "on-policy distillation": Situation(environment="shop", teacher="organisation/large"),
    "SFT + GRPO": Situation(environment="retail"),
    "RULER + GRPO": Situation(environment="shop", success=False, judge="openai/gpt-5-mini"),
    "ORPO": Situation(preferences=500, form="ranked", goal="simple"),
    "DPO on rankings": Situation(environment="shop", success=False, preferences=500, form="ranked"),
    "DPO": Situation(preferences=500, form="pairs"),
    "KTO": Situation(preferences=500, form="thumbs"),
    "SFT": Situation(labels=500),
    "few-shot prompting": Situation(),
}
"""A situation for each rule."""


def composed(advice):
    """Compose the run of an advice as a shell would start it."""
    last = advice.command.rpartition(" && ")[2]
    words = shlex.split(last)
    assert words[:3] == ["python", "-m", "flows.run"]
    assert words[3:] == list(advice.overrides)
    lines = [line.replace("scenarios=tasks.json", f"scenarios={TASKS}") for line in words[3:]]
    lines += ["collect.scenarios=2", "warmup=none"] if f"environment.scenarios={TASKS}" in lines else []
    lines = [line.replace("environment.path=FILE", f"environment.path={PROMPTS}") for line in lines]
    return check(lines, named=True)[0]


def test_every_rule_has_a_situation():
    assert [rule.method for rule in RULES] == list(SITUATIONS)


@pytest.mark.parametrize("method", SITUATIONS)
def test_every_rule_applies_and_composes_with_and_without_additions(method):
    advice = advise(SITUATIONS[method])
    assert advice.method == method
    assert composed(advice)
    rule = next(rule for rule in RULES if rule.method == method)
    compute = ("gpu", "cluster")[RULES.index(rule) % 2]
    situation = replace(SITUATIONS[method], tight=True, slow=True, compute=compute)
    advice = advise(situation)
    additions = [addition for addition in ADDITIONS if addition.applies(situation, rule)]
    assert len(additions) >= 2 or not rule.rounds
    for addition in additions:
        assert set(addition.overrides) <= set(advice.overrides)
        assert addition.reason in advice.reason


LEAVES = {
    "SFT": Situation(labels=500),
    "DPO": Situation(labels=500, preferences=500, form="pairs"),
    "ORPO": Situation(labels=500, preferences=500, form="pairs", goal="simple"),
    "IPO": Situation(preferences=500, form="pairs", goal="regularized"),
    "KTO": Situation(labels=500, preferences=500, form="thumbs"),
    "AgentEvol": Situation(environment="tictactoe", goal="simple", solves=False),
    "R3": Situation(environment="tictactoe", sparse=True),
    "self-evolution": Situation(environment="tictactoe", goal="self-improvement"),
    "few-shot prompting": Situation(),
}
"""Leaves of a published decision tree, and rows of its table of preference methods."""
TABLE = {
    "DPO": (False, True, True),
    "ORPO": (False, False, True),
    "IPO": (False, True, True),
    "KTO": (False, True, False),
    "SFT": (False, False, False),
    "AgentEvol": (False, False, False),
    "R3": (True, True, False),
    "few-shot prompting": (False, False, False),
}
"""Methods that need a reward model, a reference policy, pairs: as published, and by their formulas."""


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_leaf_of_the_decision_tree_is_reached_and_says_what_it_needs_and_costs(leaf):
    advice = advise(LEAVES[leaf])
    assert advice.method.removeprefix("SFT + ") == leaf
    spec = composed(advice)
    if leaf in TABLE:
        needed = tuple(advice.needs.get(name) is not None for name in ("reward model", "reference policy", "pairs"))
        assert needed == TABLE[leaf]
    offline = advice.command.find("+experiment=") > 0
    rounds = spec.collect.scenarios * spec.collect.group_size * spec.rounds
    demonstrations = spec.warmup.demonstrations if spec.warmup and not offline and spec.rounds else 0
    labelled = 0
    if leaf == "R3":
        model, turns = spec.reward_model, spec.agent.max_turns
        labelled = 2 * model.scenarios * model.group_size * (1 + (turns - 1) * model.continuations)
    assert advice.costs["episodes"] == rounds + demonstrations + labelled
    if leaf == "few-shot prompting":
        assert advice.costs == {"episodes": 0, "trainings": 0}
    else:
        assert advice.costs["gradient passes"] == 1
        assert advice.costs["forward passes"] == (advice.needs["reference policy"] is not None)


@settings(max_examples=12)  # each is composed
@given(
    st.builds(
        Situation,
        labels=st.sampled_from([0, 10, 5000, -1]),
        preferences=st.sampled_from([0, 10, 5000]),
        form=st.sampled_from([None, "pairs", "thumbs", "ranked"]),
        environment=st.sampled_from([None, "shop", "tictactoe", "sql", "mcp", "agentgym", "nowhere"]),
        success=st.booleans(),
        judge=st.sampled_from([None, "openai/gpt-5-mini"]),
        teacher=st.sampled_from([None, "organisation/large"]),
        sparse=st.booleans(),
        goal=st.sampled_from([None, "simple", "regularized", "reasoning", "self-improvement", "speed"]),
        slow=st.booleans(),
        tight=st.booleans(),
        compute=st.sampled_from(["cpu", "gpu", "cluster"]),
    )
)
def test_every_situation_gets_an_answer_or_a_clear_refusal(situation):
    known = situation.environment not in ("agentgym", "nowhere")  # these need values, or do not exist
    bare = not (situation.environment or situation.preferences or situation.judge or situation.teacher)
    enough = situation.labels > 0 or bare or (situation.environment and (situation.success or situation.judge))
    try:
        advice = advise(situation)
    except SpecError as error:
        problems = error.problems
    else:
        problems = []
        assert advice.method in {*SITUATIONS, *(name.removeprefix("SFT + ") for name in SITUATIONS)}
        assert advice.reason
    assert all(problem.path and len(problem.message) > 5 for problem in problems)
    assert not (problems and known and enough and not situation.problems()), problems


def run(capsys, *arguments):
    code = command.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_and_text_have_method_reason_and_command(capsys):
    code, out, _ = run(capsys, "--environment", "retail", "--compute", "cpu", "--json")
    data = json.loads(out.splitlines()[-1])
    assert code == 0
    assert data["method"] == "SFT + GRPO"
    assert data["command"] == "python -m flows.run name=sft-grpo environment=retail algorithm=grpo"
    assert data["reason"].startswith("Success is the objective")
    code, out, _ = run(capsys, "--environment", "movie", "--success", "no", "--judge", "yes", "rounds=2")
    assert code == 0
    assert re.search(r"^method:  RULER \+ GRPO$", out, re.MULTILINE)
    assert re.search(r"^command: .* reward.model.model=openai/gpt-5-mini rounds=2$", out, re.MULTILINE)
    assert "needs:   judge (openai/gpt-5-mini), reference policy (start); not reward model, pairs, critic" in out
    assert "costs:   up to 124 episodes, 3 trainings; passes over each token that trains the policy: 1 " in out
    assert "note:    measure the judge" in out


def test_an_mcp_server_alone_is_one_command_and_one_with_more_gets_its_tasks_first(capsys):
    server = "environment.command=[python,shop_server.py]"
    _, out, _ = run(capsys, "--environment", "mcp", "--json", server)
    advice = json.loads(out)
    assert advice["method"] == "MCP RL"
    assert advice["command"] == (
        "python -m flows.run +experiment=mcp_rl flow.author.url=https://api.openai.com/v1 "
        f"flow.author.key_variable=OPENAI_API_KEY flow.author.model=gpt-5-mini {shlex.quote(server)}"
    )
    spec = check(advice["overrides"], named=True)[0]
    assert spec.environment.arguments["command"] == ["python", "shop_server.py"]
    assert spec.reward.arguments["model"].url == spec.flow.arguments["author"].url == "https://api.openai.com/v1"
    assert not any("my_server.py" in note for note in advice["notes"])
    _, out, _ = run(capsys, "--environment", "mcp", "--judge", "openai/gpt-5", "--json")
    advice = json.loads(out)
    assert "flow.author.model=gpt-5 " in advice["command"]
    assert any("replace my_server.py" in note for note in advice["notes"])
    for further in (["--judge", "anthropic/claude-sonnet-4-5"], ["--labels", "100"]):
        code, out, err = run(capsys, "--environment", "mcp", "--json", *further, server)
        assert code == 0, err
        first, _, second = json.loads(out)["command"].partition(" && ")
        assert first.endswith("-- python shop_server.py")
        assert shlex.quote(server) in second
        assert "environment.scenarios=tasks.json" in second
    tasks = [f"environment.scenarios={TASKS}", "collect.scenarios=2"]
    code, out, err = run(capsys, "--environment", "mcp", "--json", server, *tasks)
    assert code == 0, err
    assert " && " not in json.loads(out)["command"]
    assert "+experiment=mcp_rl" not in json.loads(out)["command"]


def test_the_content_of_a_file_is_recognized(tmp_path):
    path = tmp_path / "data.jsonl"
    for rows, expected in {
        '{"prompt": "q", "chosen": "a", "rejected": "b"}\n' * 2: {"preferences": 2, "form": "pairs"},
        '{"prompt": "q", "completion": "b", "label": true}\n': {"preferences": 1, "form": "thumbs"},
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n': {"labels": 1},
        '{"question": "q", "answer": "a"}\n': {"environment": "dataset", "columns": ("question", "answer")},
    }.items():
        path.write_text(rows)
        assert with_data({}, str(path)) == {**expected, "data": str(path)}
        assert with_data({"labels": 7, "compute": "gpu"}, str(path))["labels"] == 7


def test_a_file_becomes_part_of_the_command(tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n' * 40)
    code, out, _ = run(capsys, "--data", str(pairs), "--json")
    assert code == 0
    expected = f"python -m flows.run +experiment=dpo data.path={pairs}"
    assert (json.loads(out)["method"], json.loads(out)["command"]) == ("DPO", expected)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(200)))
    code, out, err = run(capsys, "--data", str(questions), "--json")
    assert code == 0, err
    assert f"environment=dataset algorithm=grpo environment.path={questions}" in json.loads(out)["command"]
    shown = tmp_path / "shown.jsonl"
    shown.write_text('{"prompt": "q", "completion": "a"}\n' * 40)
    code, out, err = run(capsys, "--data", str(shown), "--environment", "retail", "--json")
    assert code == 0, err
    assert json.loads(out)["command"].endswith(f"environment=retail algorithm=grpo data.path={shown}")


def test_a_file_without_known_rows_is_refused(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    for text, message in {
        '{"chosen": 1}\n': "no form fits the columns chosen",
        "": "is empty",
        "[1, 2": "no row can be read",
    }.items():
        path.write_text(text)
        code, _, err = run(capsys, "--data", str(path))
        assert (code, message in err) == (2, True), err
    assert run(capsys, "--data", str(tmp_path / "missing.jsonl"))[0] == 2


def test_refusals_are_sentences(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    for arguments, message in {
        "": "got no option, and asks on a terminal only",
        "--goal reasoning": "expected --environment NAME --success yes",
        "--goal regularized --preferences 5 --thumbs": "expected --preferences N --pairs or --ranked",
        "--goal self-improvement": "--goal: self-improvement: the policy attempts the tasks of an environment",
        "--preferences 5": "have no form; expected --pairs, --thumbs or --ranked",
        "--pairs": "needs the number of preferences",
        "--labels -1": "is -1; expected 0 or more",
        "--judge maybe": "is 'maybe'; expected yes, no or PROVIDER/MODEL",
        "--environment movie --success no": "reports no success, and there is no judge",
        "--teacher organisation/large": "a teacher or a judge needs episodes",
        "--environment nowhere": "'nowhere': expected one of agentgym",
        "--environment agentgym": "environment.url: needs a value",
        "--environment shop rounds=-1": "rounds",
    }.items():
        code, out, err = run(capsys, *arguments.split())
        assert (code, out, message in err) == (2, "", True), err


def test_without_options_it_asks(capsys, monkeypatch):
    answers = iter(["none", "²", "0", "", "shop", "n", "no", "", "", "yes", "none", "", "GPU", "", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    code, out, err = run(capsys, "--json")
    assert code == 0, err
    for text in ("'²': expected a whole number", "'n': expected one of yes, no", "'GPU': expected one of cpu, gpu,"):
        assert text in err
    assert json.loads(out)["method"] == "RULER + GRPO"
    assert next(answers, None) is None


@pytest.mark.parametrize("solver", [True, False])
def test_an_environment_of_ones_own_is_composed_with_the_overrides(tmp_path, monkeypatch, solver):
    """Command, reason and note agree on the warmup, for which the class is loaded by `allow`."""
    methods = {"scenarios": "split", "tools": "", "reset": "scenario", "step": "action", "close": ""}
    methods |= {"solve": "scenario"} if solver else {}
    body = "".join(
        f"\n    def {name}(self, {argument}):\n        return self.inner.{name}({argument})\n"
        for name, argument in methods.items()
    )
    (tmp_path / f"mine_{solver}.py").write_text(
        "from components.environments.games.guess import Guess\n\n\n"
        f"class Mine:\n    def __init__(self):\n        self.inner = Guess()\n{body}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "conf" / "environment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"_target_: mine_{solver}.Mine\n")
    advice = advise(Situation(environment="mine"), [f"allow=[mine_{solver}]"], str(tmp_path / "conf"))
    assert ("warmup=none" in advice.overrides) is not solver
    assert ("warmup" in advice.reason) is solver
    assert any("no solver" in note for note in advice.notes) is not solver
    assert advice.method == ("SFT + GRPO" if solver else "GRPO")
