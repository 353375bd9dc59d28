"""Requests of an experiment's stages: the part of the spec that each stage reads, its inputs and its seed.

Only stages that sample get a seed, so runs with different seeds share the artifacts of the other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact
from components.data.spec import DataSpec
from components.errors import SpecError
from components.inference.spec import EmbeddedSpec
from components.rewards.llm.spec import JudgeModel, asks_policy
from components.rollout.collect_spec import WAYS, CollectSpec
from components.specs import Target
from flows.experiment import data as own_data
from flows.experiment.checks import role_adapters
from flows.experiment.sections import WarmupTeacherSpec
from flows.experiment.spec import ExperimentSpec
from flows.stages import STAGES
from flows.stages.anchors import ROUND, AnchorSpec
from flows.stages.base import Request, StageSpec
from flows.stages.calibrate import CalibrateStage
from flows.stages.certify import CertifyStage, installed_versions
from flows.stages.collect import SPLIT, CollectStage
from flows.stages.deploy import DeployStage
from flows.stages.evaluate import REFERENCE, EvaluateStage
from flows.stages.filter import FilterStage
from flows.stages.generate import TASKS, GenerateStage
from flows.stages.import_data import ImportStage
from flows.stages.judge import JudgeStage, models_by_input
from flows.stages.reward_model import RewardModelStage
from flows.stages.train import TrainStage

REWARD_SEED = 1_000_000_007
"""Offset of the seed for the episodes of reward models, for each model of an ensemble."""
_ONCE = {name: CollectSpec.model_fields[name].default for name in WAYS}
"""Settings of `collect` with which the actor alone plays each episode once."""


class Requests:
    """Factory of the requests of one experiment's stages."""

    def __init__(self, spec: ExperimentSpec, tasks: Artifact | None = None):
        self.spec = spec
        self.tasks = tasks
        """Tasks that the flow generated for the stages that play episodes; None: those of the environment."""
        concurrency = max(spec.collect.concurrency * (1 + spec.collect.overlap), spec.evaluate.concurrency)
        lora = spec.model.lora
        self.inference = spec.inference.sized(0 if lora is None else lora.rank, concurrency)
        """Engine, prepared for the rank of the adapter and the number of concurrent episodes."""
        self._algorithm = spec.corrected_algorithm()

    def certify(self, *, scenarios: int = 4, samples: int = 1) -> Request:
        """Return the request for the certificate of model, engine and trainer. It has no seed, so that runs with
        different seeds share it. scenarios: number of prompts. samples: completions of each. Raises SpecError for a
        policy with an adapter for each role."""
        lora = self.spec.model.lora
        if lora is not None and lora.roles is not None:
            raise SpecError([role_adapters.certificate(lora.roles)])
        collect = self.spec.collect
        stage = CertifyStage(
            model=self.spec.model,
            environment=self.spec.required_environment,
            agent=self.spec.agent,
            inference=self.inference,
            temperature=collect.temperature,
            top_p=collect.top_p,
            top_k=collect.top_k,
            min_p=collect.min_p,
            scenarios=scenarios,
            samples=samples,
            timeout=collect.timeout,
            versions=installed_versions(),
        )
        return self.request("certify", stage, {})

    def evaluate(
        self,
        policy: Artifact | None,
        *,
        actor: Literal["policy", "solver", "random"] = "policy",
        samples: int | None = None,
        reference: Artifact | None = None,
    ) -> Request:
        """Return the request for a held-out evaluation. policy: checkpoint; None for the base model. samples: episodes
        per scenario; None: `evaluate.samples`. reference: evaluation from which the difference is decided with
        `evaluate.stop=decided`; None: all scenarios are played."""
        stops = self.spec.evaluate.stop == "decided" and reference is not None
        seedless = actor == "solver" or (actor == "policy" and self.spec.evaluate.temperature == 0)
        evaluate = self.spec.evaluate
        stage = EvaluateStage(
            model=self.spec.model.base(),
            environment=self.spec.required_environment,
            reward=evaluate.reward or self.spec.reward,
            agent=self.spec.agent,
            evaluate=evaluate if stops else evaluate.to_the_end(),
            inference=self.inference,
            judge=self.spec.judge,
            actor=actor,
            samples=evaluate.samples if samples is None else samples,
        )
        inputs = {"policy": policy, REFERENCE: reference if stops else None}
        return self.request("evaluate", stage, inputs, seed=0 if seedless else self.spec.seed)

    def demonstrate(self) -> Request:
        """Return the request for the demonstrations of the warmup, by a teacher or the environment's solver."""
        assert self.spec.warmup is not None
        teacher = self.spec.warmup.teacher
        if teacher is None:
            collect = self._played(scenarios=self.spec.warmup.demonstrations, group_size=1)
            return self.request("collect", self._collecting("solver", collect), {}, seed=self.spec.seed)
        collect = self._played(
            scenarios=self.spec.warmup.demonstrations,
            group_size=teacher.samples,
            temperature=teacher.temperature,
            top_p=teacher.top_p,
            top_k=0,
            min_p=0.0,
            **_ONCE,
        )
        stage = self._collecting("teacher", collect, teacher=teacher)
        return self.request("collect", stage, {}, seed=self.spec.seed)

    def collect(
        self,
        policy: Artifact | None,
        number: int,
        further: tuple[int, int] | None = None,
        paused: Artifact | None = None,
    ) -> Request:
        """Return the request for the episodes of a round. number: of the round, from 1.

        paused: earlier collection whose paused episodes continue. further: for a refill, the number of other scenarios
        collected since the round, and the number to collect."""
        collect = self.spec.collect
        if further is not None:
            since, count = further
            further, collect = (collect.scenarios, since), self._played(scenarios=count)
        ahead = self._judged() if self.spec.judge.ahead else None
        stage = self._collecting("policy", collect, self._collected(), round=number - 1, further=further, ahead=ahead)
        return self.request("collect", stage, {"policy": policy, "paused": paused}, seed=self.spec.seed)

    def collect_for_reward(self, policy: Artifact | None, number: int = 0) -> Request:
        """Return the request for the episodes that reward models learn from; their seed differs from that of the
        rounds.

        number: of the retraining, from 1; 0 before the rounds. Each continues in the order of scenarios where the one
        before ended."""
        assert self.spec.reward_model is not None
        part = self.spec.reward_model
        collect = self._played(
            scenarios=part.scenarios,
            group_size=part.group_size,
            continuations=part.continuations,
            reflection=None,
            teacher=None,
            partial=None,
        )
        stage = self._collecting("policy", collect, self._collected(), round=number)
        return self.request("collect", stage, {"policy": policy}, seed=self.spec.seed + REWARD_SEED)

    def collect_heldout(self, actor: Literal["policy", "solver"], scenarios: int) -> Request:
        """Return the request for held-out episodes of the base model, or for the environment's own solutions."""
        size = self.spec.calibrate.group_size if actor == "policy" else 1
        collect = self._played(scenarios=scenarios, group_size=size, **_ONCE)
        stage = self._collecting(actor, collect, split=self.spec.evaluate.split)
        return self.request("collect", stage, {}, seed=self.spec.seed)

    def calibrate(self, episodes: Mapping[str, Artifact], people: Mapping[str, float] | None = None) -> Request:
        """Return the request for a calibration of the reward.

        episodes: collections and evaluations, by the prefix of their episodes' ids. people: human scores as ground
        truth, in place of `calibrate.truth`."""
        stage = CalibrateStage(
            reward=self.spec.reward,
            truth=self.spec.calibrate.truth,
            people=None if people is None else dict(people),
            repeats=self.spec.calibrate.repeats,
            model=self.spec.model.base(),
            judge=self.spec.judge,
            inference=self.inference,
        )
        return self.request("calibrate", stage, dict(episodes), seed=self.spec.seed)

    def train_reward(
        self, collections: Sequence[Mapping[str, Artifact]], *, start: Artifact | None, member: int
    ) -> Request:
        """Return the request for the training of a reward model.

        collections: trajectories and scores, for adversarial examples also `predicted`, newest first. start: a policy,
        or the reward model to retrain. member: number of the reward model in the ensemble, from 1."""
        assert self.spec.reward_model is not None
        newest, *earlier = collections
        inputs = {**newest, "start": start}
        for ago, collection in enumerate(earlier, 1):
            inputs |= {f"{name}-{ago}": artifact for name, artifact in collection.items()}
        stage = RewardModelStage(
            model=self.spec.model,
            algorithm=self.spec.reward_model.algorithm,
            save_every=self.spec.compute.save_every,
        )
        return self.request("reward_model", stage, inputs, seed=self.spec.seed + REWARD_SEED * (member - 1))

    def judge(
        self,
        trajectories: Artifact,
        policy: Artifact | None = None,
        reward_models: Sequence[Artifact] = (),
        anchors: AnchorSpec | None = None,
    ) -> Request:
        """Return the request for the scores of episodes. policy: the policy that produced them, for a reward that
        queries it."""
        stage = self._judged(anchors)
        queried: dict[str, Artifact | None] = {}
        if asks_policy(self.spec.reward):
            stage, queried = stage.model_copy(update={"inference": self.inference}), {"policy": policy}
        if reward_models:
            assert self.spec.reward_model is not None
            stage = stage.model_copy(update={"learned": self.spec.reward_model.learned()})
        return self.request("judge", stage, {"trajectories": trajectories, **queried, **models_by_input(reward_models)})

    def judge_anchors(
        self,
        anchors: Artifact,
        number: int,
        judged: Artifact,
        compared: Mapping[str, Artifact],
        policy: Artifact | None = None,
    ) -> Request:
        """Return the request for another judgement of the anchors, by the declared reward.

        anchors: collection whose sample is judged. number: of the judgement. judged: episodes of the round; as an input
        they have the anchors judged again whenever these are. compared: scores of the first judgement and of its
        control, by input name. policy: as in `judge`."""
        sample = AnchorSpec(groups=self.spec.guards.anchors, number=number)
        request = self.judge(anchors, policy, anchors=sample)
        inputs = dict(compared) if judged is anchors else {**compared, ROUND: judged}
        keys = {name: artifact.key for name, artifact in inputs.items()}
        return replace(request, inputs=request.inputs | keys)

    def filter(self, trajectories: Artifact, scores: Artifact, *, warmup: bool = False) -> Request:
        """Return the request for the selection of episodes to train on."""
        part = self.spec.warmup if warmup else self.spec
        assert part is not None
        stage = FilterStage(filter=part.filter)
        return self.request("filter", stage, {"trajectories": trajectories, "scores": scores})

    def generate_tasks(self, author: JudgeModel, *, count: int, about: str, difficulties: Sequence[int]) -> Request:
        """Return the request for tasks for the tools of the environment's MCP server. It has no seed, so that runs with
        different seeds play the same tasks."""
        stage = GenerateStage(
            environment=self.spec.required_environment,
            author=author,
            count=count,
            about=about,
            difficulties=list(difficulties),
            model=self.spec.model.base(),
            judge=self.spec.judge,
        )
        return self.request("generate", stage, {})

    def import_data(self, data: DataSpec | None = None, section: str = "data") -> Request:
        """Return the request for the import of data of one's own, by default that of `data`, with scores and a
        selection. section: key of the spec, for messages. Raises SpecError if the data cannot be read."""
        source = own_data.resolve(data or self.spec.data, section)
        stage = ImportStage(
            section=section,
            data=source.spec,
            content=source.content,
            heldout_content=source.heldout_content,
            model=self.spec.model.base(),
            tools=own_data.tools_of_rows(source.spec, self.spec.environment),
        )
        return self.request("import", stage, {})

    def train_once(
        self, inputs: Mapping[str, Artifact], *, algorithm: AlgorithmSpec, start: Artifact | None
    ) -> Request:
        """Return the request for a training outside of the rounds.

        inputs: trajectories, scores and selection by input name. start: policy to train further."""
        request: dict[str, Artifact | None] = {**inputs, "start": start}
        if algorithm.reference_is_start:
            request["reference"] = start
        return self.request("train", self._training(algorithm), request, seed=self.spec.seed)

    def train(
        self,
        fed: Mapping[str, Artifact],
        number: int,
        *,
        start: Artifact | None,
        reference: Artifact | None,
        earlier: Sequence[Mapping[str, Artifact]] = (),
        anchor: Artifact | None = None,
        anchored: Sequence[Mapping[str, Artifact]] = (),
        roles: Sequence[str] | None = None,
    ) -> Request:
        """Return the request for the training of a round.

        fed: trajectories, scores and selection by input name. number: of the round. earlier: inputs of earlier rounds,
        latest first. anchor: checkpoint at the start of the rounds. anchored: data that the anchor was trained on.
        roles: agents whose histories are trained; None: all."""
        inputs: dict[str, Artifact | None] = {**fed, "start": start}
        if self.spec.algorithm.reference_is_start:
            inputs["reference"] = reference
        replay = self.spec.replay if earlier else None
        if replay is not None:
            for ago, data in enumerate(earlier[: replay.rounds], 1):
                inputs |= {f"{name}-{ago}": artifact for name, artifact in data.items()}
        if self.spec.ewc is not None:
            inputs["anchor"] = anchor
            for ago, data in enumerate(anchored, 1):
                inputs |= {f"anchored-{name}-{ago}": artifact for name, artifact in data.items()}
        stage = self._training(
            self._algorithm,
            rounds=(number, self.spec.rounds),
            roles=None if roles is None else list(roles),
            replay=replay,
            ewc=self.spec.ewc,
        )
        return self.request("train", stage, inputs, seed=self.spec.seed)

    def deploy(
        self, policy: Artifact, step: int, evaluations: Mapping[str, Artifact], heldout: Mapping[str, Artifact]
    ) -> Request:
        """Return the request for the export of a policy. step: round after which the policy was trained. heldout:
        measurements of held-out rows by the labels of their stages."""
        resolved = self.spec.model_copy(update={"inference": self.inference, "algorithm": self._algorithm})
        resolved = resolved.resolve_dtypes(resolved, "train")
        stage = DeployStage(
            name=self.spec.deploy.name or self.spec.name,
            model=self.spec.model,
            agent=self.spec.agent,
            deploy=self.spec.deploy,
            step=step,
            experiment=resolved.exported(),
        )
        inputs = {"policy": policy, **{f"evaluation_{name}": artifact for name, artifact in evaluations.items()}}
        if not evaluations:
            inputs |= heldout
        return self.request("deploy", stage, inputs)

    def _collected(self) -> Target:
        """Return the environment of the rounds; with self-play, the agent plays both sides."""
        environment = self.spec.required_environment
        return environment.with_arguments(opponent="agent") if self.spec.collect.player.both_sides else environment

    def _played(self, **changes: Any) -> CollectSpec:
        """Return `collect` with other values of these fields."""
        return self.spec.collect.model_copy(update=changes)

    def _collecting(
        self,
        actor: Literal["policy", "solver", "teacher"],
        collect: CollectSpec,
        environment: Target | None = None,
        *,
        teacher: WarmupTeacherSpec | None = None,
        round: int = 0,
        further: tuple[int, int] | None = None,
        ahead: JudgeStage | None = None,
        split: str = SPLIT,
    ) -> CollectStage:
        """Return the stage that collects episodes. environment: None: that of the experiment, as for evaluations."""
        engine = EmbeddedSpec() if actor == "solver" else teacher.inference if teacher else self.inference
        return CollectStage(
            model=self.spec.model.base(),
            environment=environment or self.spec.required_environment,
            agent=self.spec.agent,
            collect=collect,
            inference=engine,
            actor=actor,
            teacher=teacher.model if teacher else None,
            round=round,
            further=further,
            ahead=ahead,
            split=split,
        )

    def _judged(self, anchors: AnchorSpec | None = None) -> JudgeStage:
        return JudgeStage(reward=self.spec.reward, judge=self.spec.judge, model=self.spec.model.base(), anchors=anchors)

    def _training(self, algorithm: AlgorithmSpec, **further: Any) -> TrainStage:
        return TrainStage(
            model=self.spec.model, algorithm=algorithm, save_every=self.spec.compute.save_every, **further
        )

    def request(self, stage: str, spec: StageSpec, inputs: Mapping[str, Artifact | None], seed: int = 0) -> Request:
        """Return the request for a stage. inputs: artifacts by input name; None: no input. Raises ResourceError if
        `dtype: auto` of a model cannot be resolved for the place of the stage."""
        inputs = {**inputs, TASKS: self.tasks} if TASKS in STAGES[stage].inputs else inputs
        keys = {name: artifact.key for name, artifact in inputs.items() if artifact is not None}
        part = self.spec.resolve_dtypes(spec, stage).model_dump(mode="json", by_alias=True)
        return Request(stage, part, keys, seed, tuple(self.spec.allow))
