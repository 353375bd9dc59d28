"""A language model compares two episodes of a scenario at a time; the group's scores follow from who won.

Each pair is shown in both orders. A judge that prefers the same place each time, whoever stands there, has said
nothing of the episodes: that is a tie, and counted as position bias. From the points of the pairs (1 for a win in both
orders, 3/4 for a win and a tie, 1/2 for a tie) follow strengths θ by Bradley-Terry (`comparing.bradley_terry`), and

    score_i = mean over j ≠ i of σ(θ_i - θ_j)        the points that i is to expect against each of the others

Where every two were compared that is about the share of the points that i made; where not, it also counts against whom.
Episodes that say the same are one in the comparisons: a tie without a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.rewards.judges.comparison.bradley_terry import shares
from components.rewards.judges.comparison.pairings import Pair, all_pairs, random_rounds, swiss_round
from components.rewards.llm.distinct_episodes import DistinctEpisodes
from components.rewards.llm.judge_reward import JudgeReward, Opinion, combine_opinions, total_cost
from components.rewards.llm.question import InvalidAnswer, ask_for_json
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import ONLY_DATA
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

if TYPE_CHECKING:
    from components.rewards.llm.client import JudgeClient
    from components.rewards.llm.protocol import Messages

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

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"explanation": {"type": "string"}, "better": {"type": "string", "enum": ["A", "B", "tie"]}},
    "required": ["explanation", "better"],
    "additionalProperties": False,
}
POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5, "neither": 0.5, "both": 0.5, "equal": 0.5}
"""Of A."""
ALIKE = 0.5
"""Score of episodes that nothing tells apart."""


@dataclass(frozen=True)
class PairResult:
    """What one judge says of a pair."""

    pair: Pair
    points: float | None
    """Of the first one, from 0 to 1; None where an answer could not be had."""
    flipped: bool
    """Whether what it prefers depends on the order."""
    said: str
    cost: float | None
    why: str


@registered("reward.pairwise")
class Pairwise(JudgeReward):
    """Scores the episodes of a scenario by comparing them two at a time, each pair in both orders.

    Args:
        model: Who judges (`judge_model`). Of a list each judges alone, and the score is their mean.
        rubric: What makes an episode better than another; null takes `RUBRIC`.
        all_up_to: Different episodes of a group up to which every two are compared.
        design: How larger groups are paired up, over `rounds` rounds: `swiss`, those with about as many points, round
            after round, or `random`, all rounds at once.
        rounds: Pairs that each episode of a larger group has at most.
        prior: Ties that each episode has against an opponent of middling strength; the larger, the closer scores are.
        at_once: Most comparisons under way at once, of all groups (`judge.concurrency`) together.
        seed: Of the order of the episodes, and of `random`.

    Components of a Score: `pairwise`, `points` (the share of the points that it made), `position_bias` (the share of
    its pairs of which the preference flips with the order), and with several judges each one's score under
    `judge/MODEL` and `spread`, their standard deviation (of the population). A single episode, or a group in which all
    say the same, has a score of 0.5, and nothing is asked. A pair that a judge did not decide, though it was asked
    twice, is left out; an episode of which all pairs were is unscored.
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
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: what decides the judges' answers, not where they are or how patient we are."""
        return {name: value for name, value in JudgeReward.key_arguments(arguments).items() if name != "at_once"}

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One Score for each. Raises ResourceError before `use`, BudgetSpent."""
        askers = self.askers
        if not group:
            return []
        table = DistinctEpisodes(group, self.seed)
        if len(table.order) == 1:
            what = "all episodes of the group say the same" if len(group) > 1 else "there is no other episode"
            why = f"{what}: nothing was asked"
            parts = {"pairwise": ALIKE, "points": ALIKE, "position_bias": 0.0}
            return [Score(one.id, ALIKE, parts, explanation=why) for one in group]
        found = await asyncio.gather(*(self._tournament(client, table) for client in askers.values()))
        opinions = {name: self._opinions(one, table, len(group)) for name, one in zip(askers, found, strict=True)}
        places = zip(group, table.place, strict=True)
        return [combine_opinions(one, {name: said[place] for name, said in opinions.items()}) for one, place in places]

    async def _tournament(self, client: JudgeClient, table: DistinctEpisodes) -> list[PairResult]:
        """What one judge says of all pairs that are compared."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Semaphore(self.at_once)
        turns = self._turns[1]

        async def compared(pair: Pair) -> PairResult:
            async with turns:
                return await self._compared(client, table, pair)

        players = table.order
        if len(players) <= self.all_up_to:
            return await asyncio.gather(*map(compared, all_pairs(players)))
        if self.design == "random":
            return await asyncio.gather(*map(compared, random_rounds(players, self.rounds, self.seed)))
        return await swiss(players, self.rounds, compared)

    async def _compared(self, client: JudgeClient, table: DistinctEpisodes, pair: Pair) -> PairResult:
        """One pair, in both orders."""
        orders = (pair, pair[::-1])
        found = await asyncio.gather(
            *(
                ask_for_json(client, self._question(client, table, one), SCHEMA, _read, needed=["better"])
                for one in orders
            )
        )
        cost = total_cost(found)
        why = "; ".join(one.why for one in found if one.why)
        if found[0].value is None or found[1].value is None:
            return PairResult(pair, None, False, "", cost, why)
        (first, said), (second, _) = found[0].value, found[1].value  # points of who was shown first
        return PairResult(pair, (first + 1 - second) / 2, first == second != 0.5, said, cost, "")

    def _question(self, client: JudgeClient, table: DistinctEpisodes, order: Sequence[int]) -> Messages:
        task = TASK.format(rubric=self.rubric, data=ONLY_DATA)
        room = max((client.spec.longest - len(task) - len(table.context) - len(table.tools)) // 2, 500)
        text = table.shown(list(zip("AB", order, strict=True)), room)
        return [{"role": "system", "content": task}, {"role": "user", "content": text}]

    def _opinions(self, compared: Sequence[PairResult], table: DistinctEpisodes, group: int) -> dict[int, Opinion]:
        """Of each different episode, what follows from the pairs. group: episodes that share the cost."""
        decided = [one for one in compared if one.points is not None]
        placed = {place for one in decided for place in one.pair}
        index = {place: i for i, place in enumerate(place for place in table.order if place in placed)}
        points = [[0.0] * len(index) for _ in index]
        for one in decided:
            assert one.points is not None
            first, second = (index[place] for place in one.pair)
            points[first][second] += one.points
            points[second][first] += 1 - one.points
        scores = shares(points, self.prior) if index else []
        total = total_cost(compared)
        cost = None if total is None else total / group
        why = "; ".join(dict.fromkeys(one.why for one in compared if one.why))
        opinions = {place: Opinion(None, cost=cost, why=why) for place in table.order}
        for place, i in index.items():
            own = [one for one in decided if place in one.pair]
            parts = {
                "pairwise": scores[i],
                "points": sum(points[i]) / len(own),
                "position_bias": sum(one.flipped for one in own) / len(own),
            }
            opinions[place] = Opinion(scores[i], parts, _told(own, place, table), cost)
        return opinions


async def swiss(
    players: Sequence[int], rounds: int, compared: Callable[[Pair], Awaitable[PairResult]]
) -> list[PairResult]:
    """Round after round."""
    points = dict.fromkeys(players, 0.0)
    met: set[frozenset[int]] = set()
    found: list[PairResult] = []
    for _ in range(rounds):
        pairs = swiss_round(players, [points[player] for player in players], met)
        if not pairs:
            break
        for one in await asyncio.gather(*map(compared, pairs)):
            found.append(one)
            met.add(frozenset(one.pair))
            share = 0.5 if one.points is None else one.points
            points[one.pair[0]] += share
            points[one.pair[1]] += 1 - share
    return found


def _read(given: Mapping[str, Any]) -> tuple[float, str]:
    """Points of A, and why. Raises InvalidAnswer."""
    word = str(given["better"]).strip().strip(".\"'`").lower().removeprefix("trajectory ").strip()
    if word not in POINTS:
        raise InvalidAnswer(f'Your answer says that {word[:40]!r} is better; expected "A", "B" or "tie".')
    return POINTS[word], str(given.get("explanation") or "")


def _told(own: Sequence[PairResult], place: int, table: DistinctEpisodes) -> str:
    """What was said of its pairs, one line each; the other one by its id, A and B as they were shown first."""
    lines = []
    for one in own:
        first = one.pair[0] == place
        assert one.points is not None
        points = one.points if first else 1 - one.points
        other = table.names[one.pair[1] if first else one.pair[0]]
        result = "flips with the order" if one.flipped else f"{points:g}"
        lines.append(f"{'A' if first else 'B'} against {other}: {result}. {one.said}".rstrip())
    return "\n".join(lines)
