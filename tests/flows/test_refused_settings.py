"""Settings that are refused, or have no effect: one message each, with the key, the value and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import ResourceError, SpecError
from components.models import gpus
from flows.experiment.compose import compose
from flows.experiment.prerequisites import check_keys
from flows.planning.plan import plan
from tests.flows.pretend import spec_of


def problems(*lines: str) -> dict[str, tuple[str, str | None]]:
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=smoke", *lines])
    return {problem.path: (problem.message, problem.nearest) for problem in caught.value.problems}


def test_shards_of_the_flows_own_process_are_one_problem_with_its_remedy():
    ((key, (message, remedy)),) = problems("compute.shards=4").items()
    assert (key, remedy) == ("compute.shards", "compute=process")
    assert message == (
        "4: import, collect, judge, filter, evaluate run on local, in the process of the flow, one part after the "
        "other; expected 1, or another place"
    )
    assert compose(["+experiment=smoke", remedy, "compute.shards=4"]).compute.shards == 4


def test_shards_of_single_stages_name_these():
    ((key, (message, remedy)),) = problems("compute.stage_shards.judge=4").items()
    assert (key, remedy) == ("compute.stage_shards.judge", "compute.stages.judge=process")
    assert message.startswith("4: judge runs on local")
    lines = ["compute.shards=2", "compute.stages.collect=process", "compute.stages.judge=process"]
    ((key, (message, remedy)),) = problems(*lines, "compute.stage_shards.import=1").items()
    assert (key, remedy) == ("compute.shards", "compute.stages.filter=process compute.stages.evaluate=process")
    assert message.startswith("2: filter, evaluate run on local")


def test_a_value_that_config_files_copy_to_other_keys_is_one_problem():
    paths = {
        ("compute.shards=0",): ["compute.shards"],
        ("compute.shards=many",): ["compute.shards"],
        ("compute.price=-1", "compute.prices.train=-2"): ["compute.price", "compute.prices.train"],
        ("compute.price=1", "compute.prices.train=-2"): ["compute.prices.train"],
    }
    assert {lines: list(problems(*lines)) for lines in paths} == paths


SPLIT = "no such key in compute.stage_shards; expected one of import, collect, judge, filter, evaluate"
MISSPELT = {
    "compute.stage_shards.evaluat=2": (SPLIT, "compute.stage_shards.evaluate"),
    "compute.stage_shards.x=2": (SPLIT, None),
    "+compute.stage_shards.x=2": (SPLIT, None),
    "compute.stages.trian=process": ("no such key in compute.stages; expected one of ", "compute.stages.train"),
    "compute.stages.reward_model=process": (
        "is set by no config file: add it with +",
        "+compute.stages.reward_model=process",
    ),
    "compute.places.proces=3": (
        "no such key in compute.places; expected one of local, process, or a new key: +compute.places.proces=3",
        "compute.places.process",
    ),
}


def test_a_misspelt_stage_or_place_is_answered_with_the_valid_ones():
    for line, (message, near) in MISSPELT.items():
        ((text, hint),) = problems(line).values()
        assert text.startswith(message)
        assert hint == near


def test_the_experiment_is_blamed_only_for_keys_that_it_sets(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("name: sft\nepocs: 2\n")
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=quickstart", "algorithm=mine"], config_dir=tmp_path)
    messages = {problem.path: problem.message for problem in caught.value.problems}
    assert "a config file sets it; add '~algorithm.epocs' to remove it" in messages["algorithm.epocs"]
    assert "+experiment=quickstart sets it for another option" in messages["algorithm.minibatches"]


def test_an_evaluation_with_a_single_look_does_not_stop_early():
    lines = ["evaluate.stop=decided", "evaluate.scenarios=6"]
    ((key, (message, _)),) = problems(*lines, "evaluate.batch=6").items()
    assert key == "evaluate.batch"
    assert message == (
        "6: an evaluation has 6 scenarios, so its first look is at its end and evaluate.stop=decided saves none; "
        "expected less than 6, or evaluate.stop=never"
    )
    assert compose(["+experiment=smoke", *lines, "evaluate.batch=5"]).evaluate.batch == 5


def test_settings_of_early_stops_without_one_name_their_key():
    assert problems("evaluate.alpha=0.1") == {
        "evaluate.alpha": (
            "0.1: only evaluations that stop early use it (evaluate.stop=never); expected 0.05, or "
            "evaluate.stop=decided",
            None,
        )
    }


AHEAD = [(5, 1, 0), (2, 2, 1), (1, 2, None), (1, 0, 0), (0, 0, None)]


def test_rounds_ahead_that_do_not_exist_are_a_note(tmp_path):
    for overlap, rounds, most in AHEAD:
        spec = spec_of(tmp_path, rounds=rounds, collect={"scenarios": 2, "group_size": 2, "overlap": overlap})
        notes = [
            note for note in plan(spec).notes if note.startswith("collect.overlap=") and "can be collected" in note
        ]
        expected = (
            f"collect.overlap={overlap}: with rounds={rounds} at most {most} rounds can be collected ahead, all with "
            f"the policy at the start of the rounds; expected at most {most}"
        )
        assert notes == ([] if most is None else [expected])


INVALID = [
    (["seeds=[]"], "seeds", "[]: expected at least 1 entry"),
    (["deploy.formats=[]"], "deploy.formats", "[]: expected at least 1 entry"),
    (["++data.path=[]"], "data.path", "[]: expected at least 1 entry"),
    (["++data.path=''"], "data.path", "'': expected text of at least 1 character"),
    (["model.lora.target_modules=[]"], "model.lora.target_modules", "[]: expected all-linear, or at least one name of "
     "a layer; model.lora=null trains all weights"),
    (["++model.lora=[1]"], "++model.lora", "[1]: expected a mapping of keys to values"),
    (["collect.partial={}"], "collect.partial.turns", "null, as are tokens and groups, so no episode is paused; "
     "expected a number for one of them"),
]  # fmt: skip


def test_invalid_values_are_described_in_words_of_a_config_file():
    assert [(lines, path, problems(*lines)[path][0]) for lines, path, _ in INVALID] == INVALID


GRAPHS = {
    ("model.device=cpu",): ("model.cuda_graphs", "true: expected false with device=cpu: graphs need a GPU"),
    ("model.lora.dropout=0.1",): ("model.cuda_graphs", "true: expected false: graphs need an adapter (lora)"),
    ("model.lora=null",): ("model.cuda_graphs", "true: expected false: graphs need an adapter (lora)"),
    ("model.quantization=nf4",): ("model.cuda_graphs", "true: expected false: graphs need an adapter (lora)"),
    ("algorithm.gradient_checkpointing=true",): ("algorithm.gradient_checkpointing", "true: reads random states"),
    ("compute=fsdp", "compute.places.fsdp.processes=2"): ("compute.places.fsdp.strategy", "fsdp: gathers weights"),
}


def test_graphs_are_refused_with_what_they_cannot_record(monkeypatch):
    for lines, (key, message) in GRAPHS.items():
        found = problems("model.cuda_graphs=true", *lines)
        assert list(found) == [key], lines
        assert found[key][0].startswith(message)
    monkeypatch.setattr(gpus, "DEVICES", Path("/nonexistent"))
    with pytest.raises(ResourceError, match=r"model\.cuda_graphs = true: needs a GPU, .* device='cpu'"):
        check_keys(compose(["+experiment=smoke", "model.cuda_graphs=true"]))
