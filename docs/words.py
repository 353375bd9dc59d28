"""Words of the built-in environments, from which the tokenizers of random models are trained.

python -m docs.words     write components/models/words.json

The words are those of conversations in which each environment solves its own training scenarios. A count is per 10,000
words of an environment, summed over the environments, so that long conversations do not outweigh short ones. Other
words give other tokenizers, and so other models and stage keys.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path

from components.models import random_weights
from components.models.weights import load_tokenizer
from components.rollout.collector import demonstrate
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from flows.experiment.compose import compose

ENVIRONMENTS = (
    "airline", "calculator", "deduction", "email_search", "guess", "maze", "movie", "retail", "shop", "sql",
    "textcraft", "tictactoe", "todo", "weather", "webshop",
)  # fmt: skip
SCENARIOS = 120
RARE = 3
"""Words with a lower count are left out."""


def conversations(environment: str, chat: ChatFormat) -> list[str]:
    """Return the conversations of an environment's own solutions as text."""
    spec = compose([f"environment={environment}", "warmup=none"])
    scenarios = list(spec.environment.build().scenarios("train"))[:SCENARIOS]
    trajectories = demonstrate(spec.environment.build, scenarios, spec.agent.presentation())
    histories = [([to_openai(m) for m in t.histories[0].messages], t.tools) for t in trajectories]
    return [chat.render(messages, tools, generate=False) for messages, tools in histories]


def word_counts(texts: list[str]) -> Counter[str]:
    """Return the count of each word, per 10,000 words."""
    special = re.compile("|".join(map(re.escape, random_weights.SPECIAL)))
    parts = [part for text in texts for part in special.split(text)]
    counts = Counter(word for part in parts for word in random_weights.split_words(part))
    total = sum(counts.values())
    return Counter({word: 10_000 * count / total for word, count in counts.items()})


def write() -> None:
    """Write the words, the most frequent first."""
    from tokenizers import decoders

    with tempfile.TemporaryDirectory() as folder:
        random_weights.make(Path(folder), None)
        chat = ChatFormat(load_tokenizer(Path(folder)))
    counts: Counter[str] = Counter()
    for environment in ENVIRONMENTS:
        counts.update(word_counts(conversations(environment, chat)))
    decode = decoders.ByteLevel().decode
    ordered = sorted((-round(count), decode([word])) for word, count in counts.items() if round(count) >= RARE)
    words = {word: -count for count, word in ordered}
    random_weights.WORDS.write_text(json.dumps(words, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
