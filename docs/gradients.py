"""Tables of docs/reference/algorithms.md of combinations of settings, and their formulas.

    python -m docs.gradients

The combinations are those of tests/algorithms/combinations.py, whose gradients are tested; what is refused is asked of
the checks of an experiment. `tests/docs` fails while the tables are not what this writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from components.algorithms.choices import ALGORITHMS as ALGORITHM_SPECS
from components.errors import Problem
from tests.algorithms.combinations import (
    ALGORITHMS,
    COEFFICIENT,
    FORMS,
    KL_PLACES,
    NO_KL,
    combinations,
    options,
    problems,
)

PAGE = Path(__file__).parent / "reference" / "algorithms.md"
BEGIN, END = "<!-- gradients -->", "<!-- /gradients -->"

ADVANTAGES = {
    ("episode", "index", "reward"): "`norm(R - c·Σ KL)`",
    ("episode", "index", "token_rewards"): "`norm(R - c·Σ_(u ≥ t) KL_u)`, over all tokens",
    ("episode", "index", NO_KL): "`norm(R)`",
    ("turns", "index", "reward"): "`norm_k(G_k - c·Σ KL)`",
    ("turns", "index", "token_rewards"): "`norm_k(G_k - c·Σ_(u ≥ t) KL_u)`, over the tokens of turns k",
    ("turns", "index", NO_KL): "`norm_k(G_k)`",
    ("turns", "state", "reward"): "`norm(Σ s - c·Σ KL) + w·norm_state(G_k - c·Σ KL)`",
    ("turns", "state", NO_KL): "`norm(Σ s) + w·norm_state(G_k)`",
    ("turns", "process", NO_KL): "`Σ_(j ≥ k) discount^(j - k)·norm(s_j)`",
}
"""Advantage of a token t in turn k, by credit, turn_baseline and place of the KL. A KL in the loss changes none."""

NORMALISED = {
    "group": "mean of the group",
    "leave_one_out": "mean of the group's other episodes",
    "batch": "mean of the batch",
    "none": "0",
}
SCALES = {"group": "deviation of the group", "batch": "deviation of the batch", "none": "1"}

GRADIENTS = {
    "token": ("`π / π_old` of the token", "`ρ·A·∇log π`", "`clip(ρ)·A·∇log π`"),
    "sequence_mean": (
        "geometric mean of `π / π_old` over the history, of the policy before the first step",
        "`ρ·A·∇log π`",
        "`clip(ρ)·A·∇log π`",
    ),
    "sequence": (
        "product of `π / π_old` over the history, of the policy before the first step",
        "`n·ρ·A·∇log π`, n tokens in the episode",
        "`clip(ρ)·A·∇log π`",
    ),
}
"""By ratio: what it is, the gradient of a token with `objective: clip` and with `cispo`."""

OTHER_KL = {
    "distill": "the loss is the KL to the teacher",
    "ppo": "off the reward of each token",
    "dpo": "in the margin, by `beta`",
    "ipo": "in the margin, by `beta`",
    "kto": "in the margin and the reference point, by `beta`",
}
"""Of the algorithms that have no `kl_in`."""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page with the tables as they should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}{END}{rest.partition(END)[2]}"


def tables() -> str:
    return "\n".join([_algorithms(), _advantages(), _baselines(), _ratios()])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("---|", "---|")


def _algorithms() -> str:
    compared = sum(not problems(one.spec()) for one in combinations())
    names: dict[tuple[str, ...], list[str]] = {}
    for algorithm in ALGORITHM_SPECS:
        name = algorithm.model_fields["name"].default
        kl = (
            f"none, {_options(algorithm, 'kl_in')}" if "kl_in" in algorithm.model_fields else OTHER_KL.get(name, "none")
        )
        cells = (_options(algorithm, "credit"), _options(algorithm, "ratio"), kl)
        names.setdefault(cells, []).append(f"`{name}`")
    rows = [[", ".join(each), *cells] for cells, each in names.items()]
    return (
        _table(["`algorithm=`", "`credit`", "`ratio`", "KL (`kl_in`)"], rows)
        + f"\nAll of these go together, but for what the next tables refuse: {compared} combinations of the policy "
        "gradients, each with episodes of one and of several histories.\n"
    )


def _options(algorithm: Any, key: str) -> str:
    if key not in algorithm.model_fields:
        return "none"
    return ", ".join(f"`{one}`" for one in get_args(algorithm.model_fields[key].annotation))


def _advantages() -> str:
    rows, reasons = [], {}
    for credit, form in FORMS:
        cells = []
        for place in KL_PLACES:
            if place == "loss":
                continue
            kl = {} if place == NO_KL else {"kl_in": place, "kl_coefficient": COEFFICIENT}
            found = _refused(credit=credit, turn_baseline=form, **({"kl_coefficient": 0.0} | kl))
            assert (found is None) == ((credit, form, place) in ADVANTAGES), (credit, form, place)
            cells.append("refused" if found else ADVANTAGES[credit, form, place])
            if found:
                reasons[f"`turn_baseline: {form}` with `kl_in: {place}`"] = found
        rows.append([f"`{credit}`" if credit == "episode" else f"`{credit}`, `{form}`", *cells])
    why = "".join(f"- {what}: {problem.message.partition(': ')[2]}.\n" for what, problem in reasons.items())
    head = ["`credit`, `turn_baseline`", "no KL, or `kl_in: loss`", "`kl_in: reward`", "`kl_in: token_rewards`"]
    return f"Advantage of token t in turn k:\n\n{_table(head, rows)}\nRefused:\n\n{why}"


def _baselines() -> str:
    rows = [
        [
            f"`{baseline}`: {NORMALISED[baseline]}",
            *("refused" if _refused(baseline=baseline, scale=scale) else "yes" for scale in options("scale")),
        ]
        for baseline in options("baseline")
    ]
    head = ["`baseline`", *(f"`scale: {scale}`: {SCALES[scale]}" for scale in options("scale"))]
    return f"`norm` takes the baseline off and divides by the scale:\n\n{_table(head, rows)}"


def _ratios() -> str:
    rows = [[f"`{ratio}`", *GRADIENTS[ratio]] for ratio in options("ratio")]
    assert len(options("objective")) == 2
    head = ["`ratio`", "ρ", "`objective: clip`, where not clipped", "`objective: cispo`"]
    return f"What a token adds to the direction of the step, before its weight:\n\n{_table(head, rows)}"


def _refused(**settings: Any) -> Problem | None:
    """Return why every algorithm refuses these settings; None where none does."""
    found = [problems(algorithm(**settings)) for algorithm in ALGORITHMS.values()]
    assert all(bool(each) == bool(found[0]) for each in found), settings
    return found[0][0] if found[0] else None


if __name__ == "__main__":
    main()
