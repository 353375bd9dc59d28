"""Gradients of the combinations of a policy gradient's settings equal those of its formula, or the combination is
rejected. Every pair of settings is tested; `make test-slow` tests all combinations.

The trainers compute in float32 on prefix tries; the formulas (`papers`) compute in float64, on single sequences in
plain torch (`plain_llama`). Each training takes two steps; in the second the policy has changed (`gradients`).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.algorithms.policy_gradient.trainer import train_policy_gradient
from tests.algorithms import combinations, papers, papers_of_episodes, plain_llama
from tests.algorithms.builders import make_context
from tests.algorithms.gradients import (
    HISTORIES,
    TEMPERATURE,
    UNGUARDED,
    Replaces,
    policy_gradient_errors,
    relative_error,
    split,
)

TOLERANCE = 1e-5

BASES = list(combinations.BASES)
ALL = [(combination, histories) for combination in combinations.combinations() for histories in HISTORIES]
ACCEPTED = [case for case in ALL if not combinations.problems(case[0].spec(**UNGUARDED))]
VARIED = [
    (base, variation, histories)
    for variation in combinations.VARIATIONS
    for base in combinations.BASES
    for histories in HISTORIES
    if not combinations.problems(combinations.varied(base, variation, **UNGUARDED))
]


def cases(rows, chosen):
    """Return the parameters of a test: the rows that are not chosen are left to `make test-slow`."""
    return [
        pytest.param(*row, id=", ".join(map(str, row)), marks=() if row in chosen else pytest.mark.slow) for row in rows
    ]


PAIRS = set(combinations.covering([combinations.factors(*case) for case in ACCEPTED]))
CHOSEN = [case for case in ACCEPTED if combinations.factors(*case) in PAIRS]


def two_bases(index: int, variation: str) -> list[str]:
    """Return two bases of a variation: with credit by turns for a setting that has no effect without."""
    if {"turn_baseline", "discount"} & combinations.VARIATIONS[variation].keys():
        return [base for base in BASES if "turns" in base]
    return [BASES[index % 4], BASES[(index + 1) % 4]]


CHOSEN_VARIED = [
    (base, variation, HISTORIES[(index + offset) % 2])
    for index, variation in enumerate(combinations.VARIATIONS)
    for offset, base in enumerate(two_bases(index, variation))
]


@pytest.mark.parametrize(("combination", "histories"), cases(ACCEPTED, CHOSEN))
def test_the_gradient_is_that_of_the_formula(bench, combination, histories):
    assert max(policy_gradient_errors(bench, combination.spec(**UNGUARDED), histories)) <= TOLERANCE


@pytest.mark.parametrize(("base", "variation", "histories"), cases(VARIED, CHOSEN_VARIED))
def test_so_is_that_of_each_other_setting(bench, base, variation, histories):
    spec = combinations.varied(base, variation, **UNGUARDED)
    assert max(policy_gradient_errors(bench, spec, histories)) <= TOLERANCE


def test_a_combination_without_a_formula_is_refused_with_a_remedy():
    specs = [combination.spec(**UNGUARDED) for combination in combinations.combinations()]
    specs += [
        combinations.varied(base, variation, **UNGUARDED) for base in BASES for variation in combinations.VARIATIONS
    ]
    refused = [(spec, problem) for spec in specs for problem in combinations.problems(spec)]
    assert refused
    for spec, problem in refused:
        assert problem.message.startswith(f"{getattr(spec, problem.path.removeprefix('algorithm.'))}: ")
        assert "; expected " in problem.message


@pytest.mark.parametrize("algorithm", combinations.ALGORITHMS)
@pytest.mark.parametrize("credit", combinations.options("credit"))
def test_an_episode_weighs_the_same_in_one_history_and_in_one_for_each_turn(bench, algorithm, credit):
    """If the sequence ratio is 1, as before the first step, the split into sequences does not matter."""
    spec = combinations.ALGORITHMS[algorithm](**UNGUARDED | {"epochs": 1}, credit=credit)
    if list(spec.problems()):
        pytest.skip("the options are refused")
    whole = bench.batches["one history"].trajectories
    gradients = []
    for trajectories in (whole, [*map(split, whole[:-1]), whole[-1]]):
        bench.set(bench.start)
        optimizer = Replaces([bench.policy.parameters], bench.after)
        options = {"step": 0, "seed": 0, "scratch": bench.scratch(), "on_step": lambda _: None}
        train_policy_gradient(spec, make_context(bench.policy, optimizer, trajectories, **options))
        gradients += optimizer.gradients
    assert relative_error(*gradients) <= TOLERANCE


# --- the formulas' side ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
def test_the_plain_model_is_that_of_transformers(bench, adapted):
    """Transformers runs in float64 with eager attention; PEFT merges its adapter."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    from tests.algorithms.builders import MODEL

    model = AutoModelForCausalLM.from_pretrained(bench.base_dir, attn_implementation="eager", dtype=torch.float64)
    if adapted:
        config = LoraConfig(r=MODEL.lora.rank, lora_alpha=MODEL.lora.alpha, target_modules=MODEL.lora.target_modules)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        tensors = {name.replace(".default.", "."): tensor.double() for name, tensor in bench.start.items()}
        assert not set_peft_model_state_dict(model, tensors).unexpected_keys
    token_ids = bench.batches["one history"].trajectories[0].histories[0].token_ids
    with torch.no_grad():
        theirs_TV = (model(input_ids=torch.tensor([token_ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        hidden_TD = bench.model.hidden(token_ids, bench.start if adapted else None)
    # Its norms and angles are computed in float32.
    assert (bench.model.logps(hidden_TD, TEMPERATURE) - theirs_TV).abs().max() < 1e-5


@pytest.mark.parametrize(
    "module", [papers, papers_of_episodes, plain_llama], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_the_formulas_import_nothing_of_the_library(module):
    imported = [
        name
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else []
        )
    ]  # fmt: skip
    assert "torch" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("components", "flows", "tests", "trl", "peft")]


@pytest.mark.parametrize(("level", "clip"), [("token", 0.2), ("sequence_mean", 0.05), ("sequence", 0.2)])
@pytest.mark.parametrize("histories", HISTORIES)
def test_the_episodes_reach_every_branch(bench, histories, level, clip):
    """In the second step ratios are clipped on both sides, and by the dual clip. None is so close to a limit that
    rounding decides."""
    batch = bench.batches[histories]
    spec = combinations.ALGORITHMS["grpo"](ratio=level, credit="turns")
    advantages = papers.advantages(spec, batch.episodes, [[0.0] * episode.tokens for episode in batch.episodes])
    rows = []
    for episode, columns, advantage_S in zip(
        batch.episodes, batch.columns(batch.steps[1].columns), advantages, strict=True
    ):
        log_ratio_S = columns.now - papers.ratio_base(spec, columns)
        for positions in papers.histories(episode):
            level_S = log_ratio_S[positions]
            if level != "token":
                level_S = (level_S.mean() if level == "sequence_mean" else level_S.sum()).expand(len(positions))
            rows += [
                (float(value.exp()), advantage_S[position]) for value, position in zip(level_S, positions, strict=True)
            ]
    low, high, dual = 1 - clip, 1 + clip, spec.dual_clip
    assert any(ratio > high and advantage > 0 for ratio, advantage in rows)
    assert any(ratio < low and advantage < 0 for ratio, advantage in rows)
    assert any(low < ratio < high for ratio, _ in rows)
    assert level == "sequence_mean" or any(ratio > dual and advantage < 0 for ratio, advantage in rows)
    assert min(abs(ratio - limit) for ratio, _ in rows for limit in (low, high, dual)) > 1e-4
    assert {episode.cut_off for episode in batch.episodes} == {True, False}
    assert len({len(episode.step_rewards) for episode in batch.episodes}) > 1
