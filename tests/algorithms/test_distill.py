"""On-policy distillation compared with the formula written out on single sequences, and on tasks with a known
optimum."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from components.algorithms.distillation.spec import DistillSpec
from components.algorithms.distillation.trainer import load_teacher, reverse_kl, teacher_kl, train_distill
from components.algorithms.policy import policy as policies
from components.algorithms.policy.packing import TokenSequence, pack
from components.errors import ArtifactError, ResourceError
from components.models.distribution import Cut
from components.models.spec import FrozenModelSpec, LoraSpec
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.stages.train import TrainStage
from tests.algorithms.builders import (
    MODEL,
    VOCABULARY,
    adapter_bytes,
    batch,
    demonstrations,
    make_context,
    make_history,
    make_policy,
    make_trajectory,
    plain_model,
    relative_difference,
    train_in,
    trainable,
    write_start,
)
from tests.flows.test_online_rl import DATA

TINY = {"name": "tiny", "source": "random", "device": "cpu"}


def spec(**changes) -> DistillSpec:
    return DistillSpec(
        **{"learning_rate": 1e-3, "pack_tokens": 64, "max_grad_norm": 1e9, "teacher": TINY, "batch_size": 64} | changes
    )


@pytest.fixture(scope="module")
def adapters(base_dir, tmp_path_factory):
    """Write teacher checkpoints: one adapter with the student's shape, and one with another rank."""
    folder = tmp_path_factory.mktemp("teachers")
    write_start(base_dir, folder / "same", seed=7)
    other = make_policy(base_dir, seed=9, model=MODEL.model_copy(update={"lora": LoraSpec(rank=2, alpha=8.0)}))
    other.save(folder / "other")
    return folder


def test_the_kl_is_a_sum_over_the_vocabulary():
    logits_UV, teacher_UV = torch.randn(3, 5), torch.randn(3, 7)
    teacher_UV[:, 5:] = 30.0  # rows of a longer head without a token
    kl_U = reverse_kl(logits_UV, teacher_UV, temperature=0.5)
    for row in range(3):
        p, q = ([math.exp(2 * value) for value in logits[row, :5].tolist()] for logits in (logits_UV, teacher_UV))
        p, q = ([value / sum(weights) for value in weights] for weights in (p, q))
        assert kl_U[row].item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-4)
    assert reverse_kl(logits_UV, logits_UV).abs().max() < 1e-6


