"""Learned reward: the scores of one or several reward models (`components.algorithms.reward_models.model`).

    score = min(cap, combine over models (Σ over heads of weight_h · s_h))      of an episode, or of each turn t

    R     = task_weight · R_task + weight · score                               a model of whole episodes
    R     = task_weight · R_task + weight · Σ_t score_t                         a process model

s_h are the heads' scores; with `normalise` they are standardized with mean and standard deviation on the training data.
A policy trained on a model's scores exploits the model's errors. Several models err in different places, so the lowest
of their scores, or their mean minus a multiple of their standard deviation, is harder to exploit (arXiv:2310.02743).

The step rewards of a process model add up to R: weight · score_t for turn t; the task's part is added at the last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from components.errors import ArtifactError, BoundaryError, JudgeError, Problem, ResourceError, SpecError
from components.models.spec import ModelSpec
from components.rewards.judge import judge, reject_running_statistics
from components.rewards.protocol import ModelReward, RewardResources
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory

if TYPE_CHECKING:
    import torch

    from components.algorithms.reward_models.card import Card
    from components.algorithms.reward_models.data import RewardEpisode
    from components.algorithms.reward_models.model import RewardModel

PROCESS = "process_reward_model"


@registered("reward.learned")
class Learned:
    """Score of trained reward models.

    Args:
        path: Folder of a reward model; several for an ensemble.
        task: Reward R_task, which is added; null adds none.
        task_weight: Weight of `task`.
        weight: Weight of the learned reward.
        normalise: Standardize each head's scores with their mean and standard deviation on the training data.
        combine: Combination of several models: the mean, the lowest (`min`), or the mean minus `deviations` standard
            deviations (`bound`).
        deviations: Number of standard deviations for combine=bound; 0 or more.
        cap: Upper bound of a score, per episode, or per turn for a process model; null is no limit.
        pack_tokens: Maximum tokens of one forward pass; bounds memory.

    The components of a Score are the heads (mean over the models; for a process model the sum over the turns; before
    weights and cap), `task`, and with several models `spread`, the standard deviation of their scores. An episode that
    is too long for the model, or has no tokens or turns to score, is unscored with that reason.
    """

    def __init__(
        self,
        path: Annotated[str | list[str], FILES],
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
        """Return the arguments for stage keys: the content digests of the folders in place of their paths. Raises
        ArtifactError if one is not a reward model."""
        from components.algorithms.reward_models.card import content_digest

        return {**arguments, "path": [content_digest(folder) for folder in _folders(arguments["path"])]}

    def use(self, resources: RewardResources) -> None:
        """Load the reward models. Raises ArtifactError if one has another base model or is damaged, or if the models of
        an ensemble are incompatible."""
        from components.algorithms.reward_models.card import content_digest

        recipe = [content_digest(folder) for folder in self.folders], self.pack_tokens, resources.model.model_dump()
        model = resources.model
        self._scorer = resources.keep(
            "reward", recipe, lambda: _Scorer(self.folders, resources.cache, model, self.pack_tokens)
        )
        if isinstance(self.task, ModelReward):
            self.task.use(resources)

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory. Raises ResourceError before `use`."""
        if self._scorer is None:
            raise ResourceError("the learned reward has no model yet: call use(resources) first")
        tasks = (
            list(judge(self.task, group))
            if self.task is not None
            else [Score(trajectory.id, 0.0) for trajectory in group]
        )
        episodes, reasons = self._scorer.readable(group)
        scores = iter(self._scorer.scores(list(episodes.values())))
        return [
            self._score(trajectory, task, next(scores))
            if trajectory.id in episodes
            else _unscored(trajectory, JudgeError(reasons[trajectory.id]))
            for trajectory, task in zip(group, tasks, strict=True)
        ]

    def _score(self, trajectory: Trajectory, task: Score, score_MRH: torch.Tensor) -> Score:
        """Return the Score of one trajectory. score_MRH: M models, R readings, H heads."""
        assert self._scorer is not None
        if task.reward is None:
            return Score(trajectory.id, None, explanation=task.explanation, cost=task.cost, failure=task.failure)
        cards = self._scorer.cards
        weighted_MR = score_MRH.new_zeros(score_MRH.shape[:2])
        for member, card in enumerate(cards):
            for index, head in enumerate(card.heads.values()):
                score_R = score_MRH[member, :, index]
                if self.normalise:
                    score_R = (score_R - head.mean) / head.std if head.std else score_R - head.mean
                weighted_MR[member] += head.weight * score_R
        combined_R = combined(weighted_MR, self.combine, self.deviations)
        if self.cap is not None:
            combined_R = combined_R.clamp(max=self.cap)
        task_part = self.task_weight * task.reward if self.task is not None else 0.0
        parts = dict(zip(cards[0].heads, score_MRH.sum(1).mean(0).tolist(), strict=True))
        if self.task is not None:
            parts["task"] = task.reward
        if len(cards) > 1:
            parts["spread"] = weighted_MR.sum(1).std(correction=0).item()
        steps = (self.weight * combined_R).tolist()
        steps[-1] += task_part
        by_turn = cards[0].kind == PROCESS
        return Score(
            trajectory.id, sum(steps), parts, steps if by_turn else [], explanation=task.explanation, cost=task.cost
        )


