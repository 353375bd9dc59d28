"""Certificates: a faultless setup passes every check, and each injected fault fails the check that is meant for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from components.errors import CertificateFailed, ResourceError
from components.inference.protocol import BASE_POLICY, Sampling
from components.models import trained_weights
from components.models.distribution import Cut
from components.models.spec import LoraSpec, ModelSpec
from components.models.weights import prepare
from components.rollout.spec import AgentSpec
from flows import certify as command
from flows.certification import certificate
from flows.certification.adapter import check_adapter
from flows.certification.certificate import (
    CHECKS,
    certify,
    check_environment,
    check_export,
    check_limits,
    check_special_tokens,
)
from flows.certification.completions import sample
from flows.certification.sampler import Measured, check_kept_mass, check_logprobs
from flows.certification.subject import Opening, Subject
from flows.certification.template import check_template
from flows.certification.tool_calls import check_tool_calls
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.planning.plan import plan
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.stages.execute import find_stage, run_stage
from tests.flows.faulty_environment import Sums
from tests.trajectories.families import FAMILIES, LOOK_UP, chat_format

TINY = ModelSpec(name="tiny", source="random", max_length=2048, lora=LoraSpec(rank=4, alpha=8))
WHOLE = Sampling(max_tokens=16)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def make_engine(base_dir):
    from components.inference.transformers.engine import TransformersEngine

    return lambda folder=base_dir: TransformersEngine(folder, max_length=2048, device="cpu")


@pytest.fixture
def subject(base_dir, make_engine, tmp_path):
    """The tiny model with the embedded engine, before any fault."""
    engine = make_engine()
    scenarios = Sums().scenarios("train")[:16]
    asked = [{"role": "system", "content": "You add."}, {"role": "user", "content": "Add 3 and 4."}]
    return Subject(
        model=TINY,
        agent=AgentSpec(),
        sampling=WHOLE,
        base_dir=base_dir,
        openings=[Opening(scenario, [*asked], [LOOK_UP]) for scenario in scenarios[:2]],
        deliver=lambda folder: loaded(engine, folder),
        in_process=True,
        returns_tokens=True,
        loads_policies=True,
        scratch=tmp_path,
        make_environment=Sums,
        played=scenarios,
        timeout=60.0,
    )


def loaded(engine, folder):
    engine.load_policy(BASE_POLICY if folder is None else trained_weights.digest(folder), folder and str(folder))
    return engine


def test_a_faultless_setup_passes_every_check_and_one_without_token_ids_skips_what_needs_them(subject):
    checks = certify(subject)
    assert tuple(check.name for check in checks) == CHECKS
    # random weights end no answer
    cut = "2 of 2 first answers were cut off at agent.max_tokens=16, or at the end of model.max_length=2048"
    others = {check.name: (check.status, check.reason) for check in checks if check.status != "passed"}
    assert others == {"limits": ("warned", cut)}
    checks = certify(replace(subject, returns_tokens=False))
    assert [check.name for check in checks if check.status == "skipped"] == list(CHECKS[4:8])


def test_full_finetuning_passes_the_checks_of_weights(subject):
    whole = replace(subject, model=TINY.model_copy(update={"lora": None}))
    check = check_adapter(whole)
    assert (check.status, check.reason) == ("passed", "")


def test_first_prompts_that_do_not_fit_fail_the_check_of_limits(subject, base_dir):
    from components.inference.transformers.engine import TransformersEngine

    short = TINY.model_copy(update={"max_length": 16})
    engine = TransformersEngine(base_dir, max_length=16, device="cpu")
    check = check_limits(replace(subject, model=short), engine)
    assert (check.status, check.reason) == ("failed", "2 of 2 first prompts exceed model.max_length=16")


# --- the engine answers with other weights ---


def test_base_weights_in_place_of_an_adapter_fail_the_adapter_check(subject, make_engine):
    engine = make_engine()

    def deliver(folder):
        loaded(engine, None)
        engine._policy = BASE_POLICY if folder is None else trained_weights.digest(folder)
        return engine

    check = check_adapter(replace(subject, deliver=deliver))
    assert check.status == "failed"
    assert "after probe 1 was delivered, the log-probabilities are those of the base model" in check.reason
    assert check.remedy


def test_a_stale_adapter_fails_the_adapter_check(subject, make_engine):
    engine = make_engine()

    def deliver(folder):
        if folder is None or engine.policy == BASE_POLICY:
            return loaded(engine, folder)
        engine._policy = trained_weights.digest(folder)  # the name changes, the weights of the first stay
        return engine

    check = check_adapter(replace(subject, deliver=deliver))
    assert check.status == "failed"
    assert "after probe 2 was delivered, the log-probabilities are those of probe 1" in check.reason


def test_an_engine_that_refuses_the_adapter_fails_the_adapter_check(subject):
    def deliver(folder):
        if folder is not None:
            raise ResourceError("rank 4 is more than max_lora_rank=2")
        return subject.deliver(None)

    check = check_adapter(replace(subject, deliver=deliver))
    assert check.status == "failed"
    assert "max_lora_rank" in check.reason


# --- sampler and trainer ---


def measured(subject, engine=None):
    return Measured.of(subject, engine or subject.deliver(None))


def test_a_cut_that_the_trainer_ignores_fails(subject, monkeypatch):
    whole = classmethod(lambda cls, trajectory: Cut(float(trajectory.sampling["temperature"])))
    monkeypatch.setattr(Cut, "of", whole)
    data = measured(replace(subject, sampling=replace(WHOLE, top_p=0.9)))
    mass, logprobs = check_kept_mass(data), check_logprobs(data)
    assert mass.status == logprobs.status == "failed"
    assert "the trainer computes the distribution without a cut" in mass.reason
    assert "those of the trainer of the distribution without a cut" in logprobs.reason


class Resampling:
    """An engine that samples with other settings than it is asked for, as a server with defaults of its own does."""

    def __init__(self, engine, **changes):
        self.engine, self.changes, self.policy = engine, changes, engine.policy

    async def chat(self, request):
        return await self.engine.chat(replace(request, sampling=replace(request.sampling, **self.changes)))


@pytest.mark.parametrize(
    ("sampling", "changes", "distribution"),
    [
        ({"top_p": 0.9}, {"top_p": 1.0}, "the distribution without a cut"),
        ({}, {"top_p": 0.8}, "a distribution with another cut"),
        ({"temperature": 0.5}, {"temperature": 1.0}, "the distribution at temperature 1 without a cut"),
    ],
)
def test_an_engine_with_other_sampling_settings_fails_by_name(sampling, changes, distribution, subject):
    subject = replace(subject, sampling=replace(WHOLE, **sampling))
    data = measured(subject, Resampling(subject.deliver(None), **changes))
    check = check_logprobs(data)
    assert check.status == "failed"
    assert f"Those of the sampler are of {distribution}" in check.reason
    assert check_kept_mass(data).status == "failed"


@pytest.mark.parametrize(("top_k", "status"), [(5, "failed"), (200, "warned")])
def test_kept_mass_is_that_of_the_model_as_transformers_computes_it(top_k, status, subject, base_dir):
    import torch

    from components.models.weights import load_model

    data = measured(replace(subject, sampling=replace(WHOLE, temperature=0.8, top_k=top_k)))
    check = check_kept_mass(data)
    model, kept = load_model(base_dir), []
    for trajectory in data.trajectories:
        for history in trajectory.histories:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([history.token_ids])).logits[0]
            for at, is_sampled in enumerate(history.sampled_mask()):
                if is_sampled:
                    kept.append(float((logits[at - 1] / 0.8).softmax(-1).topk(top_k).values.sum()))
    assert check.figures["mean_kept"] == pytest.approx(sum(kept) / len(kept), abs=1e-4)
    assert check.figures["min_kept"] == pytest.approx(min(kept), abs=1e-4)
    assert check.status == status
    assert f"collect.top_k={top_k}" in check.reason


def test_completions_have_two_turns_and_the_recorded_settings(subject):
    trajectories = sample(subject, subject.deliver(None), replace(WHOLE, temperature=0.7))
    assert {trajectory.sampling["temperature"] for trajectory in trajectories} == {0.7}
    assert len(trajectories) == len(subject.openings) * subject.samples
    assert {sum(bool(m.span) for h in trajectory.histories for m in h.messages) for trajectory in trajectories} == {2}


# --- chat template and tokens ---

HISTORIES = {"qwen3": (1, 3), "nemo": (6, 6), "deepseek_r1": (6, 6), "gpt_oss": (3, 3)}
"""Histories of an episode without and with reasoning, where there is more than one (docs/concepts/trajectories.md)."""


def with_chat(subject, chat, **changes):
    subject = replace(subject, **changes)
    subject.__dict__["chat"] = chat
    return subject


def test_the_templates_of_known_families_continue_or_begin_anew(subject):
    for name, family in FAMILIES.items():
        check = check_template(with_chat(subject, chat_format(family)))
        figures = check.figures["histories"], check.figures["histories_with_reasoning"]
        assert figures == HISTORIES.get(name, (1, 1)), name
        assert check.status == ("warned" if name in HISTORIES else "passed"), name
        assert check_tool_calls(with_chat(subject, chat_format(family))).status == "passed", name


def test_a_template_that_strips_history_or_changes_what_is_said_fails_its_check(subject):
    family = FAMILIES["smollm2"]
    chat = chat_format(replace(family, template=family.template.replace("in messages %}", "in messages[-2:] %}")))
    for form in ("native", "react", "chat"):
        check = check_template(with_chat(subject, chat, agent=AgentSpec(format=form)))
        assert check.status == "failed", form
        assert "the template drops earlier messages: a later prompt lacks 'system-0'" in check.reason
    template = family.template.replace("message.content +", "message.content | replace('milk', 'malt') +")
    check = check_tool_calls(with_chat(subject, chat_format(replace(family, template=template))))
    assert check.status == "failed"
    assert "is read back as" in check.reason


def test_other_formats_read_back_what_they_write(subject):
    openings = [replace(opening, tools=[LOOK_UP]) for opening in subject.openings]
    for form, calls in {"react": 8, "chat": 1}.items():
        check = check_tool_calls(replace(subject, agent=AgentSpec(format=form), openings=openings))
        assert (check.status, check.reason, check.figures["calls"]) == ("passed", "", calls)


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        (1, "failed", "declare '<|im_start|>' (1) as the end of a response, which never ends"),
        ([2, 70], "failed", "is ordinary text and would cut responses"),
        ([2, 0], "passed", "<|endoftext|> also ends a response"),
    ],
)
def test_ends_of_a_response_are_those_of_an_assistant_message(
    end, status, reason, subject, base_dir, make_engine, tmp_path
):
    folder = shutil.copytree(base_dir, tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    check = check_special_tokens(replace(subject, base_dir=folder), make_engine(folder))
    assert check.status == status
    assert reason in check.reason


def test_a_token_before_the_end_of_a_response_does_not_hide_the_end(subject, base_dir, make_engine, tmp_path):
    """Cohere 2 writes `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>` and declares the second one."""
    folder = shutil.copytree(base_dir, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|im_end|>'", "'<|endoftext|><|im_end|>'"))
    check = check_special_tokens(replace(subject, base_dir=folder), make_engine(folder))
    assert (check.status, check.figures["end"]) == ("passed", "<|im_end|>")


# --- export and environment ---


def test_an_export_without_the_training_fails(subject, monkeypatch, tmp_path):
    from components.deployment.export import export_merged

    folder = tmp_path / "trained"
    with subject.trainer.activate("default") as parameters:
        import torch

        torch.manual_seed(1)
        for name, parameter in parameters.items():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2)
    subject.trainer.save(folder)
    assert check_export(subject, folder).status == "passed"
    for form in ("merged", "adapter"):
        shutil.rmtree(tmp_path / form)
    monkeypatch.setattr(
        certificate, "export_merged", lambda base, learned, out, card: export_merged(base, None, out, card)
    )
    check = check_export(subject, folder)
    assert check.status == "failed"
    assert "the merged export differs from the policy" in check.reason


class Unsolved:
    """The sums without their solver."""

    def __init__(self):
        inner = Sums()
        self.scenarios, self.tools, self.reset = inner.scenarios, inner.tools, inner.reset
        self.step, self.close = inner.step, inner.close


def test_a_fault_of_the_environment_fails_its_check_and_a_missing_solver_is_said(subject):
    for fault in ("solver", "chance"):
        checks = check_environment(replace(subject, make_environment=lambda fault=fault: Sums(fault)))
        assert {check.name for check in checks if check.status == "failed"} == {fault}
    solver, chance = check_environment(replace(subject, make_environment=Unsolved))
    assert (solver.status, chance.status) == ("skipped", "passed")
    assert "no solve(scenario)" in solver.reason


# --- command, stage and run ---


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("certified")


LINE = ["+experiment=smoke", "rounds=0", "warmup=none", "deploy.mode=none", "evaluate.scenarios=2"]


def test_the_command_prints_one_json_object_and_caches_it(root, capsys):
    page = root / "page.html"
    line = [*LINE, f"root={root}", "--scenarios", "2", "--samples", "1", "--json", "--html", str(page)]
    assert command.main(line) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["passed"] is True
    assert data["status"] == "ran"
    assert [check["name"] for check in data["checks"]] == list(CHECKS)
    assert all(name in page.read_text() for name in CHECKS)
    assert command.main(line) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["status"] == "cached"
    assert again["checks"] == data["checks"]


def test_a_failed_certificate_is_exit_code_1_and_not_cached(root, capsys):
    line = [*LINE, f"root={root}", "collect.top_k=5", "--scenarios", "2", "--samples", "1"]
    assert command.main(line) == 1
    printed = capsys.readouterr().out
    assert "failed  kept_mass" in printed
    assert "Raise collect.top_p" in printed
    assert printed.rstrip().endswith("smoke: failed")
    spec = compose([*LINE, f"root={root}", "collect.top_k=5"])
    assert find_stage(Requests(spec).certify(scenarios=2, samples=1), Context.at(root)) is None


def test_a_run_begins_with_the_certificate_if_asked_to_and_keeps_its_other_keys(root):
    plain = plan(compose(["+experiment=smoke", f"root={root}"])).stages
    certified = plan(compose(["+experiment=smoke", f"root={root}", "certify=true"])).stages
    assert certified[0].label == "certify"
    assert [(stage.label, stage.key) for stage in certified[1:]] == [(stage.label, stage.key) for stage in plain]


def test_a_failed_certificate_ends_the_run_before_its_first_stage(root):
    spec = compose([*LINE, f"root={root}", "certify=true", "collect.top_k=5"])
    context, labels = Context.at(root), []

    def call(label, step, request):
        labels.append(label)
        return run_stage(request, context)[0]

    with pytest.raises(CertificateFailed, match=r"kept_mass: collect\.top_k=5 keeps"):
        Run(spec, call).execute()
    assert labels == ["certify"]
