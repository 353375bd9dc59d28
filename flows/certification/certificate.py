"""Certificate of a model, an engine and a trainer: all checks, one after the other.

The checks of the chat template, tool calls, the sampler and adapters have modules of their own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from components import aio
from components.deployment.answers import TOLERANCE, answers_of, check_answers
from components.deployment.export import export_adapter, export_merged
from components.deployment.load import load_adapter
from components.errors import ContextOverflow, EspalierError, PromptRefused
from components.evaluation.checks import FAILED, SKIPPED, PropertyCheck, check_result, skipped_check
from components.inference.conversations import stop_ids
from components.inference.protocol import ChatRequest, Engine, ModelEngine, Sampling
from components.models.trained_weights import is_whole
from components.models.weights import declared_end, load_model, load_tokenizer, model_config, pick_device
from components.rollout.agent import Conversation
from components.rollout.request import EpisodeRequest
from components.trajectories.chat import ChatFormat
from components.trajectories.truncation import KEYS, MESSAGES
from flows.certification import adapter, sampler, template, tool_calls
from flows.certification.completions import MOST_TOKENS
from flows.certification.subject import Opening, Subject
from flows.qualification.checks import Qualification, check_chance, check_solver
from flows.qualification.recording import TestedInstance

TURNS = 30
"""Maximum number of actions of chance, if `agent.max_turns` is larger."""
VACUOUS = 0.9
"""Success rate of chance from which the check fails: the reward then tells hardly anything. Below it, where `flows.
qualify` fails, the certificate warns: an easy game may be chosen on purpose."""


def check_environment(subject: Subject) -> list[PropertyCheck]:
    """Play the solver and chance, as `flows.qualify` does: the solver succeeds, chance fails."""
    make = subject.make_environment

    async def play() -> list[PropertyCheck]:
        world = TestedInstance(make())
        try:
            tested = Qualification(make, world, {}, list(subject.played), min(TURNS, subject.agent.max_turns))
            return [
                await _checked("solver", check_solver, tested, subject.timeout),
                await _checked("chance", check_chance, tested, subject.timeout),
            ]
        finally:
            await world.close()

    return aio.run(play())


async def _checked(
    name: str, check: Callable[[Qualification], Awaitable[PropertyCheck]], tested: Qualification, timeout: float
) -> PropertyCheck:
    try:
        async with asyncio.timeout(timeout):
            qualified = await check(tested)
    except TimeoutError as error:
        return check_result(name, [str(error) or f"took longer than collect.timeout = {timeout:g} s"], {})
    except EspalierError as error:
        return check_result(name, [str(error)[:500]], {})
    if qualified.status == SKIPPED:
        return skipped_check(name, qualified.reason)
    problems = [qualified.reason] if qualified.status == FAILED else []
    if name == "chance" and qualified.figures["success"] < VACUOUS:
        return check_result(name, [], qualified.figures, warnings=problems)
    return check_result(name, problems, qualified.figures)


EXPORT = "export"
PROMPTS = 2
"""Maximum number of prompts."""


def check_export(subject: Subject, folder: Path) -> PropertyCheck:
    """Export a policy, merged and as an adapter, load it as its users do, and compare its log-probabilities with the
    greedy answers of the engine (`components.deployment.answers`). folder: trained weights."""
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
        return check_result(EXPORT, [f"the policy gives no answers to compare with: {error}"], figures)
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
    return check_result(EXPORT, failures, {**figures, "tolerance": tolerance})


LIMITS = "limits"
MOST_CUT = 0.5
"""Share of cut answers from which the check warns."""


def check_limits(subject: Subject, engine: Engine) -> PropertyCheck:
    """Sample one answer to each opening. A prompt that exceeds the context fails, many cut answers warn: a model that
    is not trained yet may not end its answers, but one that can answer is cut in every turn."""

    async def sampled() -> list[Conversation | None]:
        return await asyncio.gather(*(_answered(subject, engine, opening) for opening in subject.openings))

    answered = aio.run(sampled())
    fitting = [talk for talk in answered if talk is not None]
    cut = sum(talk.truncated for talk in fitting)
    figures = {"answers": len(fitting), "cut": cut, "too_long": len(answered) - len(fitting)}
    failures, warnings = [], []
    if figures["too_long"]:
        failures.append(
            f"{figures['too_long']} of {len(answered)} first prompts exceed model.max_length={subject.model.max_length}"
        )
    if fitting and cut >= MOST_CUT * len(fitting):
        warnings.append(
            f"{cut} of {len(fitting)} first answers were cut off at {KEYS[MESSAGES]}={subject.sampling.max_tokens}, or "
            f"at the end of model.max_length={subject.model.max_length}"
        )
    return check_result(LIMITS, failures, figures, warnings=warnings)


async def _answered(subject: Subject, engine: Engine, opening: Opening) -> Conversation | None:
    """Return the conversation with one answer; None if the prompt exceeds the context."""
    request = EpisodeRequest(scenario=opening.scenario, sample=0, seed=0, sampling=subject.sampling, max_turns=1)
    talk = Conversation(engine, request)
    talk.messages, talk.tools = subject.opened(opening)
    try:
        await talk.answer()
    except ContextOverflow:
        return None
    return talk


SPECIAL_TOKENS = "special_tokens"


def check_special_tokens(subject: Subject, engine: Any = None) -> PropertyCheck:
    """Compare the stop tokens with the tokens of an assistant message. engine: its attribute `stop_ids` counts, if it
    has one."""
    chat, tokenizer = subject.chat, subject.chat.tokenizer
    end = declared_end(subject.base_dir)
    declared = sorted(end if isinstance(end, list) else [] if end is None else [end])
    stops = frozenset(getattr(engine, "stop_ids", None) or stop_ids(end, chat))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends, size = _ends(chat, special), _vocabulary(subject)
    named = {token: tokenizer.convert_ids_to_tokens(token) for token in {*stops, *declared} if token < len(tokenizer)}
    failures = []
    if chat.end_id not in stops:
        failures.append(
            f"the engine does not stop at {chat.end!r} ({chat.end_id}), with which the template ends a response"
        )
    if declared and not ends & set(declared):
        listed = ", ".join(f"{named.get(token)!r} ({token})" for token in declared)
        failures.append(
            f"the model's files declare {listed} as the end of a response, which never ends an assistant message of "
            f"the template; it ends with {chat.end!r} ({chat.end_id})"
        )
    if plain := sorted(token for token in stops if token not in special):
        failures.append(f"the stop token {named.get(plain[0])!r} ({plain[0]}) is ordinary text and would cut responses")
    ids = {"end of turn": chat.end_id, "eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    for name, token in (*ids.items(), *(("stop token", token) for token in sorted(stops))):
        if token is not None and token >= size:
            failures.append(f"{name} {token}: the model has only {size} tokens")
    figures: dict[str, Any] = {"end": chat.end, "stops": ", ".join(str(named.get(token)) for token in sorted(stops))}
    figures |= {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token}
    notes = []
    if unused := sorted(stops - ends):
        notes.append(
            f"{', '.join(str(named.get(token)) for token in unused)} also ends a response, not in the template"
        )
    if tokenizer.pad_token_id == chat.end_id:
        notes.append("pad_token is the end of a turn; training masks by position, so the end is still learned")
    return check_result(SPECIAL_TOKENS, failures, figures, note="; ".join(notes))


def _ends(chat: ChatFormat, special: set[int]) -> set[int]:
    """Return the special tokens that end an assistant message, alone and before a further question; after those of
    the template that always come before, such as Cohere 2's `<|END_RESPONSE|>`."""
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "second"},
    ]
    tokens: set[int] = set()
    for length in (2, 3):
        try:
            after = chat.render(talk[:length], [], generate=False).rpartition("reply")[2].removeprefix(chat.closing)
        except PromptRefused:
            continue
        tokens |= set([token for token in chat.encode(after) if token in special][:1])
    return tokens