def combined(score_MR: torch.Tensor, method: Literal["mean", "min", "bound"], deviations: float) -> torch.Tensor:
    """Return (R,) from the scores of M models: their mean, their minimum, or mean - deviations · std (of the
    population)."""
    if method == "min":
        return score_MR.min(0).values
    mean_R = score_MR.mean(0)
    return mean_R - deviations * score_MR.std(0, correction=0) if method == "bound" else mean_R


class _Scorer:
    """Ensemble of reward models with one base model. The base is in memory once; the members' trained weights and heads
    are loaded in turn."""

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
            if (shape := _shape(card)) != (first := _shape(self.cards[0])):
                raise ArtifactError(f"{folder} and {folders[0]} make no ensemble: {shape} is not {first}")
        self._model: RewardModel = load(folders[0], base_dir, model)[0]
        self._weights = [folder_of(folder) for folder in folders]
        self._loaded = 0
        self._model.model.eval()
        self._chat = ChatFormat(load_tokenizer(base_dir))
        self._pack_tokens = pack_tokens
        self._max_length = model.max_length

    def readable(self, group: Sequence[Trajectory]) -> tuple[dict[str, RewardEpisode], dict[str, str]]:
        """Return the readable episodes by trajectory id, and the reasons why the others cannot be read."""
        from components.algorithms.reward_models.data import episode

        episodes: dict[str, RewardEpisode] = {}
        reasons: dict[str, str] = {}
        for trajectory in group:
            try:
                encoded = episode(self._chat, trajectory, turns=self.cards[0].kind == PROCESS)
            except BoundaryError as error:  # a chat template may reject a demonstration
                reasons[trajectory.id] = str(error)
                continue
            if not encoded.readings:
                reasons[trajectory.id] = "the episode has nothing that the reward model reads: no tokens, or no turn"
            elif encoded.longest > self._max_length:
                reasons[trajectory.id] = (
                    f"its {encoded.longest} tokens are more than model.max_length={self._max_length}"
                )
            else:
                episodes[trajectory.id] = encoded
        return episodes, reasons

    def scores(self, episodes: Sequence[RewardEpisode]) -> list[torch.Tensor]:
        """Return the scores (M, R, H) of each episode."""
        import torch

        members = []
        for member, folder in enumerate(self._weights):
            if member != self._loaded:
                self._model.load(folder)
                self._loaded = member
            members.append(self._model.scores(episodes, self._pack_tokens).cpu())
        return list(torch.stack(members).split([item.readings for item in episodes], dim=1))


def _shape(card: Card) -> str:
    """Return what the members of an ensemble must have in common."""
    return f"a {card.kind} with the heads {', '.join(card.heads)} and lora {card.model['lora']}"


def _folders(path: str | list[str]) -> list[Path]:
    folders = [Path(folder).expanduser() for folder in ([path] if isinstance(path, str) else path)]
    if not folders:
        raise SpecError([Problem("reward.path", "an empty list; expected the folder of a reward model")])
    return folders


def _unscored(trajectory: Trajectory, error: BoundaryError) -> Score:
    return Score(trajectory.id, None, failure=Failure.of(error, error.boundary))
