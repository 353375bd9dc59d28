"""Comparison of runs: differences, their uncertainty, and changed episodes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from components.artifacts import Store
from components.errors import ResourceError
from components.evaluation.metrics import paired_difference, summarise
from components.trajectories.schema import Failure, Scenario
from flows.compare import main, show
from flows.history.records import Records
from flows.reporting.comparison import LISTED, compare
from flows.stages import STAGES
from tests.flows.pretend import pretend
from tests.pages.test_report import INJECTION, Page, episode


def played(solved: set[int], count: int = 12, **more) -> list:
    return [episode(index, index in solved, **more) for index in range(count)]


BEFORE, AFTER = played({0, 1, 2}), played({1, 2, 3, 4, 5, 6, 7})
FIGURES = {
    f"{stage}[{number}]": {name: number / 10, "tokens_per_s": 5.0}
    for number in (1, 2, 3)
    for stage, name in (("collect", "success"), ("judge", "reward"), ("train", "kl"))
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    evaluations = {f"evaluate[{name}]": BEFORE for name in ("start", "sft", "final")}
    baseline = pretend(root, episodes=evaluations, metrics=FIGURES)
    other = pretend(
        root,
        seed=1,
        algorithm={"name": "grpo", "learning_rate": 5e-4},
        collect={"scenarios": 4, "group_size": 2, "concurrency": 3},
        compute={"default": "process"},
        episodes=evaluations | {"evaluate[final]": AFTER},
        metrics=FIGURES,
        cost=0.25,
        git_commit="c" * 40,
        overrides=["seed=1", f"root={root}"],
    )
    return root, baseline, other


@pytest.fixture
def two(compared, tmp_path):
    """Return a folder with two runs; the second has another seed and learning rate and is better."""
    return shutil.copytree(compared[0], tmp_path / "runs"), *compared[1:]


def page(root: Path, *runs) -> Page:
    assert main([*runs, f"root={root}"]) == 0
    return Page((root / "compare" / f"{'-'.join(run[:8] for run in runs)}.html").read_text())


def test_two_runs_differ_in_settings_results_time_and_cost(two):
    root, one, other = two
    comparison = compare(root, [one.id, other.id])
    assert comparison.results == {"seed": ["0", "1"], "algorithm.learning_rate": ["0.0001", "0.0005"]}
    assert comparison.rest == {
        "collect.concurrency": ["64", "3"],
        "compute.default": ["local", "process"],
        "git commit": ["null", "c" * 40],
    }
    first, second = comparison.runs
    assert list(first.evaluations) == ["start", "sft", "final"]
    assert first.evaluations["final"].summary == summarise(BEFORE)
    assert second.evaluations["final"].summary == summarise(AFTER)
    (against,) = comparison.against
    assert against.title == "B after GRPO against A after GRPO"
    assert against.difference == paired_difference(BEFORE, AFTER)
    assert against.improved == [f"shop-{n}" for n in (3, 4, 5, 6, 7)]
    assert against.regressed == ["shop-0"]
    assert {name: [side.success for side in pair] for name, pair in against.pairs.items()} == {
        **{f"shop-{n}": [False, True] for n in (3, 4, 5, 6, 7)},
        "shop-0": [True, False],
    }
    assert {number: values["reward"] for number, values in first.rounds.items()} == {1: 0.1, 2: 0.2}
    assert {number: values["kl"] for number, values in second.rounds.items()} == {1: 0.1, 2: 0.2}
    cached = [stage.label for stage in other.stages if stage.status == "cached"]
    assert cached == ["evaluate[start]"]
    assert (second.total.ran, second.total.cached) == (len(other.stages) - 1, 1)
    assert second.stages["train"].seconds == sum(
        stage.seconds for stage in other.stages if stage.label.startswith("train")
    )
    assert second.total.cost == pytest.approx(0.25 * second.total.ran)
    assert second.stages["evaluate"].cost == pytest.approx(0.5)  # one of the three was found
    assert first.total.cost == 0


def test_an_argument_of_a_target_and_a_part_that_only_one_has(tmp_path):
    baseline = pretend(tmp_path, rounds=1, warmup=None)
    reward = {"_target_": "components.rewards.rules.outcome.Outcome", "turn_cost": 0.1}
    other = pretend(tmp_path, rounds=1, reward=reward, name="other", model={"name": "tiny", "source": "random"})
    comparison = compare(tmp_path, [baseline.id, other.id])
    assert list(comparison.results) == ["reward.turn_cost", "warmup"]
    assert comparison.results["reward.turn_cost"] == ["0.0", "0.1"]
    assert comparison.results["warmup"][0] == "null"
    assert json.loads(comparison.results["warmup"][1])["demonstrations"] == 4
    assert list(comparison.rest) == ["name"]


def test_another_version_of_a_stage_and_other_source_of_the_users_code_determine_results(tmp_path):
    one, other = (pretend(tmp_path, rounds=1, seed=seed) for seed in (0, 1))
    manifest = tmp_path / "artifacts" / other.stage("filter[1]").key / "manifest.json"
    data = json.loads(manifest.read_text())
    data["spec"]["filter"] |= {"_target_": "mine.Keep", "source_sha256": "5" * 64}
    manifest.write_text(json.dumps(data))
    record = tmp_path / "records" / f"{other.id}.json"
    collects, evaluates = (STAGES[name].version for name in ("collect", "evaluate"))
    record.write_text(re.sub(rf'"version": ({collects}|{evaluates})\b', '"version": 99', record.read_text()))
    differences = compare(tmp_path, [one.id, other.id]).results
    assert differences["version of collect"] == [str(collects), "99"]
    assert differences["version of evaluate"] == [str(evaluates), "99"]
    assert differences["source of mine.Keep"] == ["–", "5" * 12]


def test_time_is_what_a_person_waited(tmp_path, capsys):
    """A stage that overlaps another one adds no time of its own."""
    runs = [pretend(tmp_path, seed=seed) for seed in (0, 1)]
    records = Records(tmp_path)
    stages = [
        replace(stage, overlapped_seconds=0.75) if stage.label == "collect[2]" else stage for stage in runs[1].stages
    ]
    records.write(replace(runs[1], stages=stages))
    first, second = compare(tmp_path, [run.id for run in runs]).runs
    assert second.stages["collect"].seconds == first.stages["collect"].seconds - 0.75
    assert second.stages["collect"].overlapped_seconds == 0.75
    assert second.total.seconds == sum(stage.waited for stage in stages) == first.total.seconds - 0.75
    command = [*(run.id for run in runs), f"root={tmp_path}"]
    main(command)
    assert re.search(r"time collect +[\d.]+ s +[\d.]+ s, plus 0.8 s overlapped\n", capsys.readouterr().out)
    main([*command, "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][1]["total"]["overlapped_seconds"] == 0.75
    assert any("0.75\u202fs beside others" in words for words in page(tmp_path, *(run.id for run in runs)).words)


def test_a_default_that_only_one_run_states_is_no_difference(tmp_path):
    shop = {"_target_": "components.environments.worlds.shop.Shop"}
    baseline = pretend(tmp_path, environment={**shop, "heldout": 4})
    other = pretend(tmp_path, environment={**shop, "heldout": 4, "train": 512})
    assert not {**(comparison := compare(tmp_path, [baseline.id, other.id])).results, **comparison.rest}
    third = pretend(tmp_path, environment={**shop, "heldout": 4, "train": 99})
    assert compare(tmp_path, [baseline.id, third.id]).results == {"environment.train": ["512", "99"]}


def test_a_fork_is_drawn_from_the_round_in_which_it_began(tmp_path):
    baseline = pretend(tmp_path, metrics=FIGURES)
    fork = pretend(tmp_path, fork=f"{baseline.short}@1", rounds=3, metrics=FIGURES)
    runs = compare(tmp_path, [baseline.id, fork.id]).runs
    assert [list(run.rounds) for run in runs] == [[1, 2], [2, 3]]
    titles = {words for words in page(tmp_path, baseline.id, fork.id).words if "round" in words}
    assert {"A, round 1: 0.1", "B, round 3: 0.3"} <= titles


EVERY = {"rounds": 4, "evaluate": {"every": 1}}
BY_ROUND = {"sft": "+---", "1": "++--", "2": "+++-", "3": "+---", "4": "++--", "final": "++--"}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Return a folder with runs that were evaluated in their rounds, by name."""

    def run(start="----", **changes):
        shown = {**BY_ROUND, "start": start}
        return pretend(root, episodes={f"evaluate[{name}]": shown[name] for name in shown}, **changes)

    root = tmp_path_factory.mktemp("rounds")
    baseline = run(**EVERY)
    return root, {
        "baseline": baseline,
        "short": run(rounds=2, seed=1, warmup=None),
        "best": run(**EVERY, seed=1, deploy={"policy": "best"}),
        "fork": run(start="+++-", **EVERY, fork=f"{baseline.short}@2"),
        "stopped": run(**EVERY, seed=1, stop_at="judge[3]"),
    }


