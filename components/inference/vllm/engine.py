"""The vLLM engine: prompts are rendered and responses parsed here; the server maps token ids to token ids.

A request goes to `/v1/completions` as token ids, and the response has token ids and log-probabilities. Rendering of
tools, parsing of calls and exact continuation of conversations are those of the embedded engine
(`components.trajectories.chat`, `conversations`), independent of the server's template and parsers.

Each policy version is an adapter with its own name on the server, `BASE@VERSION`. After loading, the name is verified
in the server's model list and in every response, so that no other version responds, and its content by its
log-probabilities (`proof`), also when the server has slept. A restarted server has lost its adapters and reports an
unknown model; the adapter is then loaded again. Adapters are not replaced under one name (`load_inplace`), because vLLM
would then read the folder for each batch, and its prefix cache distinguishes adapters by name. They are not unloaded
either: another engine of the run may use them, and vLLM evicts adapters itself.

In full fine-tuning (`max_lora_rank` 0) a policy's weights replace those of the server, which has one policy at a time
then, under the name of the base model. Which one it is does not show, so an engine loads its first policy in any case.

With several servers, a request goes to the one with the fewest requests in flight. The turns of a
conversation go to the server of its last response, whose KV cache has their tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ContextOverflow, EngineError, Problem, ResourceError, SpecError, StalePolicy
from components.inference.conversations import Conversations, key_of, stop_ids
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, ResponseStart
from components.inference.vllm.adapters import check_adapter, check_weights
from components.inference.vllm.client import GrammarRefused, Increments, Sampled, UnknownAdapter, VllmClient
from components.inference.vllm.forms import ServerForm, ServerForms
from components.inference.vllm.memory import release_unused
from components.inference.vllm.proof import ContentProof
from components.inference.vllm.router import Router
from components.models import trained_weights
from components.models.weights import declared_end, load_tokenizer
from components.retry import ClientTimeouts
from components.specs.served import key_hint
from components.trajectories.chat import ChatFormat

if TYPE_CHECKING:
    from components.inference.engines.vllm import VllmSpec

logger = logging.getLogger(__name__)

PROBE = "Zwei Fäden, 北京 42 — <b>naïve</b>\n\tdef f(x): return x**2 # 🙂 "
"""Text that different tokenizers split differently."""
PROCESSED = 1e-3
"""Tolerance of the log-probability check: with top_k=1 the sampled token has log-probability 0 under the truncated
distribution. A server below -PROCESSED returns log-probabilities of another distribution."""


class VllmEngine:
    """An engine with one policy at a time on one or more servers of the same model.

    base_dir: folder of the model. max_length: maximum sequence length in tokens. dtype: of the weights, which decides
    how exact the log-probabilities of a policy must be. urls: addresses of the servers. ours: True if the run started
    them, with the required options. watch: raises ResourceError if a started server has died for good.
    """

    def __init__(
        self,
        spec: VllmSpec,
        base_dir: Path,
        *,
        max_length: int,
        dtype: str,
        urls: Sequence[str],
        ours: bool = False,
        watch: Callable[[], None] = lambda: None,
    ):
        self.spec = spec
        self.max_length = max_length
        self.base_dir = Path(base_dir)
        self.tokenizer = load_tokenizer(self.base_dir)
        self.format = ChatFormat(self.tokenizer)
        self.stop_ids = stop_ids(declared_end(self.base_dir), self.format)
        self._ours = ours
        self._watch = watch
        self._conversations = Conversations(self.format, max_length)
        self._forms = ServerForms(self.format, self.stop_ids)
        self._router = Router(len(urls))
        self._serves_weights = spec.max_lora_rank == 0
        self._policy = "" if self._serves_weights else BASE_POLICY
        self._base = ""
        """Served name of the base model, set by `check`."""
        self._names = {BASE_POLICY: ""}
        """Served name of each loaded version."""
        self._folders: dict[str, str] = {}
        self._under_way: dict[asyncio.Task[Any], str] = {}
        self._load_lock = threading.Lock()
        probe = self.format.prompt_ids([{"role": "user", "content": PROBE}], [])[: max_length - 1]
        self._proof = ContentProof(self.base_dir, probe, dtype) if spec.prove and spec.quantization is None else None
        self._awoken = False
        """True if a server has slept since the last policy was loaded."""
        patience = ClientTimeouts(
            spec.timeout, spec.retry_for, spec.key_path, spec.retry_for if ours else spec.wait_for
        )
        hint = key_hint(spec.key_variable, spec.key_path)
        key = "" if ours else spec.key()
        self._clients = [
            VllmClient(
                url.removesuffix("/v1"), key, patience, key_hint=hint, error=EngineError, at_once=spec.max_requests
            )
            for url in urls
        ]

    @property
    def policy(self) -> str:
        return self._policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Raises StalePolicy, ContextOverflow, EngineError, SpecError for a form that
        cannot be enforced, and ResourceError for errors that affect every request."""
        name = self._names.get(request.policy)
        if name is None:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")
        start = request.start or ResponseStart(self._conversations.prompt(request), [], [])
        prompt = start.prompt_token_ids
        room = self.max_length - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens; prompt and answer have at most {self.max_length}",
                "; raise model.max_length or shorten the task",
            )
        form = await self._forms.form(request, prompt)
        body = self._body(request, name, start, min(request.sampling.max_tokens, room))
        if form is not None:
            body["structured_outputs"] = {"grammar": form.grammar}
        increments = None if request.listener is None else Increments(request, prompt, self.format)
        running = asyncio.ensure_future(self._ask(body, request, form, increments))
        self._under_way[running] = request.policy
        try:
            place, (tokens, logprobs, likeliest) = await running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if request.policy in self._names or (task is not None and task.cancelling()):
                raise
            raise StalePolicy(f"policy {request.policy} was replaced by {self._policy} during the request") from None
        finally:
            del self._under_way[running]
            if increments is not None:
                increments.close()
        if form is not None:
            self._forms.check_response(form, tokens)
        tokens, logprobs = start.token_ids + tokens, start.logprobs + logprobs
        answer = self._conversations.completion(request, prompt, tokens, logprobs, self.stop_ids)
        self._router.record_response(key_of([*request.messages, answer.message], request.tools), place)
        return replace(answer, likeliest=likeliest)

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises ContextOverflow and PromptRefused."""
        return len(self._conversations.prompt(request))

    def recall(self, request: ChatRequest, message: dict[str, Any], tokens: list[int]) -> None:
        """Continue the conversation of a response that was sampled earlier from exact tokens: those of the conversation
        up to the end of the response."""
        self._conversations.record_response(request, message, tokens)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load `version`. Requests in flight of the previous version are finished or cancelled, as set by
        `inference.on_swap`. Raises ResourceError if a server rejects the adapter, StalePolicy if it does not list the
        adapter afterwards or computes with another one, EngineError if it fails; the engine then keeps its version, or
        has none if all weights were to be replaced."""
        self._wake()
        if version == self._policy and not self._awoken:
            return
        if folder is not None and trained_weights.is_whole(Path(folder)) != self._serves_weights:
            holds, served = ("an adapter", "all weights") if self._serves_weights else ("all weights", "adapters")
            raise ResourceError(
                f"{folder} holds {holds}, and the vLLM server of this model.lora is given {served}: set model.lora as "
                "in its training"
            )
        if self._serves_weights:
            self._load_weights(version, folder)
            return
        name = self._base
        if folder is not None:
            name = f"{name}@{version}"
            self._folders[name] = os.path.abspath(folder)
            check_adapter(self.base_dir, Path(folder))
        for client in self._clients:
            if folder is not None:
                self._load_adapter(client, name)
            elif self._awoken:
                self._prove(client, name)
        self._awoken = False
        self._policy = version
        if self.spec.on_swap == "finish":
            self._names[version] = name
            return
        self._names = {version: name}
        self._cancel_stale()

    def _load_weights(self, version: str, folder: str | None) -> None:
        """Replace the weights of the servers by those in a folder; None: those of the base model."""
        if folder is not None:
            check_weights(self.base_dir, Path(folder))
        self._policy, self._names = "", {}  # a server that fails may have any weights
        self._cancel_stale()
        self._folders = {} if folder is None else {self._base: os.path.abspath(folder)}
        for client in self._clients:
            client.load_weights(os.path.abspath(folder or self.base_dir))
            self._prove(client, self._base)
        self._awoken = False
        self._policy, self._names = version, {version: self._base}

    def _cancel_stale(self) -> None:
        """Cancel the requests of policies that are not served any more."""
        for running, policy in list(self._under_way.items()):
            if policy not in self._names:
                running.get_loop().call_soon_threadsafe(running.cancel)

    def check(self) -> None:
        """Raise ResourceError if a server is unreachable for the retry period, or unsuitable for training: another
        model or tokenizer, too short a context, or log-probabilities of another distribution."""
        for client in self._clients:
            try:
                self._check(client)
            except EngineError as error:
                self._watch()
                raise ResourceError(f"{client.url} is no vLLM server that can be used: {error}") from None

    def release(self) -> None:
        """Put the servers to sleep until the next stage, if `inference.sleep` is set."""
        if self.spec.sleep:
            for client in self._clients:
                client.sleep(self.spec.sleep)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    # Requests

    def _body(self, request: ChatRequest, name: str, start: ResponseStart, max_tokens: int) -> dict[str, Any]:
        """Return the request body, without parameters at their neutral values. max_tokens: of the whole response."""
        sampling, begun = request.sampling, len(start.token_ids)
        sampling.refuse_thinking_limit("vllm")
        body: dict[str, Any] = {
            "model": name,
            "prompt": start.prompt_token_ids + start.token_ids,
            "max_tokens": max_tokens - begun,
            "temperature": sampling.temperature,
            "seed": (request.seed + (begun << 40)) % 2**63,  # not the random numbers of the first tokens again
            "logprobs": request.alternatives or 0,  # besides those of the sampled tokens
            "return_token_ids": True,
            "ignore_eos": True,  # `stop_token_ids` replaces the end tokens of the server's configuration
            "stop_token_ids": sorted(self.stop_ids),
        }
        if sampling.temperature:
            body |= sampling.cuts
        if request.alternatives:
            body["return_tokens_as_token_ids"] = True  # else tokens of equal text are one entry
        if request.change.bias:
            body["logit_bias"] = {str(token): value for token, value in request.change.bias}
        penalties = {"presence_penalty": request.change.presence, "frequency_penalty": request.change.frequency}
        body |= {name: value for name, value in penalties.items() if value}
        if request.stop:
            body |= {"stop": list(request.stop), "include_stop_str_in_output": True}
        return body

    async def _ask(
        self, body: dict[str, Any], request: ChatRequest, form: ServerForm | None, increments: Increments | None
    ) -> tuple[int, Sampled]:
        """Return the index of the responding server, and the sampled tokens."""
        while True:
            place = self._router.take(continued(request))
            client = self._clients[place]
            try:
                if form is not None:
                    await self._forms.check(client, self._base, form.parameter)
                return place, await self._answer(client, body, request.policy, increments)
            except (StalePolicy, ContextOverflow):
                raise
            except GrammarRefused as error:
                text = f"the server refuses the grammar of the form ({error}); use inference=embedded"
                raise SpecError([Problem(form.parameter if form is not None else "tools", text)]) from None
            except EngineError:
                self._watch()
                begun = increments is not None and increments.begun
                if not self._router.failed(place) or begun:
                    raise
                logger.warning("%s fails; its requests go to the other servers", client.url)
            finally:
                self._router.release(place)

    async def _answer(
        self, client: VllmClient, body: dict[str, Any], policy: str, increments: Increments | None
    ) -> Sampled:
        for _ in range(1 + self.spec.restarts):
            try:
                return await client.sample(body, policy, increments)
            except UnknownAdapter:
                logger.info("%s has lost %s; the adapter is loaded again", client.url, body["model"])
                await asyncio.to_thread(self._load_adapter, client, body["model"])
        return await client.sample(body, policy, increments)

    # Adapters

    def _load_adapter(self, client: VllmClient, name: str) -> None:
        """Load an adapter on a server, and verify it in the server's list and by its content. Concurrent threads wait
        for the first one."""
        with self._load_lock:
            folder = self._folders.get(name)
            if folder is None:
                raise ResourceError(f"{client.url} does not have the model {name} any more")
            client.load_adapter(name, folder)
            self._prove(client, name)

    def _prove(self, client: VllmClient, name: str) -> None:
        if self._proof is not None:
            self._proof.check(client, name, self._folders.get(name))

    # The server

    def _check(self, client: VllmClient) -> None:
        models = [model for model in client.models("/v1/models") if not model.get("parent")]
        if not models:
            raise EngineError("it has no model")
        name, length = models[0]["id"], models[0].get("max_model_len")
        if self._base not in ("", name):
            raise ResourceError(
                f"inference.urls: {client.url} serves {name}, and another one {self._base}; expected one model under "
                "one name (--served-model-name)"
            )
        self._base = name
        if not self._serves_weights:
            self._names[BASE_POLICY] = name
        if length is not None and length < self.max_length:
            raise ResourceError(
                f"inference.urls: {client.url} takes {length} tokens, and model.max_length is {self.max_length}; start "
                f"it with --max-model-len {self.max_length}, or lower model.max_length"
            )
        self._wake()
        self._check_tokenizer(client, name)
        if not self._ours:
            self._check_logprobs(client, name)

    def _check_tokenizer(self, client: VllmClient, name: str) -> None:
        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        text = PROBE + self.format.render(talk, [], generate=True)
        server_ids, local_ids = client.tokenize(name, text), self.format.encode(text)
        if server_ids != local_ids:
            at = next((i for i, (a, b) in enumerate(zip(server_ids, local_ids, strict=False)) if a != b), None)
            where = f"from token {at} on" if at is not None else f"{len(server_ids)} tokens against {len(local_ids)}"
            raise ResourceError(
                f"inference.urls: the tokenizer of {client.url} ({name}) is not that of model.name: a text comes out "
                f"differently {where}. Serve the model that is trained"
            )

    def _check_logprobs(self, client: VllmClient, name: str) -> None:
        """Check that log-probabilities are computed after truncation: with top_k=1 they must be 0."""
        prompt = self.format.prompt_ids([{"role": "user", "content": "Name a colour."}], [])
        body = {
            "model": name,
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 1.0,
            "top_k": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        if min(client.sample_now(body, name).logprobs) < -PROCESSED:
            raise ResourceError(
                f"inference.urls: {client.url} gives log-probabilities of another distribution than it draws from; "
                "start it with --logprobs-mode processed_logprobs"
            )

    def _wake(self) -> None:
        if self.spec.sleep:
            release_unused()
            slept = [client.wake(self.spec.sleep) for client in self._clients]
            self._awoken = self._awoken or any(slept)


def continued(request: ChatRequest) -> str | None:
    """Return the key of the conversation up to its last response, for `Router`; None without a response."""
    for turn in range(len(request.messages) - 1, -1, -1):
        if request.messages[turn]["role"] == "assistant":
            return key_of(request.messages[: turn + 1], request.tools)
    return None
