"""Metrics of unscored episodes, computed from a stream of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from components.rollout.usage import PROVIDER_COST
from components.trajectories.parts import main_of, part_of
from components.trajectories.policy_text import NGRAM, IdenticalTexts
from components.trajectories.schema import Trajectory
from components.trajectories.step_labels import CONTINUATIONS, CONTINUED, CONTINUED_TOKENS
from components.trajectories.truncation import acted_to_the_end

SAMPLED = "sampled_tokens"


def figures(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the metrics of unscored episodes: counts, success rate if it is known, mean turns, tokens and invalid
    actions (where the environment counts them), total cost of the model's provider, repetition, and the share of
    identical texts (`components.trajectories.policy_text`).

    Parts of the collection other than the policy's own attempts have separate metrics, such as `second/success`; so
    have continuations, which are not episodes."""
    parts: defaultdict[str, _Part] = defaultdict(_Part)
    for trajectory in trajectories:
        parts[part_of(trajectory)].add(trajectory)
    main = parts.pop(main_of(parts), _Part())
    values = main.counts()
    for name, part in sorted(parts.items()):
        values |= {f"{name}/{key}": value for key, value in (part.counts() | part.success()).items()}
    if not main.finished:
        return values
    continued = {name: values.get(name, 0.0) + count for name, count in main.continued().items()}
    return values | main.success() | main.means() | continued


class _Part:
    """Sums over the episodes of a part of a collection."""

    def __init__(self) -> None:
        self.episodes = self.finished = self.successes = 0
        self.tokens = self.cost = self.repetition = 0.0
        self.sums: Counter[str] = Counter()
        """Sums of the metrics of finished episodes. Names with a slash are labels of turns, and are left out."""
        self.stated = self.silent = False
        """True if an episode states its success; if one acted and ended by itself without stating it."""
        self.invalid: list[float] = [0.0, 0.0]
        """Sum and number of the environment's counts of invalid actions."""
        self.texts = IdenticalTexts()

    def add(self, trajectory: Trajectory) -> None:
        from components.rewards.rules.outcome import repetition

        self.episodes += 1
        self.tokens += trajectory.metrics.get(SAMPLED, 0.0)
        self.cost += trajectory.metrics.get(PROVIDER_COST, 0.0)
        if trajectory.failure is not None:
            return
        self.finished += 1
        self.successes += trajectory.success
        self.stated |= trajectory.outcome.get("success") is not None
        self.silent |= acted_to_the_end(trajectory.metrics)
        self.sums.update({name: value for name, value in trajectory.metrics.items() if "/" not in name})
        if isinstance(invalid := trajectory.outcome.get("invalid_actions"), int | float):
            self.invalid = [self.invalid[0] + invalid, self.invalid[1] + 1]
        self.repetition += repetition(trajectory, NGRAM)
        self.texts.add(trajectory)

    def counts(self) -> dict[str, float]:
        failed = float(self.episodes - self.finished)
        return {"episodes": float(self.episodes), "failed": failed, SAMPLED: self.tokens}

    def success(self) -> dict[str, float]:
        """Return the success rate; nothing if it is unknown (`components.evaluation.metrics.states_success`)."""
        known = self.finished and (self.stated or not self.silent)
        return {"success": self.successes / self.finished} if known else {}

    def continued(self) -> dict[str, float]:
        """Return the number of successful continuations and their tokens; those that failed are a part."""
        names = {CONTINUATIONS: f"{CONTINUED}/episodes", CONTINUED_TOKENS: f"{CONTINUED}/{SAMPLED}"}
        return {name: self.sums[metric] for metric, name in names.items() if metric in self.sums}

    def means(self) -> dict[str, float]:
        """Return the means over the finished episodes, of which there are some."""
        values: dict[str, float] = {}
        if PROVIDER_COST in self.sums:
            values[PROVIDER_COST] = self.cost
        for name in sorted(self.sums.keys() - {SAMPLED, PROVIDER_COST, CONTINUATIONS, CONTINUED_TOKENS}):
            values[name] = self.sums[name] / self.finished
        values["tokens_per_episode"] = self.sums[SAMPLED] / self.finished
        if self.invalid[1]:
            values.setdefault("invalid_actions", self.invalid[0] / self.invalid[1])
        values["repetition"] = self.repetition / self.finished
        shares = zip(("identical_within", "identical_between"), self.texts.shares(), strict=True)
        return values | {name: share for name, share in shares if share is not None}
