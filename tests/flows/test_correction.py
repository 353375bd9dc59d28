"""What `algorithm.correction: auto` stands for, and where it goes."""

from __future__ import annotations

from flows.planning.plan import plan
from tests.flows.pretend import spec_of
from tests.flows.test_online_rl import DATA, Recorder

BFLOAT16 = {"model": {**DATA["model"], "dtype": "bfloat16"}}


def test_auto_corrects_where_log_probabilities_differ(tmp_path):
    for changes, expected in (
        ({}, "none"),
        (BFLOAT16, "truncate"),
        ({"collect": {**DATA["collect"], "overlap": 1}}, "truncate"),
        ({"replay": {"share": 0.25}}, "none"),
        ({"replay": {"share": 0.25}, "algorithm": {"name": "gspo"}}, "truncate"),  # ratios of whole sequences
        ({**BFLOAT16, "algorithm": {"name": "ppo"}}, "truncate"),
        ({**BFLOAT16, "algorithm": {"name": "grpo", "correction": "none"}}, "none"),
        ({"algorithm": {"name": "grpo", "correction": "mask"}}, "mask"),
    ):
        changes = {"filter": {"_target_": "components.filters.everything.Everything"}, **changes}
        assert spec_of(tmp_path, **changes).corrected_algorithm().correction == expected, changes
        part = Recorder(tmp_path, **changes).requests["train[1]"].spec
        assert part["algorithm"]["correction"] == expected  # the trainer never decides


def test_the_plan_says_what_auto_stands_for_and_why(tmp_path):
    notes = plan(spec_of(tmp_path, **BFLOAT16)).notes
    assert "algorithm.correction=auto resolves to truncate" in " ".join(notes)
    assert "model.dtype=bfloat16" in " ".join(notes)
    assert "algorithm.correction" not in " ".join(plan(spec_of(tmp_path)).notes)


def test_decay_ties_a_training_to_its_place_among_the_rounds(tmp_path):
    kept = [Recorder(tmp_path, rounds=n).keys["train[1]"] for n in (2, 3)]
    falling = [
        Recorder(tmp_path, rounds=n, algorithm={"name": "grpo", "decay": "linear"}).keys["train[1]"] for n in (2, 3)
    ]
    assert kept[0] == kept[1]
    assert falling[0] != falling[1]
    request = Recorder(tmp_path, rounds=3).requests["train[2]"]
    assert request.spec["rounds"] == [2, 3]
