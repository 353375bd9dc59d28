"""Responses with a form from a vLLM server: its structured outputs, with the grammar of the embedded engine.

The server receives the text of our grammar (`components.inference.grammar`) and masks tokens with llguidance, the
library that we use, before temperature and truncation; log-probabilities are those of the masked distribution. JSON has
one form of whitespace (`compact`), because versions of llguidance limit it differently. Two other details are made
equal: the end of the response, which is part of the grammar, and the bytes of tokens, which llguidance reads from the
server's tokenizer (`components.inference.vllm.server`).

Servers may ignore a grammar without an error: older versions, another backend, a reasoning parser. So each server must
first answer a request whose response is known, and every response is checked against the grammar.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from components.errors import EngineError, Problem, SpecError
from components.inference.grammar import Grammars, require_answer
from components.inference.grammar_compiler import Matcher
from components.inference.grammar_text import with_end
from components.inference.protocol import ChatRequest, parameter_of
from components.inference.vllm.client import GrammarRefused, VllmClient
from components.trajectories.chat import ChatFormat

PROBED = "\nQ\n"
"""Response of the request that checks a server. A tokenizer has a token for each of its bytes; the line break is the
byte that llguidance reads wrongly from some tokenizers."""
CERTAIN = 1e-3
"""Tolerance of the log-probability of a token that is the only allowed one, which is 0 under the masked
distribution."""


@dataclass(frozen=True, slots=True)
class ServerForm:
    """The form of one response. parameter: name of the request's parameter that demands it, for messages."""

    grammar: str
    matcher: Matcher
    parameter: str


class ServerForms:
    """Forms for the servers of one model. stop_ids: tokens that end a response."""

    def __init__(self, chat: ChatFormat, stop_ids: frozenset[int]):
        self._chat = chat
        self._vocabulary = len(chat.tokenizer)
        self._stop_ids = frozenset(token for token in stop_ids if token < self._vocabulary)
        self._grammars = Grammars(chat, self._vocabulary, self._stop_ids)
        self._checked: set[str] = set()
        """Addresses of servers that have passed `check`."""

    async def form(self, request: ChatRequest, prompt: list[int]) -> ServerForm | None:
        """Return the form of a request; None without one. prompt: its tokens. Raises as `Grammars.matcher` and
        `require_answer`."""
        if not request.form.constrained:
            return None
        require_answer(self._chat.after(prompt), request.form)
        parameter = parameter_of(request.form)
        matcher = await self._grammars.matcher(request.form, request.tools, compacted=True)
        return ServerForm(with_end(matcher.grammar, self._stop_ids), matcher, parameter)

    def check_response(self, form: ServerForm, sampled: list[int]) -> None:
        """Raise EngineError if sampled tokens do not have the form."""
        ended = sampled[-1] in self._stop_ids
        if not form.matcher.accepts(sampled[:-1] if ended else sampled, ended=ended):
            raise EngineError(
                f"{form.parameter}: the server's response does not have the form that the request demands; its grammar "
                "was given up or is another one"
            )

    async def check(self, client: VllmClient, model: str, parameter: str) -> None:
        """Check that a server enforces grammars; once for each server that does. Raises SpecError if it does not, and
        the client's errors. model: served name of the base model. parameter: as in `ServerForm`."""
        if client.url in self._checked:
            return
        grammar = f"start: {json.dumps(PROBED)}"
        body = {
            "model": model,
            "prompt": self._chat.prompt_ids([{"role": "user", "content": "Name a colour."}], []),
            "max_tokens": len(PROBED) + 1,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(self._stop_ids),
            "structured_outputs": {"grammar": with_end(grammar, self._stop_ids)},
        }
        try:
            tokens, logprobs, _ = await client.probe(body)
        except GrammarRefused as error:
            raise self._unsuitable(client, parameter, str(error)) from None
        matcher = await self._grammars.compiled(lambda: grammar, grammar, parameter)
        for token, logprob in zip(tokens, logprobs, strict=True):
            allowed_V = matcher.allowed()
            if not allowed_V[token]:
                raise self._unsuitable(client, parameter, "it answers with a token that a grammar excludes")
            if allowed_V.sum() == 1 and logprob < -CERTAIN:
                text = f"the only token that a grammar allows has log-probability {logprob:g}, expected 0"
                raise self._unsuitable(client, parameter, text)
            if token in self._stop_ids:
                break
            matcher.append(token)
        self._checked.add(client.url)

    def _unsuitable(self, client: VllmClient, parameter: str, reason: str) -> SpecError:
        text = (
            f"the server {client.url} does not enforce it exactly ({reason}); start vLLM 0.32 or later with "
            "--structured-outputs-config.backend guidance --logprobs-mode processed_logprobs, without a reasoning "
            "parser, and with a tokenizer that llguidance reads, or use inference=embedded"
        )
        return SpecError([Problem(parameter, text)])
