"""Decision rules: which method fits what a user has, why, and the command.

`RULES` is read from the top: the first rule whose condition holds gives the method. `ADDITIONS` then add settings for
the machine. Both are tables of plain functions, so each row can be read, and is composed by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.advice.situation import JUDGE, Situation

FILE = "FILE"
"""Placeholder of a file that the user did not name."""
PROVIDER, PROVIDER_URL = "openai/", "https://api.openai.com/v1"
"""Provider of the default judge, and its address."""
FEW = 32
"""Number of demonstrations or preferences below which a note warns."""


@dataclass(frozen=True)
class MethodRule:
    """Method for a situation."""

    method: str
    condition: str
    """Condition in words."""
    applies: Callable[[Situation], bool]
    reason: str
    overrides: Callable[[Situation], Sequence[str]]
    """Overrides of `flows.run` besides name and environment."""
    rounds: bool = True
    """True if the method collects episodes in rounds, in which overlap is possible."""
    warms_up: bool = False
    """True if a warmup imitates the user's demonstrations, or else the environment's solutions, if there are any."""
    warmup_reason: str = ""
    """Reason for the warmup, if there is one."""

    @property
    def without_warmup(self) -> str:
        """Method without its warmup."""
        return self.method.removeprefix("SFT + ")


@dataclass(frozen=True)
class Addition:
    """Settings for a machine or a kind of environment, in addition to a rule's."""

    condition: str
    applies: Callable[[Situation, MethodRule], bool]
    reason: str
    overrides: Sequence[str]


def _judged(situation: Situation) -> list[str]:
    return ["reward=ruler", "judge_model@reward.model=litellm", f"reward.model.model={situation.judge or JUDGE}"]


def _offline(experiment: str) -> Callable[[Situation], list[str]]:
    """Return the overrides of training on the user's file."""
    return lambda situation: [f"+experiment={experiment}", f"data.path={situation.data or FILE}"]


def _generates(situation: Situation) -> bool:
    """Return True if `+experiment=mcp_rl` fits: its author and judge are one model behind a URL, and it reads neither
    tasks nor demonstrations."""
    bare = situation.environment == "mcp" and not (situation.success or situation.tasks or situation.labels)
    return bare and (situation.judge or JUDGE).startswith(PROVIDER)


def _author(situation: Situation) -> list[str]:
    model = (situation.judge or JUDGE).removeprefix(PROVIDER)
    address = [f"flow.author.url={PROVIDER_URL}", "flow.author.key_variable=OPENAI_API_KEY"]
    return ["+experiment=mcp_rl", *address, f"flow.author.model={model}"]


def _self_judged(situation: Situation) -> list[str]:
    """Return the reward of an environment without success: a critic, which is the judge or the policy itself."""
    if situation.success:
        return []
    if situation.judge is None:
        return ["reward=critic", "judge_model@reward.model=policy"]
    return ["reward=critic", *_judged(situation)[1:]]


def _imitates_successes(situation: Situation) -> bool:
    """Return True if AgentEvol fits: it is wanted for its simplicity, or the environment is one of AgentGym or several
    in one."""
    several = situation.environment in ("agentgym", "mixture") and situation.teacher is None and not situation.sparse
    return situation.environment is not None and situation.success and (situation.goal == "simple" or several)