def test_success_by_round_goes_from_the_start_of_the_rounds_to_the_final_policy(rounds, capsys):
    root, runs = rounds
    baseline, short = runs["baseline"], runs["short"]
    first, second = compare(root, [baseline.id, short.id]).runs
    assert {number: summary["success"]["mean"] for number, summary in first.heldout.items()} == {
        0: 0.25, 1: 0.5, 2: 0.75, 3: 0.25, 4: 0.5,
    }  # fmt: skip
    assert first.heldout[4] == first.evaluations["final"].summary
    assert {number: summary["success"]["mean"] for number, summary in second.heldout.items()} == {0: 0.0, 2: 0.5}
    assert main([baseline.id, short.id, f"root={root}"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"success by round \(▁ 0, █ 1\) +▃▅▇▃▅ rounds 0 to 4 +▁▅ rounds 0 to 2\n", text)
    assert re.search(r"highest success +0\.750 \[.*\] round 2 +0\.500 \[.*\] round 2\n", text)
    assert "selected" not in text
    assert main([baseline.id, short.id, f"root={root}", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["runs"]
    assert list(data[0]["heldout"]) == ["0", "1", "2", "3", "4"]
    assert data[0]["heldout"]["2"] == json.loads(json.dumps(first.heldout[2]))
    assert [run["chosen"] for run in data] == [None, None]


def test_success_by_round_is_a_line_with_its_interval_and_the_chosen_round_has_a_ring(rounds, capsys):
    root, runs = rounds
    best = runs["best"]
    comparison_page = page(root, runs["baseline"].id, best.id)
    comparison = compare(root, [runs["baseline"].id, best.id])
    assert comparison.against[0].title == "B round 2 (best) against A after GRPO"
    run = comparison.runs[1]
    assert run.chosen == best.stage("evaluate[final]").step == 2
    assert list(run.heldout) == [0, 1, 2, 3, 4]
    titles = [words for words in comparison_page.words if re.match(r"[AB], round \d: ", words)]
    assert [words for words in titles if "chosen" in words] == ["B, round 2: chosen as the best"]
    assert any("ring: chosen as the best" in words for words in comparison_page.words)
    low, high = (f"{100 * run.heldout[2]['success'][bound]:.0f}" for bound in ("low", "high"))
    told = [words.replace("\N{NARROW NO-BREAK SPACE}", " ") for words in titles]
    assert f"B, round 2: 75 % ({low} % to {high} %)" in told
    classes = [value for _, name, value in comparison_page.attributes if name == "class"]
    assert {"band r0", "band r1", "ring r1"} <= set(classes)
    assert re.search(r"selected as best +– +round 2\n", capsys.readouterr().out)


def test_a_run_that_ended_early_or_began_later_has_the_rounds_that_it_has(rounds):
    root, runs = rounds
    comparison = compare(root, [runs[name].id for name in ("baseline", "fork", "stopped")])
    assert [list(run.heldout) for run in comparison.runs] == [[0, 1, 2, 3, 4], [2, 3, 4], [0, 1, 2]]
    comparison = compare(root, [runs["baseline"].id, runs["stopped"].id])
    assert comparison.against[0].title == "B round 2 against A after GRPO"
    assert list(comparison.runs[1].rounds) == [1, 2]


def test_evaluations_in_the_rounds_that_are_gone_or_damaged_are_told(rounds, tmp_path):
    root = shutil.copytree(rounds[0], tmp_path / "runs")
    baseline, other = rounds[1]["baseline"], rounds[1]["best"]
    store = Store(root / "artifacts")
    shutil.rmtree(store.path(other.stage("evaluate[1]").key))
    (store.path(other.stage("evaluate[3]").key) / "summary.json").write_text("{}")
    runs = compare(root, [baseline.id, other.id]).runs
    assert runs[0].notes == []
    assert runs[1].notes == [
        "no longer in the store, or damaged, so curves are incomplete: evaluate[1], evaluate[3]",
    ]
    assert list(runs[1].heldout) == [0, 2, 4]


def test_many_rounds_are_shown_in_few_characters():
    from flows.compare import MOST_BARS, _bars

    heldout = {number: {"success": {"mean": number / 100}} for number in range(101)}
    bars, _, rest = _bars(heldout).partition(" ")
    assert (len(bars), rest) == (MOST_BARS, f"rounds 0 to 100, {MOST_BARS} of 101")
    assert (bars[0], bars[-1], sorted(bars)) == ("▁", "█", list(bars))
    assert _bars({3: {"success": {"mean": 0.5}}}) == "▅ round 3"
    assert _bars({}) == "–"


def test_only_scenarios_that_are_the_same_are_compared(tmp_path):
    before = played({0, 1})
    after = [*played({0, 2, 3, 4}, 11), episode(20, True)]
    after[2].scenario = Scenario("shop-2", {"order": "another"}, "heldout", "refund", 1)
    after[3] = episode(3, False, failure=Failure("engine", "EngineError", "gone"))
    baseline = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": before})
    other = pretend(tmp_path, rounds=1, seed=1, episodes={"evaluate[final]": after})
    (against,) = compare(tmp_path, [baseline.id, other.id]).against
    assert against.notes == [
        "1 scenario with the same id are different tasks in the two runs and are left out",
        "1 scenario played only by A",
        "1 scenario played only by B",
        "1 scenario failed to run in one of the two runs and are left out",
    ]
    assert against.difference
    assert against.difference["n"] == 9
    assert (against.improved, against.regressed) == (["shop-4"], ["shop-1"])


def test_runs_of_two_environments_have_settings_and_no_verdict(tmp_path, capsys):
    guess = {"environment": {"_target_": "components.environments.games.guess.Guess", "heldout": 5}}
    baseline = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": played({0}, 2)})
    other = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": [episode(30, True)]}, **guess)
    assert main([baseline.id, other.id, f"root={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "components.environments.games.guess.Guess" in text
    assert "B against A: no verdict; B and A share no held-out scenario" in text
    assert "better" not in text


def test_a_run_that_was_stopped_is_compared_as_far_as_it_got(two):
    root, one, _ = two
    stopped = pretend(root, seed=2, stop_at="train[2]", episodes={"evaluate[sft]": AFTER}, metrics=FIGURES)
    comparison = compare(root, [one.id, stopped.id])
    assert list(comparison.runs[1].rounds) == [1]  # the second one was not finished
    assert comparison.runs[1].last
    assert comparison.against[0].title == "B after SFT against A after GRPO"
    assert "different evaluations" in comparison.against[0].notes[0]
    assert comparison.against[0].difference
    records = Records(root)
    for written, told in (("RUNNING", "killed"), ("FAILED", "failed")):
        stopped.status = written
        records.write(stopped)
        run = compare(root, [one.id, stopped.id]).runs[1]
        assert run.status == told
        assert run.notes[0] == f"{told}: compared as far as it got, {len(stopped.stages)} stages"
    stopped.status = "RUNNING"
    records.write(stopped)
    with records.hold(stopped.id):
        assert compare(root, [one.id, stopped.id]).runs[1].status == "running"


def test_a_run_without_an_evaluation_and_one_whose_artifacts_are_gone_say_so(two, capsys):
    root, one, other = two
    none = pretend(root, seed=3, evaluate={"scenarios": 2}, stop_at="evaluate[start]")
    store = Store(root / "artifacts")
    shutil.rmtree(store.path(other.stage("evaluate[final]").key))
    shutil.rmtree(store.path(other.stage("judge[2]").key))
    comparison = compare(root, [one.id, other.id, none.id])
    assert comparison.runs[1].notes == [
        "evaluate[final] is no longer in the store, or is damaged: run it again",
        "no longer in the store, or damaged, so curves are incomplete: judge[2]",
    ]
    assert "reward" not in comparison.runs[1].rounds[2]
    assert comparison.runs[1].last
    assert comparison.runs[1].last.label == "B after SFT"
    assert "there is no finished evaluation" in comparison.runs[2].notes
    assert comparison.against[1].notes == ["nothing to compare: C without a finished evaluation"]
    assert main([none.id, one.id, f"root={root}"]) == 0
    assert "A: there is no finished evaluation" in capsys.readouterr().out


def test_a_damaged_evaluation_is_left_out_and_left_alone(two):
    root, one, other = two
    path = Store(root / "artifacts").path(other.stage("evaluate[final]").key)
    (path / "scores.parquet").write_text("damaged")
    before = {found: found.stat().st_mtime_ns for found in root.rglob("*") if "compare" not in found.parts}
    found = compare(root, [one.id, other.id])
    assert "damaged" in found.runs[1].notes[0]
    assert {found: found.stat().st_mtime_ns for found in root.rglob("*")} == before


def test_mistakes_are_answered(tmp_path, capsys):
    pretend(tmp_path, rounds=1)
    with pytest.raises(SystemExit, match="2"):
        main([f"root={tmp_path}"])
    assert "required: RUN" in capsys.readouterr().err
    for references, message in {
        "test": "expected 2 to 26 runs to compare, not 1",
        "test nothing": "there is no run 'nothing'",
        "test latest": r"run \w{8} \(test\) is given twice, the second time as 'latest'",
        "test " * 27: "expected 2 to 26 runs",
    }.items():
        assert main([*references.split(), f"root={tmp_path}"]) == 2
        assert re.search(message, capsys.readouterr().err), message
    assert not (tmp_path / "compare").exists()


def test_a_page_that_cannot_be_written_and_a_folder_without_runs(two, capsys):
    root, one, other = two
    (root / "file").touch()
    assert main([one.id, other.id, f"root={root}", "--html", str(root / "file" / "page.html")]) == 2
    assert "give another file: --html" in capsys.readouterr().err
    with pytest.raises(ResourceError, match="no run below"):
        compare(root / "elsewhere", ["a", "b"])


def test_the_text_is_short_and_names_what_changed(two):
    root, one, _ = two
    many = played(set(range(40)), 40)
    other = pretend(root, seed=4, episodes={"evaluate[final]": many})
    base = pretend(root, seed=5, episodes={"evaluate[final]": played(set(), 40)})
    text = show(compare(root, [base.id, other.id]), Path("page.html"))
    assert "B after GRPO against A after GRPO: success +1.000 [" in text
    listed = re.search(r"40 better: (.*), and (\d+) more", text)
    assert listed
    assert len(listed[1].split(", ")) == LISTED
    assert int(listed[2]) == 40 - LISTED
    assert "  0 worse\n" in text
    assert re.search(r"success final +0\.000 \[0\.000, \d\.\d{3}\] +1\.000 \[\d\.\d{3}, 1\.000\]", text)
    assert text.splitlines()[-1] == "page: page.html"
    assert text.splitlines()[-2].startswith("verdict: B against A: better: success +1.000 [")
    assert len(text.splitlines()) < 40
    assert one.short not in text


def test_equal_configurations_are_told(tmp_path):
    one, other = pretend(tmp_path, rounds=1), pretend(tmp_path, rounds=1)
    comparison = compare(tmp_path, [one.id, other.id])
    assert (comparison.results, comparison.rest) == ({}, {})
    assert "the configurations are identical" in show(comparison, tmp_path)
    assert "All runs have the same configuration." in page(tmp_path, one.id, other.id).text


def test_the_json_has_everything_but_the_episodes(two, capsys):
    root, one, other = two
    assert main([one.short, other.short, f"root={root}", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    data = json.loads(line)
    assert [run["id"] for run in data["runs"]] == [one.id, other.id]
    assert data["runs"][1]["overrides"] == ["seed=1"]
    assert data["runs"][1]["evaluations"]["final"] == json.loads(json.dumps(summarise(AFTER)))
    assert data["runs"][1]["rounds"]["2"]["reward"] == 0.2
    assert data["runs"][1]["total"]["cached"] == 1
    assert data["config"]["results"]["seed"] == ["0", "1"]
    assert data["against"]["B"]["difference"]["regressed"] == ["shop-0"]
    assert Path(data["html"]) == root / "compare" / f"{one.short}-{other.short}.html"
    assert Path(data["html"]).is_file()


def test_the_page_shows_both_episodes_of_each_scenario_that_changed(two):
    root, one, other = two
    comparison_page = page(root, one.id, other.id)
    text = comparison_page.text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    for expected in (one.short, "algorithm.learning_rate", "Does not affect results", "Reward", "KL to the reference",
                     "58 %", "+33", "no clear difference", "From fail to success 5", "From success to fail 1",
                     "Order A3 is broken.", "15 ran, 1 cached; cost"):  # fmt: skip
        assert expected in text, expected
    ids = [value for _, name, value in comparison_page.attributes if name == "id"]
    links = [value for _, name, value in comparison_page.attributes if name == "href"]
    assert len(ids) == len(set(ids))
    assert links
    assert {link for link in links if link.removeprefix("#") not in ids or not link.startswith("#")} == set()
    assert len([link for link in links if link.startswith("#episodes-")]) == 6
    pair = text[text.index("shop-0 back to the list") :]
    assert re.search(r"A solved shop-0.*B not solved shop-0", pair)


def test_hostile_text_is_never_markup(tmp_path):
    def hostile(solved):
        one = episode(0, solved, say=INJECTION, kind=INJECTION)
        one.scenario = Scenario(INJECTION, {}, "heldout", INJECTION, 1)
        one.outcome[INJECTION] = INJECTION
        one.policy = INJECTION
        return [one, episode(1, False, say="a\x00\x1b[31m\ud800")]

    one = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": hostile(False)[:1]}, overrides=[INJECTION])
    other = pretend(tmp_path, rounds=1, seed=1, episodes={"evaluate[final]": hostile(True)[:1]}, git_commit=INJECTION)
    other.spec["agent"] = {INJECTION: INJECTION}
    other.name = INJECTION
    Records(tmp_path).write(other)
    comparison_page = page(tmp_path, one.id, other.id)
    assert not {"script", "img"} & set(comparison_page.tags)
    assert not [name for _, name, _ in comparison_page.attributes if name.startswith("on")]
    assert comparison_page.text.count("<script>alert('x')</script>") > 8
    text = show(compare(tmp_path, [one.id, other.id]), Path("x"))
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) == {"\n"}


def test_only_the_first_hundred_pairs_are_on_the_page(tmp_path):
    from components.pages.comparison import MOST_PAIRS

    baseline = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": played(set(), MOST_PAIRS + 5)})
    solved = played(set(range(MOST_PAIRS + 5)), MOST_PAIRS + 5)
    other = pretend(tmp_path, rounds=1, seed=1, episodes={"evaluate[final]": solved})
    comparison_page = page(tmp_path, baseline.id, other.id)
    links = [value for _, name, value in comparison_page.attributes if name == "href" and "#episodes-" in value]
    assert len(links) == MOST_PAIRS
    assert f"The episodes of the first {MOST_PAIRS} follow." in comparison_page.text
    assert f"shop-{MOST_PAIRS + 4}" in comparison_page.text


def test_secrets_stay_masked(tmp_path):
    baseline = pretend(tmp_path, rounds=1, episodes={"evaluate[final]": BEFORE})
    other = pretend(tmp_path, rounds=1, seed=1, overrides=["judge.api_key=hush"])
    other.spec["reward"] = {"api_key": "hush"}
    Records(tmp_path).write(other)
    assert main([baseline.id, other.id, f"root={tmp_path}"]) == 0
    assert "hush" not in next((tmp_path / "compare").iterdir()).read_text()


def seeded(root: Path, solved, **changes) -> list:
    """Return one run for each set of solved scenarios, with the seeds 0, 1, …"""
    return [
        pretend(root, rounds=1, warmup=None, seed=seed, episodes={"evaluate[final]": played(numbers, 40)}, **changes)
        for seed, numbers in enumerate(solved)
    ]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return a folder with runs of two settings with three seeds each."""
    root = tmp_path_factory.mktemp("settings")
    before = seeded(root, [set(range(8)), set(range(2, 11)), set(range(1, 9))])
    faster = {"name": "grpo", "learning_rate": 5e-4}
    after = seeded(root, [set(range(24)), set(range(2, 25)), set(range(1, 26))], algorithm=faster)
    return root, before, after


def test_runs_that_differ_in_their_seed_form_sides_with_a_verdict_and_a_page(settings, capsys, tmp_path):
    root, before, after = settings
    assert main([run.id for run in (*before, *after)] + [f"root={root}", "--json"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (data["verdict"], data["effect"]) == ("better", pytest.approx((24 + 23 + 25 - 8 - 9 - 8) / 120))
    assert [run["letter"] for run in data["runs"]] == ["A1", "A2", "A3", "B1", "B2", "B3"]
    assert data["verdicts"][0]["seeds"] == {"A": [0, 1, 2], "B": [0, 1, 2]}
    assert data["verdicts"][0]["scenarios"] == 40
    assert [against["title"] for against in data["against"].values()] == [
        f"B{number} after GRPO against A{number} after GRPO" for number in (1, 2, 3)
    ]
    sides = [f"new={after[2].id},{after[0].id}", f"old={','.join(run.id for run in before)}", f"root={root}"]
    assert main([*sides, "--json"]) == 0
    stated = json.loads(capsys.readouterr().out)["verdicts"][0]
    assert (stated["side"], stated["baseline"], stated["verdict"]) == ("old", "new", "worse")
    assert stated["seeds"] == {"new": [0, 2], "old": [0, 1, 2]}
    assert stated["method"].endswith("paired by scenario")
    sides = [f"A={','.join(run.short for run in before)}", f"B={','.join(run.short for run in after)}"]
    path = tmp_path / "page.html"
    assert main([*sides, f"root={root}", "--html", str(path)]) == 0
    text = Page(path.read_text()).text
    assert "B against A: better: success +0.392 [" in text
    assert f"python -m flows.compare {' '.join(sides)}" in text


def test_a_setting_with_one_seed_has_no_interval(settings):
    root, before, after = settings
    (verdict,) = compare(root, [run.id for run in (*before, after[0])]).verdicts
    assert (verdict.verdict, verdict.low) == ("undecided", None)
    assert "B has one seed" in verdict.advice


def test_mistakes_in_sides_are_answered(settings, capsys):
    root, before, after = settings
    runs = [run.id for run in (*before, *after)]
    for sides, message in {
        "A=0,1 B=3": "side B has 1 run: an interval over seeds needs at least 2 runs",
        "A=0,1": "there is only the side A",
        "A=0,1 3": "is a run without a side",
        "A=0,1 A=3,4": "side A is given twice",
        "A=0,3 B=1,4": "side A mixes settings: algorithm.learning_rate = 0.0001 .run .*, 0.0005 .run",
    }.items():
        arguments = re.sub(r"\d", lambda match: runs[int(match[0])], sides).split()
        assert main([*arguments, f"root={root}"]) == 2
        assert re.search(message, capsys.readouterr().err), sides


def test_sides_that_share_no_scenario_have_no_verdict(settings, capsys):
    root, before, _ = settings
    changes = {"environment": {"_target_": "components.environments.worlds.shop.Shop", "heldout": 5}}
    others = [
        pretend(root, rounds=1, warmup=None, seed=seed, episodes={"evaluate[final]": [episode(90, True)]}, **changes)
        for seed in (0, 1)
    ]
    sides = [f"{name}={','.join(run.id for run in runs)}" for name, runs in (("A", before), ("B", others))]
    assert main([*sides, f"root={root}"]) == 0
    text = capsys.readouterr().out
    assert "environment.heldout" in text
    assert "B against A: no verdict; B and A share no held-out scenario" in text