@pytest.mark.parametrize(("which", "rows"), [("base", 7), ("same", 512), ("other", 7)])
def test_loss_and_gradient_are_the_formula(base_dir, adapters, tmp_path, monkeypatch, which, rows):
    """The formula runs on separate sequences, one token after another."""
    monkeypatch.setattr(policies, "LOGIT_ROWS", rows)
    adapter = None if which == "base" else str(adapters / which)
    distill_spec = spec(temperature=0.8, teacher={**TINY, "adapter": adapter})
    episodes, student = batch(), make_policy(base_dir)
    plain = plain_model(base_dir, student)
    teacher = load_teacher(student, base_dir, distill_spec.teacher, base_dir)
    assert (teacher is student) == (which != "other")
    seeds = {"same": make_policy(base_dir, seed=7)}
    if which == "other":
        seeds["other"] = make_policy(
            base_dir, seed=9, model=MODEL.model_copy(update={"lora": LoraSpec(rank=2, alpha=8.0)})
        )
    frozen = plain_model(base_dir, seeds.get(which, student))
    terms = []
    for trajectory in episodes:
        [only] = trajectory.histories
        ids_T = torch.tensor(only.token_ids)
        own_TV = torch.log_softmax(plain(input_ids=ids_T[None]).logits[0] / 0.8, -1)
        with torch.no_grad():
            if which == "base":
                with frozen.disable_adapter():
                    logits_TV = frozen(input_ids=ids_T[None]).logits[0]
            else:
                logits_TV = frozen(input_ids=ids_T[None]).logits[0]
            their_TV = torch.log_softmax(logits_TV / 0.8, -1)
        targets = [index - 1 for index, sampled in enumerate(only.sampled_mask()) if sampled]
        terms += [(own_TV[t].exp() * (own_TV[t] - their_TV[t])).sum() for t in targets]
    loss = sum(terms) / len(terms)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in trainable(plain).items()}
    grads: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.SGD(student.parameters.values(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: grads.update({name: p.grad.clone() for name, p in student.parameters.items()})
    )
    logs: list[dict[str, float]] = []
    options = {"base_dir": base_dir, "scratch": tmp_path, "on_step": logs.append}
    train_distill(distill_spec, make_context(student, optimizer, episodes, **options), teacher)
    assert logs[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_difference(grads, expected) <= 1e-5
    assert logs[0]["sampled_tokens"] == len(terms)


def test_models_that_do_more_to_their_logits_are_read_as_a_whole(base_dir):
    student, teacher = make_policy(base_dir), make_policy(base_dir, seed=7)
    [packed] = pack([TokenSequence([*range(5, 15)], [6, 8, 9])], 64)
    alone = teacher_kl(student, teacher, packed, 1.0)
    student._logit_transform = teacher._logit_transform = None
    assert torch.allclose(teacher_kl(student, teacher, packed, 1.0), alone, atol=1e-6)


def test_a_student_comes_to_say_what_its_teacher_says(base_dir, tmp_path):
    """One prompt with one token as the answer. The teacher's head is sharp; 40 steps on the student's own samples."""
    prompt = [5, 6, 7, 8]
    student, teacher = make_policy(base_dir), make_policy(base_dir, seed=7)
    for policy in (student, teacher):
        policy.model.get_base_model().get_output_embeddings().weight.data.mul_(10)
    for name, parameter in teacher.parameters.items():
        parameter.data.mul_(10 if "lora_B" in name else 1)
    teacher.save(tmp_path / "teacher")
    teacher.use_reference(tmp_path / "teacher")
    [every] = pack([TokenSequence([*prompt, token], [4]) for token in range(VOCABULARY)], 4096)
    distill_spec = spec(learning_rate=1e-2)
    optimizer = torch.optim.AdamW(student.parameters.values(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def kl() -> float:
        with torch.no_grad():
            student_V, teacher_V = (policy.logprobs(every, Cut())[0] for policy in (student, teacher))
            return (student_V.exp() * (student_V - teacher_V)).sum().item()

    before, step = kl(), 0
    for number in range(40):
        with torch.no_grad():
            logps_V = student.logprobs(every, Cut())[0]
        drawn = torch.multinomial(logps_V.exp(), 4, replacement=True, generator=generator).tolist()
        episodes = [
            make_trajectory("g", index, [make_history([(False, prompt), (True, [token])], [0.0])], None)
            for index, token in enumerate(drawn)
        ]
        options = {"base_dir": base_dir, "step": step, "seed": number, "scratch": tmp_path}
        step, _ = train_distill(distill_spec, make_context(student, optimizer, episodes, **options), teacher)
    assert step == 40
    assert before > 1.0
    assert kl() < before / 50, kl()


def run(base_dir, folder, algorithm, trajectories, **more):
    out, *measured = train_in(folder, algorithm, base_dir, trajectories, save_every=0.0, teacher_dir=base_dir, **more)
    return adapter_bytes(out), *measured


@pytest.mark.parametrize("which", ["same", "other"])
def test_killed_or_warm_it_ends_in_the_same_bytes(base_dir, adapters, tmp_path, which):
    distill_spec = spec(epochs=2, batch_size=5, teacher={**TINY, "adapter": str(adapters / which)})

    def stop(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            raise KeyboardInterrupt

    warm: dict = {}
    with pytest.raises(KeyboardInterrupt):
        run(base_dir, tmp_path / "stopped", distill_spec, batch(), on_step=stop, warm=warm)
    whole, metrics, logs = run(base_dir, tmp_path / "whole", distill_spec, batch())
    assert run(base_dir, tmp_path / "stopped", distill_spec, batch(), warm=warm)[0] == whole
    assert run(base_dir, tmp_path / "warm", distill_spec, batch(), warm=warm)[0] == whole
    random = [(tmp_path / name / "out" / "rng.safetensors").read_bytes() for name in ("stopped", "whole", "warm")]
    assert len(set(random)) == 1  # the teacher's adapter is created before the seed is set
    assert [metrics["step"] for metrics in logs] == [1, 2, 3, 4]
    assert metrics["examples"] == 9


def test_rewards_play_no_part_and_failed_episodes_take_none(base_dir, tmp_path):
    unscored = batch()
    for trajectory in unscored:
        trajectory.reward = None
    assert run(base_dir, tmp_path / "a", spec(), unscored)[0] == run(base_dir, tmp_path / "b", spec(), batch())[0]
    assert run(base_dir, tmp_path / "none", spec(), [])[1]["skipped"] == 1.0
    assert run(base_dir, tmp_path / "shown", spec(), demonstrations(2))[1]["examples"] == 2


def test_another_vocabulary_is_refused_by_name(base_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base_dir, other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ResourceError, match=r"algorithm\.teacher: .* 2 tokens .* 'a' \(\d+ in model, \d+ in the"):
        load_teacher(make_policy(base_dir), base_dir, FrozenModelSpec(name=str(other)), other)


def test_the_key_of_a_stage_says_what_the_teacher_is_not_where(base_dir, adapters, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(adapters / "same", moved)

    def key(adapter, **changes) -> dict:
        stage = TrainStage(model=MODEL, algorithm=spec(teacher={**TINY, "adapter": str(adapter), **changes}))
        return stage.key_part()

    assert key(adapters / "same") == key(moved) == key(moved / "adapter", device="auto")
    assert key(adapters / "same") != key(adapters / "other")
    with pytest.raises(ArtifactError, match="contains no adapter"):
        key(tmp_path / "nowhere")


def test_a_teacher_that_is_not_there_is_a_mistake_in_the_experiment(tmp_path):
    algorithm = {"name": "distill", "teacher": {"name": "./nowhere", "adapter": str(tmp_path)}}
    with pytest.raises(ValueError, match=r"(?s)algorithm\.teacher\.adapter.*algorithm\.teacher\.name"):
        validate(ExperimentSpec, {**DATA, "algorithm": algorithm})
