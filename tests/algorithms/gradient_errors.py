"""Table of gradient errors: per algorithm, the number of combinations of settings that were compared with their
formulas in float64, the number that are rejected, and the largest relative error of a gradient.

    python -m tests.algorithms.gradient_errors

The combinations are those of the tests `test_gradient_matrix*`.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

from components.algorithms.ppo.spec import PPOSpec
from components.models.weights import prepare
from tests.algorithms import combinations, test_gradient_matrix_episodes, test_gradient_matrix_ppo
from tests.algorithms.builders import MODEL
from tests.algorithms.gradients import HISTORIES, UNGUARDED, Bench, policy_gradient_errors


def main() -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    refused: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        (scratch := Path(folder) / "bench").mkdir()
        bench = Bench(prepare(MODEL, Path(folder) / "models"), scratch)
        specs = [combination.spec(**UNGUARDED) for combination in combinations.combinations()]
        specs += [
            combinations.varied(base, variation, **UNGUARDED)
            for base in combinations.BASES
            for variation in combinations.VARIATIONS
        ]
        for histories in HISTORIES:
            for spec in specs:
                if combinations.problems(spec):
                    refused[spec.name] += 1
                else:
                    errors[spec.name] += [max(policy_gradient_errors(bench, spec, histories))]
            for kind in test_gradient_matrix_ppo.KINDS:
                critics = test_gradient_matrix_ppo.CriticBench(bench, kind)
                for spec in test_gradient_matrix_ppo.specs(kind):
                    errors[PPOSpec().name] += [max(test_gradient_matrix_ppo.errors(critics, spec, histories))]
            for name, spec in test_gradient_matrix_episodes.SPECS.items():
                errors[spec.name] += [max(test_gradient_matrix_episodes.errors(bench, name, histories))]
    print("| Algorithm | Compared | Refused | Largest relative error |\n|---|---|---|---|")
    for name, algorithm_errors in errors.items():
        print(f"| {name} | {len(algorithm_errors)} | {refused[name]} | {max(algorithm_errors):.1e} |")


if __name__ == "__main__":
    main()
