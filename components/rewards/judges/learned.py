"""A reward that was learned: the scores of one or several reward models (`components.algorithms.reward_models.model`).

    score = min(cap, combine over models (Σ over heads of weight_h · s_h))      of an episode, or of each turn t

    R     = task_weight · R_task + weight · score                               a model of whole episodes
    R     = task_weight · R_task + weight · Σ_t score_t                         a process model

s_h are the heads' scores, with `normalise` less their mean on the training data and over their standard deviation
there. A policy that is trained on a model's scores finds where the model errs; several models err at different places,
so the lowest of their scores, or their mean less their spread, is a bound that is harder to deceive (arXiv:2310.02743).

The step rewards of a process model add up to R: weight · score_t for turn t, R_task's part at the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from components.errors import ArtifactError, BoundaryError, JudgeError, Problem, ResourceError, SpecError
from components.models.spec import ModelSpec
from components.rewards.judge import judge, reject_running_statistics
from components.rewards.protocol import Means, ModelReward
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory

if TYPE_CHECKING:
    import torch

    from components.algorithms.reward_models.card import Card
    from components.algorithms.reward_models.data import Episode
    from components.algorithms.reward_models.model import RewardModel

PROCESS = "process_reward_model"


@registered("reward.learned")
class Learned:
    """Scores episodes by reward models that were trained before.

    Args:
        path: Folder of a reward model; several for an ensemble.
        task: Reward that is added, R_task; null adds none.
        task_weight: Of `task`.
        weight: Of the learned reward.
        normalise: Scores of each head less their mean on the training data, over their standard deviation there.
        combine: Of several models: the mean, the lowest (`min`), or the mean less `deviations` standard deviations
            (`bound`).
        deviations: See combine; 0 or more.
        cap: Most that a score counts, of an episode or, by a process model, of a turn; null is no limit.
        pack_tokens: Most tokens that one forward pass computes; bounds memory.

    The components of a Score are the heads (mean over the models, of a process model the sum over the turns, before
    weights and cap), `task`, and of several models `spread`, the standard deviation of their scores. An episode that
    is too long for the model, or has nothing to read, is unscored and says so.
    """

    def __init__(
        self,
        path: str | list[str],
        task: Any = None,
        task_weight: FiniteFloat = 1.0,
        weight: FiniteFloat = 1.0,
        normalise: bool = False,
        combine: Literal["mean", "min", "bound"] = "mean",
        deviations: Annotated[float, Field(ge=0)] = 1.0,
        cap: FiniteFloat | None = None,
        pack_tokens: Annotated[int, Field(ge=64)] = 1024,
    ):
        self.folders = _folders(path)
        reject_running_statistics(task, "reward.task")
        self.task = task
        self.task_weight = task_weight
        self.weight = weight
        self.normalise = normalise
        self.combine = combine
        self.deviations = deviations
        self.cap = cap
        self.pack_tokens = pack_tokens
        self._scorer: _Scorer | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: what the folders hold in place of where they are. Raises ArtifactError where that is no
        reward model."""
        from components.algorithms.reward_models.card import content_digest

        return {**arguments, "path": [content_digest(folder) for folder in _folders(arguments["path"])]}

    def use(self, means: Means) -> None:
        """Loads the reward models. Raises ArtifactError where one has another base or is damaged, or where several are
        not alike."""
        from components.algorithms.reward_models.card import content_digest

        recipe = [content_digest(folder) for folder in self.folders], self.pack_tokens, means.model.model_dump()
        model = means.model
        self._scorer = means.keep("reward", recipe, lambda: _Scorer(self.folders, means.cache, model, self.pack_tokens))
        if isinstance(self.task, ModelReward):
            self.task.use(means)

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One score for each trajectory. Raises ResourceError before `use`."""
        if self._scorer is None:
            raise ResourceError("the learned reward has no model yet: call use(means) first")
        tasks = list(judge(self.task, group)) if self.task is not None else [Score(one.id, 0.0) for one in group]
        read, why = self._scorer.readable(group)
        found = iter(self._scorer.scores(list(read.values())))
        return [
            self._score(one, task, next(found)) if one.id in read else _unscored(one, JudgeError(why[one.id]))
            for one, task in zip(group, tasks, strict=True)
        ]

    def _score(self, trajectory: Trajectory, task: Score, score_MRH: torch.Tensor) -> Score:
        """M models, R readings, H heads."""
        assert self._scorer is not None
        if task.reward is None:
            return Score(trajectory.id, None, explanation=task.explanation, cost=task.cost, failure=task.failure)
        cards = self._scorer.cards
        weighed_MR = score_MRH.new_zeros(score_MRH.shape[:2])
        for member, card in enumerate(cards):
            for index, head in enumerate(card.heads.values()):
                score_R = score_MRH[member, :, index]
                if self.normalise:
                    score_R = (score_R - head.mean) / head.std if head.std else score_R - head.mean
                weighed_MR[member] += head.weight * score_R
        counted_R = combined(weighed_MR, self.combine, self.deviations)
        if self.cap is not None:
            counted_R = counted_R.clamp(max=self.cap)
        task_part = self.task_weight * task.reward if self.task is not None else 0.0
        parts = dict(zip(cards[0].heads, score_MRH.sum(1).mean(0).tolist(), strict=True))
        if self.task is not None:
            parts["task"] = task.reward
        if len(cards) > 1:
            parts["spread"] = weighed_MR.sum(1).std(correction=0).item()
        steps = (self.weight * counted_R).tolist()
        steps[-1] += task_part
        by_turn = cards[0].kind == PROCESS
        return Score(
            trajectory.id, sum(steps), parts, steps if by_turn else [], explanation=task.explanation, cost=task.cost
        )


def combined(score_MR: torch.Tensor, how: Literal["mean", "min", "bound"], deviations: float) -> torch.Tensor:
    """(R,) of the scores of M models: their mean, their minimum, or mean - deviations · std (of the population)."""
    if how == "min":
        return score_MR.min(0).values
    mean_R = score_MR.mean(0)
    return mean_R - deviations * score_MR.std(0, correction=0) if how == "bound" else mean_R


class _Scorer:
    """Reward models of one base. The base is in memory once; what each member learned and its heads take their turn."""

    def __init__(self, folders: Sequence[Path], cache: Path, model: ModelSpec, pack_tokens: int):
        from components.algorithms.reward_models.card import check_base, read_card
        from components.algorithms.reward_models.model import load
        from components.models.trained_weights import folder_of
        from components.models.weights import load_tokenizer, prepare
        from components.trajectories.chat import ChatFormat

        base_dir = prepare(model, cache)
        self.cards: list[Card] = [read_card(folder) for folder in folders]
        for folder, card in zip(folders, self.cards, strict=True):
            check_base(folder, card, model)
            if (other := _shape(card)) != (own := _shape(self.cards[0])):
                raise ArtifactError(f"{folder} and {folders[0]} make no ensemble: {other} is not {own}")
        self._model: RewardModel = load(folders[0], base_dir, model)[0]
        self._learned = [folder_of(folder) for folder in folders]
        self._held = 0
        self._model.model.eval()
        self._chat = ChatFormat(load_tokenizer(base_dir))
        self._pack_tokens = pack_tokens
        self._max_length = model.max_length

    def readable(self, group: Sequence[Trajectory]) -> tuple[dict[str, Episode], dict[str, str]]:
        """Episodes by trajectory id, and why the others cannot be read."""
        from components.algorithms.reward_models.data import episode

        read: dict[str, Episode] = {}
        why: dict[str, str] = {}
        for one in group:
            try:
                found = episode(self._chat, one, turns=self.cards[0].kind == PROCESS)
            except BoundaryError as error:  # a chat template that refuses a written conversation
                why[one.id] = str(error)
                continue
            if not found.readings:
                why[one.id] = "the episode has nothing that the reward model reads: no tokens, or no turn"
            elif found.longest > self._max_length:
                why[one.id] = f"its {found.longest} tokens are more than model.max_length={self._max_length}"
            else:
                read[one.id] = found
        return read, why

    def scores(self, episodes: Sequence[Episode]) -> list[torch.Tensor]:
        """(M, R, H) of each episode."""
        import torch

        members = []
        for member, folder in enumerate(self._learned):
            if member != self._held:
                self._model.load(folder)
                self._held = member
            members.append(self._model.scores(episodes, self._pack_tokens).cpu())
        return list(torch.stack(members).split([one.readings for one in episodes], dim=1))


def _shape(card: Card) -> str:
    """What the members of an ensemble share."""
    return f"a {card.kind} with the heads {', '.join(card.heads)} and lora {card.model['lora']}"


def _folders(path: str | list[str]) -> list[Path]:
    folders = [Path(one).expanduser() for one in ([path] if isinstance(path, str) else path)]
    if not folders:
        raise SpecError([Problem("reward.path", "an empty list; expected the folder of a reward model")])
    return folders


def _unscored(trajectory: Trajectory, error: BoundaryError) -> Score:
    return Score(trajectory.id, None, failure=Failure(error.boundary, type(error).__name__, str(error)))
