"""Pairwise comparison of the episodes of a scenario by a language model.

Each pair is shown in both orders. A judge that prefers the same position both times gives no information about the
episodes: that is a tie, and counted as position bias. From the points of the pairs (1 for a win in both orders, 3/4 for
a win and a tie, 1/2 for a tie) follow strengths θ by Bradley-Terry (`comparison.pairings`), and

    score_i = mean over j ≠ i of σ(θ_i - θ_j)        the expected points of i against each other episode

If all pairs were compared, this is about the share of points of i; otherwise it also depends on the strength of the
opponents. Duplicate episodes are one player: they tie without a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.rewards.judges.comparison.pairings import Pair, all_pairs, random_rounds, shares, swiss_round
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.distinct_episodes import DistinctEpisodes
from components.rewards.llm.judge_reward import JudgeReward, Opinion, combine_opinions, total_cost
from components.rewards.llm.protocol import Messages
from components.rewards.llm.question import InvalidAnswer, ask_for_json
from components.rewards.llm.rows import object_schema
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import ONLY_DATA
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

RUBRIC = """\
- Reaching the goal of the task counts most.
- Of two that reach it, the one that got there more directly is better: detours and repeated or useless steps cost.
- Of two that do not, the one that came closer is better."""

TASK = """\
You compare two attempts of AI agents at the same task; the task is what the messages before the first answer of an \
agent ask for. Which one is better?

What to look at:
{rubric}

{data}

The order in which the two are shown says nothing. Answer with JSON: {{"explanation": one or two short sentences, \
"better": "A", "B", or "tie" where neither is better}}."""

SCHEMA = object_schema({"explanation": {"type": "string"}, "better": {"type": "string", "enum": ["A", "B", "tie"]}})
POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5, "neither": 0.5, "both": 0.5, "equal": 0.5}
"""Points of A by the judge's verdict."""
ALIKE = 0.5
"""Score of indistinguishable episodes."""


@dataclass(frozen=True)
class PairResult:
    """Result of one judge for a pair."""

    pair: Pair
    points: float | None
    """Points of the first episode, from 0 to 1; None if an answer is missing."""
    flipped: bool
    """True if the preference depends on the order."""
    explanation: str
    cost: float | None
    reason: str


