"""Check of the exported model against the policy, as the stage `deploy` does it, with a probe as policy.

The engine answers greedily with the probe; the export, loaded as its users load it, has to give the same
log-probabilities (`components.deployment.answers`).
"""

from __future__ import annotations

from pathlib import Path

from components.deployment.answers import TOLERANCE, answers_of, check_answers
from components.deployment.export import export_adapter, export_merged
from components.deployment.load import load_adapter
from components.errors import EspalierError
from components.evaluation.certificate_page import CertificateCheck, check_result
from components.inference.protocol import ChatRequest, Sampling
from components.models.trained_weights import is_whole
from components.models.weights import load_model, load_tokenizer, pick_device
from flows.certification.completions import MOST_TOKENS
from flows.certification.subject import Subject

NAME = "export"
PROMPTS = 2
"""Maximum number of prompts."""


def check_export(subject: Subject, folder: Path) -> CertificateCheck:
    """Export a policy, merged and as an adapter, and compare it with the engine's answers. folder: trained weights."""
    model, tolerance = subject.model, TOLERANCE[subject.model.dtype]
    device = pick_device(model.device)
    sampling = Sampling(temperature=0.0, max_tokens=min(subject.sampling.max_tokens, MOST_TOKENS))
    figures: dict[str, float] = {}
    failures = []
    try:
        engine = subject.deliver(folder)
        requests = [
            ChatRequest(*subject.opened(opening), policy=engine.policy, sampling=sampling)
            for opening in subject.openings[:PROMPTS]
        ]
        answers = answers_of(engine, requests)
    except EspalierError as error:
        return check_result(NAME, [f"the policy gives no answers to compare with: {error}"], figures)
    forms = ["merged"] if is_whole(folder) else ["merged", "adapter"]
    for form in forms:
        out = subject.scratch / form
        try:
            if form == "merged":
                export_merged(subject.base_dir, folder, out, "")
                loaded = load_model(out, dtype=model.dtype, device=device), load_tokenizer(out)
            else:
                export_adapter(subject.base_dir, folder, out, "", base=model.name, revision=model.revision)
                loaded = load_adapter(subject.base_dir, out, dtype=model.dtype, device=device)
            compared = check_answers(form, *loaded, requests, answers, tolerance)
        except EspalierError as error:
            failures.append(str(error))
            continue
        figures |= {f"{form}_max": compared["max_logprob_difference"], "tokens": compared["tokens"]}
    return check_result(NAME, failures, {**figures, "tolerance": tolerance})