def _vocabulary(subject: Subject) -> int:
    return int(model_config(subject.base_dir).get_text_config().vocab_size)


CHECKS = (
    template.NAME, tool_calls.NAME, SPECIAL_TOKENS, LIMITS, sampler.LOGPROBS, sampler.KEPT_MASS, adapter.NAME,
    EXPORT, "solver", "chance",
)  # fmt: skip
"""Checks in their order."""


def certify(subject: Subject, progress: Callable[[int, int], None] = lambda done, total: None) -> list[PropertyCheck]:
    """Return the result of each check. Raises the errors of the engine's construction, ResourceError among them."""
    engine = subject.deliver(None)
    checks: list[PropertyCheck] = []
    for check in _run(subject, engine):
        checks.append(check)
        progress(len(checks), len(CHECKS))
    return checks


def _run(subject: Subject, engine: ModelEngine) -> Iterator[PropertyCheck]:
    yield _guarded(template.NAME, lambda: template.check_template(subject))
    yield _guarded(tool_calls.NAME, lambda: tool_calls.check_tool_calls(subject))
    yield _guarded(SPECIAL_TOKENS, lambda: check_special_tokens(subject, engine))
    yield _guarded(LIMITS, lambda: check_limits(subject, engine))
    yield from _against_trainer(subject)
    yield from check_environment(subject)


def _against_trainer(subject: Subject) -> Iterator[PropertyCheck]:
    """Yield the checks that need token ids of the engine."""
    names = (sampler.LOGPROBS, sampler.KEPT_MASS, adapter.NAME, EXPORT)
    if not subject.returns_tokens:
        yield from (
            skipped_check(name, "the engine returns no token ids, so nothing can be trained with it") for name in names
        )
        return
    measured = functools.cache(lambda: sampler.Measured.of(subject, subject.deliver(None)))
    yield _guarded(sampler.LOGPROBS, lambda: sampler.check_logprobs(measured()))
    yield _guarded(sampler.KEPT_MASS, lambda: sampler.check_kept_mass(measured()))
    if not subject.loads_policies:
        yield from (skipped_check(name, "the engine loads no trained weights") for name in names[2:])
        return
    yield _guarded(adapter.NAME, lambda: adapter.check_adapter(subject))
    folder = probe_folder(subject)
    if folder is None:
        yield skipped_check(EXPORT, "no probe was made")
    else:
        yield _guarded(EXPORT, lambda: check_export(subject, folder))


def probe_folder(subject: Subject) -> Path | None:
    """Return the folder of the trained weights of the first probe, if there is one."""
    folder = subject.trainer.folder(subject.scratch / adapter.PROBES[0].replace(" ", "-"))
    return folder if folder.is_dir() else None


def _guarded(name: str, check: Callable[[], PropertyCheck]) -> PropertyCheck:
    """Run a check. An error of an engine or of the model's files is a failed check."""
    try:
        return check()
    except EspalierError as error:
        return check_result(name, [f"{type(error).__name__}: {error}"], {})
