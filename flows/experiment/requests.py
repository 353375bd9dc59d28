"""Requests of an experiment's stages: the part of the spec that each stage reads, its inputs and its seed.

Only stages that sample get a seed, so runs with different seeds share the artifacts of the other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal, Protocol

from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact
from components.errors import SpecError
from components.evaluation.spec import SEQUENTIAL, EvaluateSpec
from components.rewards.llm.spec import JudgeModel, asks_policy
from components.rollout.spec import WAYS, CollectSpec
from flows.experiment.checks import role_adapters
from flows.experiment.correction import corrected_algorithm
from flows.experiment.data import resolve as resolve_data
from flows.experiment.feedback import FeedbackData
from flows.experiment.spec import ExperimentSpec
from flows.stages import STAGES
from flows.stages.anchors import ROUND
from flows.stages.base import Request
from flows.stages.certify import SAMPLING
from flows.stages.evaluate import REFERENCE
from flows.stages.generate import TASKS
from flows.stages.judge import reward_models as name_models

CERTIFIED_PACKAGES = ("peft", "torch", "transformers")
"""Packages whose versions are part of a certificate's key."""
HELDOUT_PROMPTS = 8
"""Number of held-out prompts that the policy answers before and after a training on imported data."""
REWARD_SEED = 1_000_000_007
"""Offset of the seed for the episodes of reward models; each further model of an ensemble adds it once more."""


class StageRunner(Protocol):
    """Function that runs one stage and returns its artifact."""

    def __call__(self, label: str, step: int, request: Request) -> Artifact: ...