RULES = (
    MethodRule(
        "SFT + R3",
        "an environment that reports success, and rewards of single steps: wanted, or needed as success is rare",
        lambda it: it.goal == "reasoning" or (it.environment is not None and it.success and it.sparse and it.restores),
        "A process reward model learns from continuations how promising each turn is, so that every turn is rewarded "
        "beside the outcome. A KL penalty keeps the policy near the one that the model was trained on.",
        lambda it: [
            "algorithm=rloo",
            "algorithm.kl_coefficient=0.01",
            "reward_model=process",
            "reward_model.weight=0.1",
            *([] if it.slow else ["reward_model.every=2"]),
            "reward_model.continuations=2",
            "reward_model.algorithm.heads.overall=0.0",
            "+reward_model.algorithm.heads.continued=1.0",
        ],
        warms_up=True,
    ),
    MethodRule(
        "SFT + self-evolution",
        "an environment, and a policy that is to improve by its own attempts",
        lambda it: it.goal == "self-improvement",
        "In each generation the policy attempts tasks, the attempts are evaluated, and it imitates those that are "
        "selected in the last generations.",
        lambda it: ["flow=self_evolve", *_self_judged(it)],
        warms_up=True,
    ),
    MethodRule(
        "IPO",
        "comparisons, and a bounded distance from the reference policy",
        lambda it: it.goal == "regularized",
        "IPO stops at a margin of fixed size, so preferences without noise do not drive the policy ever further from "
        "the reference, as DPO's logistic loss does.",
        _offline("ipo"),
        rounds=False,
    ),
    MethodRule(
        "SFT + AgentEvol",
        "an environment of AgentGym, several environments, or one whose successes are simply to be imitated",
        _imitates_successes,
        "AgentEvol explores with the current policy and trains on the union of the demonstrations and all successes so "
        "far, by imitation alone.",
        lambda it: ["flow=agent_evol", "filter=agent_evol", "algorithm=sft"],
        warms_up=True,
    ),
    MethodRule(
        "MCP RL",
        "an MCP server whose tools are all there is",
        _generates,
        "An MCP server has tools, but neither tasks nor a success signal. One run lets a language model write the "
        "tasks, and lets RULER compare the episodes of each task, which GRPO needs only relatively.",
        _author,
        warms_up=True,
    ),
    MethodRule(
        "generated scenarios + RULER",
        "an MCP server and demonstrations, or tasks, or a judge of another provider",
        lambda it: it.environment == "mcp" and not it.success,
        "An MCP server has tools, but neither tasks nor a success signal. A language model writes the tasks, and RULER "
        "lets a judge compare the episodes of each task, which GRPO needs only relatively.",
        lambda it: ["algorithm=grpo", *_judged(it)],
        warms_up=True,
    ),
    MethodRule(
        "on-policy distillation",
        "a larger teacher model and an environment",
        lambda it: it.teacher is not None and it.environment is not None,
        "A teacher with the same tokenizer grades every token of the student's own episodes, which is a denser signal "
        "than success and needs fewer episodes than reinforcement learning.",
        lambda it: ["algorithm=distill", f"algorithm.teacher.name={it.teacher}", "filter=everything"],
        warms_up=True,
    ),
    MethodRule(
        "SFT + GRPO",
        "an environment that reports success",
        lambda it: it.environment is not None and it.success,
        "Success is the objective itself, so the policy is trained on it. GRPO compares the episodes of a scenario and "
        "needs no critic.",
        lambda it: ["algorithm=grpo"],
        warms_up=True,
        warmup_reason="The warmup before it imitates solutions until some episodes succeed.",
    ),
    MethodRule(
        "RULER + GRPO",
        "an environment without success, and a judge",
        lambda it: it.environment is not None and it.judge is not None,
        "RULER lets a language model compare the episodes of a scenario. GRPO uses only their differences, so the "
        "judge needs no absolute scale and no hand-written reward.",
        lambda it: ["algorithm=grpo", *_judged(it)],
        warms_up=True,
    ),
    MethodRule(
        "ORPO",
        "comparisons, and fewest models and settings",
        lambda it: it.goal == "simple" and it.compared,
        "ORPO adds an odds ratio to the likelihood of the better answer, so imitation and preference are one training "
        "without a reference policy.",
        _offline("orpo"),
        rounds=False,
    ),
    MethodRule(
        "DPO on rankings",
        "ranked answers",
        lambda it: it.form == "ranked",
        "An order of several answers is split into its pairs, on which DPO raises the better answer above the worse "
        "one.",
        _offline("dpo"),
        rounds=False,
    ),
    MethodRule(
        "DPO",
        "pairs of a better and a worse answer",
        lambda it: it.form == "pairs",
        "DPO trains on pairs directly, without a reward model and without sampling.",
        _offline("dpo"),
        rounds=False,
    ),
    MethodRule(
        "KTO",
        "answers marked good or bad",
        lambda it: it.form == "thumbs",
        "KTO needs no pairs: each answer is good or bad by itself.",
        _offline("kto"),
        rounds=False,
    ),
    MethodRule(
        "SFT",
        "demonstrations only",
        lambda it: it.labels > 0,
        "Demonstrations show what to do and nothing says what to avoid, so imitation is what they allow.",
        _offline("sft"),
        rounds=False,
    ),
    MethodRule(
        "few-shot prompting",
        "neither data nor an environment",
        lambda it: not (it.labels or it.preferred or it.environment or it.teacher or it.judge),
        "There is nothing to learn from, so instructions and a few solved examples in the prompt are what can change "
        "the model's answers. The run measures them on questions of your own.",
        lambda it: [
            "environment=dataset",
            f"environment.path={FILE}",
            "environment.prompt=prompt",
            "environment.answer=answer",
            "environment.heldout_share=0.9",
            "rounds=0",
            "warmup=none",
        ],
        rounds=False,
    ),
)
"""Rules in order; the first whose condition holds applies."""

ADDITIONS = (
    Addition(
        "tight GPU memory",
        lambda it, rule: it.tight,
        "4-bit base weights take a quarter of the memory; the adapter is trained in full precision (QLoRA).",
        ["model.quantization=nf4"],
    ),
    Addition(
        "collecting takes as long as training",
        lambda it, rule: it.slow and rule.rounds and rule.method != "on-policy distillation",
        "The next round is collected during training, with a policy that is one version behind.",
        ["collect.overlap=1"],
    ),
    Addition(
        "a GPU",
        lambda it, rule: it.compute == "gpu",
        "A GPU trains a larger model.",
        ["model=qwen3_0_6b"],
    ),
    Addition(
        "a cluster",
        lambda it, rule: it.compute == "cluster",
        "SkyPilot places the stages on the cluster's machines, which share artifacts in a store.",
        ["model=qwen3_0_6b", "compute=sky", "store=s3://BUCKET/PREFIX"],
    ),
)
"""Additions; all whose condition holds apply."""
