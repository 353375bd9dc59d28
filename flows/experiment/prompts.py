"""Check of the prompts of an environment against the context of the model, before the first stage.

A text has at most as many tokens as bytes, so only prompts of more bytes than half of the context are tokenized: the
rest of it holds the tools and what the chat template adds.
"""

from __future__ import annotations

from pathlib import Path

from components.errors import Problem, SpecError
from flows.experiment.checks.worlds import TRAIN
from flows.experiment.spec import ExperimentSpec


def check_prompts(spec: ExperimentSpec, cache: Path, *, prepares: bool) -> None:
    """Raise SpecError if a prompt leaves no room for an answer in `model.max_length`. Checks environments with a method
    `prompt(scenario)`, unless an agent of one's own writes the prompts.

    prepares: put the model's files in the cache if they are needed; False: a model that is not there is not checked."""
    environment, limit = spec.environment, spec.model.max_length
    if environment is None or not hasattr(environment.factory(), "prompt") or spec.agent.own or spec.agent.roles:
        return
    built = environment.build()
    prompts = {
        scenario.id: messages
        for split in (TRAIN, spec.evaluate.split)
        for scenario in built.scenarios(split)
        for messages in [built.prompt(scenario)]
        if sum(len(message["content"].encode(errors="surrogatepass")) for message in messages) > limit / 2
    }
    if not prompts:
        return
    from components.models.weights import folder, load_tokenizer, prepare
    from components.rollout.formats import make
    from components.trajectories.chat import ChatFormat

    if not prepares and not (folder(spec.model, cache) / "config.json").is_file():
        return
    chat, form, tools = ChatFormat(load_tokenizer(prepare(spec.model, cache))), make(spec.agent.format), built.tools()
    sizes = {name: len(chat.prompt_ids(*form.opening(messages, tools))) for name, messages in prompts.items()}
    long = {name: size for name, size in sizes.items() if size >= limit}
    if long:
        first, size = next(iter(long.items()))
        text = prompts[first][-1]["content"][:60]
        count = "1 prompt has" if len(long) == 1 else f"{len(long):,} prompts have"
        raise SpecError(
            [
                Problem(
                    "environment.prompt",
                    f"{count} no room for an answer in the context of model.max_length={limit} tokens; the first has "
                    f"{size}: {text!r}. Raise model.max_length, or remove these rows",
                )
            ]
        )