class Requests:
    """Factory of the requests of one experiment's stages."""

    def __init__(self, spec: ExperimentSpec, tasks: Artifact | None = None):
        self.spec = spec
        self.tasks = tasks
        """Tasks that the flow generated, which the stages that play episodes read; None: the environment has its
        own."""
        self._data = spec.model_dump(mode="json", by_alias=True)
        if spec.model.lora is not None:
            self._data["inference"] = spec.inference.for_rank(spec.model.lora.rank).model_dump(mode="json")
        self._data["algorithm"] = corrected_algorithm(spec).model_dump(mode="json")

    def certify(self, *, scenarios: int = 4, samples: int = 1) -> Request:
        """Return the request for the certificate of model, engine and trainer. It has no seed, so that runs with
        different seeds share it. scenarios: number of prompts. samples: completions of each. Raises SpecError for a
        policy with an adapter for each role."""
        lora = self.spec.model.lora
        if lora is not None and lora.roles is not None:
            raise SpecError([role_adapters.certificate(lora.roles)])
        part = {**self._parts("model", "environment", "agent", "inference"), "scenarios": scenarios, "samples": samples}
        part |= {name: self._data["collect"][name] for name in SAMPLING}
        part["timeout"] = self._data["collect"]["timeout"]
        part["versions"] = {package: version(package) for package in CERTIFIED_PACKAGES}
        return self.request("certify", part, {})

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
        part = {
            "model": self.spec.model.base(),
            **self._parts("environment", "reward", "agent", "evaluate", "inference", "judge"),
        }
        if self.spec.evaluate.reward is not None:
            part["reward"] = self._data["evaluate"]["reward"]
        part |= {"actor": actor, "samples": self.spec.evaluate.samples if samples is None else samples}
        if not stops:
            whole = {name: EvaluateSpec.model_fields[name].default for name in SEQUENTIAL}
            part["evaluate"] = self._data["evaluate"] | whole
        inputs = {"policy": policy, REFERENCE: reference if stops else None}
        return self.request("evaluate", part, inputs, seed=0 if seedless else self.spec.seed)

    def demonstrate(self) -> Request:
        """Return the request for the demonstrations of the warmup, by a teacher or the environment's solver."""
        assert self.spec.warmup is not None
        collect = {**self._data["collect"], "scenarios": self.spec.warmup.demonstrations, "group_size": 1}
        if (teacher := self.spec.warmup.teacher) is not None:
            collect |= {"group_size": teacher.samples, "temperature": teacher.temperature, "top_p": teacher.top_p}
            data = self._data["warmup"]["teacher"]
            part = {"model": self.spec.model.base(), **self._parts("environment", "agent")}
            once = CollectSpec().model_dump(mode="json", include=set(WAYS))
            part |= {"collect": {**collect, **once, "top_k": 0, "min_p": 0.0}, "inference": data["inference"]}
            part |= {"actor": "teacher", "teacher": data["model"], "round": 0}
            return self.request("collect", part, {}, seed=self.spec.seed)
        part = {"model": self.spec.model.base(), **self._parts("environment", "agent"), "collect": collect}
        return self.request("collect", {**part, "actor": "solver", "round": 0}, {}, seed=self.spec.seed)

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
        part = {"model": self.spec.model.base(), **self._parts("agent", "collect", "inference")}
        part |= {"environment": self._collected(), "actor": "policy", "round": number - 1}
        if further is not None:
            since, count = further
            part["further"] = (part["collect"]["scenarios"], since)
            part["collect"] = {**part["collect"], "scenarios": count}
        if self.spec.judge.ahead:
            part["ahead"] = {**self._parts("reward", "judge"), "model": self.spec.model.base()}
        return self.request("collect", part, {"policy": policy, "paused": paused}, seed=self.spec.seed)

    def collect_for_reward(self, policy: Artifact | None, number: int = 0) -> Request:
        """Return the request for the episodes that reward models learn from; their seed differs from that of the
        rounds.

        number: of the retraining, from 1; 0 before the rounds. Each continues in the order of scenarios where the one
        before ended."""
        assert self.spec.reward_model is not None
        own = {name: self._data["reward_model"][name] for name in ("scenarios", "group_size", "continuations")}
        part = {"model": self.spec.model.base(), **self._parts("agent", "inference")}
        part |= {"environment": self._collected(), "actor": "policy", "round": number}
        part |= {"collect": {**self._data["collect"], "reflection": None, "teacher": None, "partial": None, **own}}
        return self.request("collect", part, {"policy": policy}, seed=self.spec.seed + REWARD_SEED)

    def collect_heldout(self, actor: Literal["policy", "solver"], scenarios: int) -> Request:
        """Return the request for held-out episodes of the base model, or for the environment's own solutions."""
        part = {"model": self.spec.model.base(), **self._parts("environment", "agent", "inference")}
        once = CollectSpec().model_dump(mode="json", include=set(WAYS))
        size = self.spec.calibrate.group_size if actor == "policy" else 1
        part |= {"actor": actor, "round": 0, "split": self.spec.evaluate.split}
        part |= {"collect": {**self._data["collect"], **once, "scenarios": scenarios, "group_size": size}}
        return self.request("collect", part, {}, seed=self.spec.seed)

    def calibrate(self, episodes: Mapping[str, Artifact], people: Mapping[str, float] | None = None) -> Request:
        """Return the request for a calibration of the reward.

        episodes: collections and evaluations, by the prefix of their episodes' ids. people: human scores as ground
        truth, in place of `calibrate.truth`."""
        part = {**self._parts("reward", "judge", "inference"), "model": self.spec.model.base()}
        part |= {name: self._data["calibrate"][name] for name in ("truth", "repeats")}
        return self.request("calibrate", part | {"people": people}, dict(episodes), seed=self.spec.seed)

    def train_reward(
        self, collections: Sequence[Mapping[str, Artifact]], *, start: Artifact | None, member: int
    ) -> Request:
        """Return the request for the training of a reward model.

        collections: trajectories and scores, newest first. start: a policy, or the reward model to retrain. member:
        number of the reward model in the ensemble, from 1."""
        assert self.spec.reward_model is not None
        newest, *earlier = collections
        inputs = {**newest, "start": start}
        if self.spec.reward_model.keep == "all":
            for ago, collection in enumerate(earlier, 1):
                inputs |= {f"{name}-{ago}": artifact for name, artifact in collection.items()}
        part = self._training(self._data["reward_model"]["algorithm"])
        return self.request("reward_model", part, inputs, seed=self.spec.seed + REWARD_SEED * (member - 1))

    def judge(
        self, trajectories: Artifact, policy: Artifact | None = None, reward_models: Sequence[Artifact] = ()
    ) -> Request:
        """Return the request for the scores of episodes. policy: the policy that produced them, for a reward that
        queries it."""
        part = {**self._parts("reward", "judge"), "model": self.spec.model.base()}
        queried: dict[str, Artifact | None] = {}
        if asks_policy(self.spec.reward):
            part["inference"], queried = self._data["inference"], {"policy": policy}
        if reward_models:
            assert self.spec.reward_model is not None
            part["learned"] = self.spec.reward_model.learned()
        return self.request("judge", part, {"trajectories": trajectories, **queried, **name_models(reward_models)})

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
        request = self.judge(anchors, policy)
        part = request.spec | {"anchors": {"groups": self.spec.guards.anchors, "number": number}}
        inputs = dict(compared) if judged is anchors else {**compared, ROUND: judged}
        keys = {name: artifact.key for name, artifact in inputs.items()}
        return replace(request, spec=part, inputs=request.inputs | keys)

    def filter(self, trajectories: Artifact, scores: Artifact, *, warmup: bool = False) -> Request:
        """Return the request for the selection of episodes to train on."""
        part = self._data["warmup"] if warmup else self._data
        return self.request("filter", {"filter": part["filter"]}, {"trajectories": trajectories, "scores": scores})

    def generate_tasks(self, author: JudgeModel, *, count: int, about: str, difficulties: Sequence[int]) -> Request:
        """Return the request for tasks for the tools of the environment's MCP server. It has no seed, so that runs with
        different seeds play the same tasks."""
        part = {"author": author.model_dump(mode="json"), "count": count, "about": about}
        part |= {"difficulties": list(difficulties), "model": self.spec.model.base()}
        return self.request("generate", {**part, **self._parts("environment", "judge")}, {})

    def import_data(self) -> Request:
        """Return the request for the import of data of one's own. Its artifact holds trajectories, scores and
        selection. Raises SpecError if the data cannot be read."""
        source = resolve_data(self.spec.data)
        part: dict[str, Any] = {"data": source.spec.model_dump(mode="json"), "model": self.spec.model.base()}
        part |= {"content": source.content, "heldout_content": source.heldout_content}
        return self.request("import", part, {})

    def validate(self, data: Artifact, policy: Artifact | None) -> Request:
        """Return the request for the likelihood of the held-out rows of an import. policy: checkpoint; None for the
        base model."""
        part = {**self._parts("model"), "pack_tokens": self.spec.algorithm.pack_tokens}
        return self.request("validate", part, {"data": data, "policy": policy})

    def sample(self, data: Artifact, policy: Artifact | None) -> Request:
        """Return the request for a policy's answers to held-out prompts of an import. policy: checkpoint; None for the
        base model."""
        part = {"model": self.spec.model.base(), **self._parts("inference"), "max_tokens": self.spec.agent.max_tokens}
        return self.request("sample", part | {"prompts": HELDOUT_PROMPTS}, {"data": data, "policy": policy})

    def feedback(self, data: FeedbackData) -> Request:
        """Return the request for the episodes that the answers refer to."""
        assert self.spec.feedback is not None
        part = {"path": data.path, "answers": data.answers, "learns": list(self.spec.feedback.learns)}
        return self.request("feedback", part, dict(data.artifacts))

    def train_once(
        self, inputs: Mapping[str, Artifact], *, algorithm: AlgorithmSpec, start: Artifact | None
    ) -> Request:
        """Return the request for a training outside of the rounds.

        inputs: trajectories, scores and selection by input name. start: policy to train further."""
        request: dict[str, Artifact | None] = {**inputs, "start": start}
        if algorithm.reference_is_start:
            request["reference"] = start
        return self.request("train", self._training(algorithm.model_dump(mode="json")), request, seed=self.spec.seed)

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
        part = self._training(self._data["algorithm"]) | {"rounds": [number, self.spec.rounds]}
        if roles is not None:
            part["roles"] = list(roles)
        if self.spec.replay is not None and earlier:
            part["replay"] = self._data["replay"]
            for ago, data in enumerate(earlier[: self.spec.replay.rounds], 1):
                inputs |= {f"{name}-{ago}": artifact for name, artifact in data.items()}
        if self.spec.ewc is not None:
            part["ewc"] = self._data["ewc"]
            inputs["anchor"] = anchor
            for ago, data in enumerate(anchored, 1):
                inputs |= {f"anchored-{name}-{ago}": artifact for name, artifact in data.items()}
        return self.request("train", part, inputs, seed=self.spec.seed)

    def deploy(
        self, policy: Artifact, step: int, evaluations: Mapping[str, Artifact], heldout: Mapping[str, Artifact]
    ) -> Request:
        """Return the request for the export of a policy. step: round after which the policy was trained. heldout:
        measurements of held-out rows by the labels of their stages."""
        # The export depends on the policy, which is an input. It does not depend on the rules that ended the rounds, on
        # the place, or on the deployment of the export, so these keys are not part of the stage key.
        irrelevant = ("certify", "early_stopping", "guards", "seeds", "store", "calibrate", "serve")
        experiment = {name: value for name, value in self._data.items() if name not in irrelevant}
        if self.spec.collect.partial is None:
            experiment["collect"] = {name: value for name, value in self._data["collect"].items() if name != "partial"}
        evaluate = EvaluateSpec.declared(self._data["evaluate"])
        experiment["evaluate"] = {name: value for name, value in evaluate.items() if name != "every"}
        if self.spec.evaluate.samples == 1:
            del experiment["evaluate"]["samples"]
        if self.spec.data.is_set:
            experiment["data"] = self.spec.data.meaning()  # its content is that of the policy
        else:
            del experiment["data"]
        experiment["judge"] = {name: value for name, value in self._data["judge"].items() if name != "ahead"}
        unread = ("approve", "approve_timeout", "margin", "target", "canary")
        experiment["deploy"] = {name: value for name, value in self._data["deploy"].items() if name not in unread}
        part = {
            "name": self.spec.deploy.name or self.spec.name,
            **self._parts("model", "agent", "deploy"),
            "step": step,
            "experiment": experiment,
        }
        inputs = {"policy": policy, **{f"evaluation_{name}": artifact for name, artifact in evaluations.items()}}
        if not evaluations:
            inputs |= heldout
        return self.request("deploy", part, inputs)

    def _collected(self) -> dict[str, Any]:
        """Return the environment of the rounds; with self-play (`collect.opponent`), the agent plays both sides."""
        self_play = {"opponent": "agent"} if self.spec.collect.opponent != "environment" else {}
        return self._data["environment"] | self_play

    def _training(self, algorithm: dict[str, Any]) -> dict[str, Any]:
        return {**self._parts("model"), "algorithm": algorithm, "save_every": self.spec.compute.save_every}

    def _parts(self, *names: str) -> dict[str, Any]:
        return {name: self._data[name] for name in names}

    def request(
        self, stage: str, part: dict[str, Any], inputs: Mapping[str, Artifact | None], seed: int = 0
    ) -> Request:
        """Return the request for a stage. part: data of its spec. inputs: artifacts by input name; None: no input."""
        inputs = {**inputs, TASKS: self.tasks} if TASKS in STAGES[stage].inputs else inputs
        keys = {name: artifact.key for name, artifact in inputs.items() if artifact is not None}
        return Request(stage, part, keys, seed, tuple(self.spec.allow))