@registered("reward.pairwise")
class Pairwise(JudgeReward):
    """Scores from pairwise comparisons of the episodes of a scenario, each pair in both orders.

    Args:
        model: Judge model (`judge_model`). The models of a list judge independently, and the score is their mean.
        rubric: Criteria for the better episode; null takes `RUBRIC`.
        all_up_to: Largest number of different episodes in a group for which all pairs are compared.
        design: Pairing of larger groups, over `rounds` rounds: `swiss` pairs episodes with similar points, round by
            round; `random` draws all rounds at once.
        rounds: Maximum number of pairs of each episode in a larger group.
        prior: Number of ties of each episode against an opponent of average strength; larger values shrink the
            differences between scores.
        at_once: Maximum number of concurrent comparisons, over all groups (`judge.concurrency`).
        seed: Seed of the order of the episodes, and of `random`.

    Components of a Score: `pairwise`, `points` (the episode's share of the points), `position_bias` (the share of its
    pairs whose preference flips with the order), and with several judges each one's score under `judge/MODEL` and
    `spread`, their standard deviation (of the population). A single episode, or a group of duplicates, gets a score of
    0.5 without a call. A pair that a judge did not decide in two attempts is left out; an episode without a decided
    pair is unscored.
    """

    def __init__(
        self,
        model: JudgeModel | Annotated[list[JudgeModel], Field(min_length=1)],
        rubric: Annotated[str, Field(min_length=1)] | None = None,
        all_up_to: Annotated[int, Field(ge=2)] = 6,
        design: Literal["swiss", "random"] = "swiss",
        rounds: Annotated[int, Field(ge=1)] = 4,
        prior: Annotated[float, Field(gt=0)] = 0.1,
        at_once: Annotated[int, Field(ge=1)] = 16,
        seed: int = 0,
    ):
        super().__init__(model)
        self.rubric = rubric or RUBRIC
        self.all_up_to = all_up_to
        self.design = design
        self.rounds = rounds
        self.prior = prior
        self.at_once = at_once
        self.seed = seed
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: what determines the judges' answers, without addresses and timeouts."""
        return {name: value for name, value in JudgeReward.key_arguments(arguments).items() if name != "at_once"}

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one Score for each trajectory. Raises ResourceError before `use`, BudgetExceeded."""
        clients = self.askers
        if not group:
            return []
        table = DistinctEpisodes(group, self.seed)
        if len(table.order) == 1:
            cause = "all episodes of the group say the same" if len(group) > 1 else "there is no other episode"
            reason = f"{cause}: nothing was asked"
            parts = {"pairwise": ALIKE, "points": ALIKE, "position_bias": 0.0}
            return [Score(trajectory.id, ALIKE, parts, explanation=reason) for trajectory in group]
        results = await asyncio.gather(*(self._tournament(client, table) for client in clients.values()))
        opinions = {
            name: self._opinions(pair_results, table, len(group))
            for name, pair_results in zip(clients, results, strict=True)
        }
        places = zip(group, table.place, strict=True)
        return [
            combine_opinions(trajectory, {name: by_place[place] for name, by_place in opinions.items()})
            for trajectory, place in places
        ]

    async def _tournament(self, client: JudgeClient, table: DistinctEpisodes) -> list[PairResult]:
        """Return the results of one judge for all pairs that are compared."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = loop, asyncio.Semaphore(self.at_once)
        semaphore = self._semaphore[1]

        async def compare(pair: Pair) -> PairResult:
            async with semaphore:
                return await self._compare(client, table, pair)

        players = table.order
        if len(players) <= self.all_up_to:
            return await asyncio.gather(*map(compare, all_pairs(players)))
        if self.design == "random":
            return await asyncio.gather(*map(compare, random_rounds(players, self.rounds, self.seed)))
        return await swiss(players, self.rounds, compare)

    async def _compare(self, client: JudgeClient, table: DistinctEpisodes, pair: Pair) -> PairResult:
        """Compare one pair, in both orders."""
        orders = (pair, pair[::-1])
        judgements = await asyncio.gather(
            *(
                ask_for_json(client, self._question(client, table, order), SCHEMA, _read, needed=["better"])
                for order in orders
            )
        )
        cost = total_cost(judgements)
        reason = "; ".join(judgement.reason for judgement in judgements if judgement.reason)
        if judgements[0].value is None or judgements[1].value is None:
            return PairResult(pair, None, False, "", cost, reason)
        # Points of the episode that was shown first.
        (first, explanation), (second, _) = judgements[0].value, judgements[1].value
        return PairResult(pair, (first + 1 - second) / 2, first == second != 0.5, explanation, cost, "")

    def _question(self, client: JudgeClient, table: DistinctEpisodes, order: Sequence[int]) -> Messages:
        task = TASK.format(rubric=self.rubric, data=ONLY_DATA)
        room = max((client.spec.longest - len(task) - len(table.context) - len(table.tools)) // 2, 500)
        text = table.render(list(zip("AB", order, strict=True)), room)
        return [{"role": "system", "content": task}, {"role": "user", "content": text}]

    def _opinions(self, results: Sequence[PairResult], table: DistinctEpisodes, group: int) -> dict[int, Opinion]:
        """Return the opinion on each different episode that follows from the pairs. group: number of episodes that
        share the cost."""
        decided = [result for result in results if result.points is not None]
        placed = {place for result in decided for place in result.pair}
        index = {place: i for i, place in enumerate(place for place in table.order if place in placed)}
        points = [[0.0] * len(index) for _ in index]
        for result in decided:
            assert result.points is not None
            first, second = (index[place] for place in result.pair)
            points[first][second] += result.points
            points[second][first] += 1 - result.points
        scores = shares(points, self.prior) if index else []
        total = total_cost(results)
        cost = None if total is None else total / group
        reason = "; ".join(dict.fromkeys(result.reason for result in results if result.reason))
        opinions = {place: Opinion(None, cost=cost, reason=reason) for place in table.order}
        for place, i in index.items():
            own_results = [result for result in decided if place in result.pair]
            parts = {
                "pairwise": scores[i],
                "points": sum(points[i]) / len(own_results),
                "position_bias": sum(result.flipped for result in own_results) / len(own_results),
            }
            opinions[place] = Opinion(scores[i], parts, _explanation(own_results, place, table), cost)
        return opinions


async def swiss(
    players: Sequence[int], rounds: int, compare: Callable[[Pair], Awaitable[PairResult]]
) -> list[PairResult]:
    """Return the results of a Swiss tournament, round by round."""
    points = dict.fromkeys(players, 0.0)
    met: set[frozenset[int]] = set()
    results: list[PairResult] = []
    for _ in range(rounds):
        pairs = swiss_round(players, [points[player] for player in players], met)
        if not pairs:
            break
        for result in await asyncio.gather(*map(compare, pairs)):
            results.append(result)
            met.add(frozenset(result.pair))
            share = 0.5 if result.points is None else result.points
            points[result.pair[0]] += share
            points[result.pair[1]] += 1 - share
    return results


def _read(answer: Mapping[str, Any]) -> tuple[float, str]:
    """Return the points of A and the explanation. Raises InvalidAnswer."""
    word = str(answer["better"]).strip().strip(".\"'`").lower().removeprefix("trajectory ").strip()
    if word not in POINTS:
        raise InvalidAnswer(f'Your answer says that {word[:40]!r} is better; expected "A", "B" or "tie".')
    return POINTS[word], str(answer.get("explanation") or "")


def _explanation(results: Sequence[PairResult], place: int, table: DistinctEpisodes) -> str:
    """Return the explanation of an episode: one line for each of its pairs, with the opponent's id; A and B as first
    shown."""
    lines = []
    for result in results:
        first = result.pair[0] == place
        assert result.points is not None
        points = result.points if first else 1 - result.points
        other = table.names[result.pair[1] if first else result.pair[0]]
        outcome = "flips with the order" if result.flipped else f"{points:g}"
        lines.append(f"{'A' if first else 'B'} against {other}: {outcome}. {result.explanation}".rstrip())
    return "\n".join(lines)
