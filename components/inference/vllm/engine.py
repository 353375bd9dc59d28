"""The engine on vLLM: conversations are laid out and read here, the server turns tokens into tokens.

A request goes to `/v1/completions` as token ids, and token ids with their log-probabilities come back: the layout of
tools, the reading of calls and the exact continuation of a conversation are those of the embedded engine
(`components.trajectories.chat`, `conversations`), whatever the server's own template and parsers do.

Each version of the policy is an adapter with a name of its own on the server, `BASE@VERSION`. It is loaded there, read
back from the server's list, and asserted in every answer, so that no answer is another version's; a server that was
started again has forgotten it, says so, and is given it again. Adapters are not swapped under one name
(`load_inplace`): vLLM then reads the folder again for each batch, and prefixes of the cache are told apart by name.
They are not unloaded either: another engine of the run may use the same one, and vLLM keeps no more than it has room
for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from components.errors import ContextOverflow, EngineError, ResourceError, StalePolicy
from components.inference.conversations import Conversations, key_of
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.inference.spec import VllmSpec
from components.inference.vllm.routing import Router
from components.json_client import Client, Failed, Patience, Reply
from components.json_text import read_json
from components.models import trained_weights
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)

PROBE = "Zwei Fäden, 北京 42 — <b>naïve</b>\n\tdef f(x): return x**2 # 🙂 "
"""Text that tokenizers cut up differently."""
PROCESSED = 1e-3
"""Of the only token that can be drawn, the log-probability is 0; a server that says less than this below 0 for four of
them gives those of the distribution that is drawn from."""


class _Forgotten(Exception):
    """The server does not know the adapter: it was started again."""


class VllmEngine:
    """One policy at a time on one or several servers of the same model.

    base_dir: folder of the model, for its tokenizer. max_length: longest sequence in tokens. urls: the servers. ours:
    they were started by the run, with the options that are needed. watch: raises ResourceError where the server that
    was started is given up.
    """

    def __init__(
        self,
        spec: VllmSpec,
        base_dir: Path,
        *,
        max_length: int,
        urls: Sequence[str],
        ours: bool = False,
        watch: Callable[[], None] = lambda: None,
    ):
        self.spec = spec
        self.max_length = max_length
        self.base_dir = Path(base_dir)
        self.tokenizer = load_tokenizer(self.base_dir)
        self.format = ChatFormat(self.tokenizer)
        self.stop_ids = stop_ids(self.base_dir, self.format)
        self._ours = ours
        self._watch = watch
        self._conversations = Conversations(self.format, max_length)
        self._router = Router(len(urls))
        self._policy = BASE_POLICY
        self._base = ""
        """Served name of the base model, known after `check`."""
        self._names = {BASE_POLICY: ""}
        """Served name of each version that is held."""
        self._folders: dict[str, str] = {}
        self._under_way: dict[asyncio.Task[Any], str] = {}
        self._bringing = threading.Lock()
        patience = Patience(spec.timeout, spec.retry_for, spec.key_path)
        hint = f"set {spec.key_variable or 'one: inference.key_variable=NAME'}"
        key = "" if ours else spec.key()
        self._clients = [
            Client(url.removesuffix("/v1"), key, patience, key_hint=hint, error=EngineError, at_once=spec.max_requests)
            for url in urls
        ]

    @property
    def policy(self) -> str:
        return self._policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Answers one conversation. Raises StalePolicy, ContextOverflow, EngineError, and ResourceError for what every
        request would fail of."""
        name = self._names.get(request.policy)
        if name is None:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")
        prompt = self._conversations.prompt(request)
        room = self.max_length - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, model.max_length is {self.max_length}: raise it or shorten the "
                "task"
            )
        body = self._body(request, name, prompt, min(request.sampling.max_tokens, room))
        asking = asyncio.ensure_future(self._ask(body, request.policy, continued(request)))
        self._under_way[asking] = request.policy
        try:
            place, sampled, logprobs = await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if request.policy in self._names or (task is not None and task.cancelling()):
                raise
            raise StalePolicy(f"policy {request.policy} was given up for {self._policy} meanwhile") from None
        finally:
            del self._under_way[asking]
        stopped = sampled[-1] in self.stop_ids
        turn = sum(message["role"] == "assistant" for message in request.messages)
        message = self.format.parse(sampled[:-1] if stopped else sampled, turn)
        self._conversations.answered(request, message, prompt + sampled)
        self._router.answered(key_of([*request.messages, message], request.tools), place)
        reason = "length" if not stopped else "tool_calls" if message.get("tool_calls") else "stop"
        return ChatCompletion(message, reason, prompt, sampled, logprobs, request.policy)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Holds `version` from now on. Answers under way of the version before are finished or given up as
        `inference.on_swap` says. Raises ResourceError where a server does not take it, StalePolicy where one does not
        list it afterwards, EngineError where one fails at it; the engine then holds what it held."""
        self._wake()
        if version == self._policy:
            return
        name = self._base
        if folder is not None:
            name = f"{name}@{version}"
            self._folders[name] = os.path.abspath(folder)
            if trained_weights.is_whole(Path(folder)):
                raise ResourceError(
                    f"{folder} holds all weights, and a vLLM server is given adapters: train one (model.lora.rank=16), "
                    "or take inference=embedded"
                )
            for client in self._clients:
                self._bring(client, name)
        self._policy = version
        if self.spec.on_swap == "finish":
            self._names[version] = name
            return
        self._names = {version: name}
        for asking, asked in list(self._under_way.items()):
            if asked not in self._names:
                asking.get_loop().call_soon_threadsafe(asking.cancel)

    def check(self) -> None:
        """Raises ResourceError where a server is away, for as long as requests are sent again, or is none that samples
        what would be trained on: another model, another tokenizer, too short a context, log-probabilities of another
        distribution."""
        for client in self._clients:
            try:
                self._check(client)
            except EngineError as error:
                self._watch()
                raise ResourceError(f"{client.url} is no vLLM server that can be used: {error}") from None

    def release(self) -> None:
        """Where the servers sleep between stages, they do now."""
        if self.spec.sleep:
            for client in self._clients:
                client.now("POST", "/sleep?level=1", {}, _nothing, self._no_sleep)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    # Asking

    def _body(self, request: ChatRequest, name: str, prompt: list[int], most: int) -> dict[str, Any]:
        """What changes nothing is left out."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": name,
            "prompt": prompt,
            "max_tokens": most,
            "temperature": sampling.temperature,
            "seed": request.seed % 2**63,
            "logprobs": 0,  # of the sampled tokens alone
            "return_token_ids": True,
            "ignore_eos": True,  # it ends where ours does, whatever its configuration lists
            "stop_token_ids": sorted(self.stop_ids),
        }
        if sampling.temperature:
            body |= sampling.cuts
        return body

    async def _ask(
        self, body: dict[str, Any], policy: str, conversation: Hashable
    ) -> tuple[int, list[int], list[float]]:
        """The server that answered, the tokens and their log-probabilities."""
        while True:
            place = self._router.take(conversation)
            try:
                return place, *(await self._answer(self._clients[place], body, policy))
            except (StalePolicy, ContextOverflow):
                raise
            except EngineError:
                self._watch()
                if not self._router.failed(place):
                    raise
                logger.warning("%s fails; its requests go to the other servers", self._clients[place].url)
            finally:
                self._router.release(place)

    async def _answer(self, client: Client, body: dict[str, Any], policy: str) -> tuple[list[int], list[float]]:
        def read(reply: Reply) -> tuple[list[int], list[float]]:
            return _tokens(reply.json(), body, policy)

        for _ in range(1 + self.spec.restarts):
            try:
                return await client.post("/v1/completions", body, read, self._refused)
            except _Forgotten:
                logger.info("%s does not have %s any more, and is given it again", client.url, body["model"])
                await asyncio.to_thread(self._bring, client, body["model"])
        return await client.post("/v1/completions", body, read, self._refused)

    def _refused(self, reply: Reply, text: str) -> Exception | None:
        if reply.status == 404 and "does not exist" in text:
            return _Forgotten()
        if reply.status == 404:
            return ResourceError(f"a server has no /v1/completions ({text}); expected vLLM")
        if reply.status == 400 and "maximum" in text and "length" in text:
            return ContextOverflow(text)
        return None

    # Adapters

    def _bring(self, client: Client, name: str) -> None:
        """The server has this adapter afterwards, as its list says. One of many threads does it."""
        with self._bringing:
            folder = self._folders.get(name)
            if folder is None:
                raise ResourceError(f"{client.url} does not have the model {name} any more")
            if self._listed(client, name) != folder:
                # Not in place where the name is new; where another folder had it, that one goes.
                body = {"lora_name": name, "lora_path": folder, "load_inplace": self._listed(client, name) is not None}
                client.now("POST", "/v1/load_lora_adapter", body, _nothing, self._not_loaded(name, folder))
            if (found := self._listed(client, name)) != folder:
                raise StalePolicy(f"{client.url} was given {name} from {folder}, and has it from {found}")

    def _listed(self, client: Client, name: str) -> str | None:
        """The folder from which the server says that it has an adapter."""
        return next((one.get("root") for one in self._models(client) if one.get("id") == name), None)

    def _models(self, client: Client) -> list[dict[str, Any]]:
        def read(reply: Reply) -> list[dict[str, Any]]:
            try:
                return [{**one, "id": str(one["id"])} for one in reply.json()["data"]]
            except (KeyError, TypeError):
                raise EngineError("its list of models is none") from None

        return client.now("GET", "/v1/models", None, read)

    def _not_loaded(self, name: str, folder: str) -> Callable[[Reply, str], Exception | None]:
        def refused(reply: Reply, text: str) -> Exception | None:
            if "max_lora_rank" in text:
                rank = read_json(Path(folder) / "adapter_config.json").get("r")
                return ResourceError(
                    f"the adapter {folder} has rank {rank}, more than the server takes ({text}); start it with "
                    f"--max-lora-rank {rank} (of a server of the run's own: inference.max_lora_rank={rank}), or train "
                    "one of a smaller rank (model.lora.rank)"
                )
            if reply.status in (404, 405) and "lora" not in text.lower():
                return ResourceError(
                    f"the server loads no adapters ({text}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                    "--enable-lora"
                )
            if reply.status in (400, 403, 404, 500):
                return ResourceError(
                    f"the server does not load {name} from {folder}, which it has to see under this path ({text})"
                )
            return None

        return refused

    # The server

    def _check(self, client: Client) -> None:
        models = [one for one in self._models(client) if not one.get("parent")]
        if not models:
            raise EngineError("it has no model")
        name, length = models[0]["id"], models[0].get("max_model_len")
        if self._base not in ("", name):
            raise ResourceError(
                f"inference.urls: {client.url} serves {name}, and another one {self._base}; expected one model under "
                "one name (--served-model-name)"
            )
        self._base = self._names[BASE_POLICY] = name
        if length is not None and length < self.max_length:
            raise ResourceError(
                f"inference.urls: {client.url} takes {length} tokens, and model.max_length is {self.max_length}; start "
                f"it with --max-model-len {self.max_length}, or lower model.max_length"
            )
        self._wake()
        self._check_tokenizer(client, name)
        if not self._ours:
            self._check_logprobs(client, name)

    def _check_tokenizer(self, client: Client, name: str) -> None:
        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        text = PROBE + self.format.render(talk, [], generate=True)

        def read(reply: Reply) -> list[int]:
            return list(reply.json().get("tokens") or [])

        body = {"model": name, "prompt": text, "add_special_tokens": False}
        theirs, ours = client.now("POST", "/tokenize", body, read), self.format.encode(text)
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            where = f"from token {at} on" if at is not None else f"{len(theirs)} tokens against {len(ours)}"
            raise ResourceError(
                f"inference.urls: the tokenizer of {client.url} ({name}) is not that of model.name: a text comes out "
                f"differently {where}. Serve the model that is trained"
            )

    def _check_logprobs(self, client: Client, name: str) -> None:
        """The only token that is left by top_k=1 has the log-probability 0, if the server says it after the cut."""
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
        _, logprobs = client.now("POST", "/v1/completions", body, lambda reply: _tokens(reply.json(), body, name))
        if min(logprobs) < -PROCESSED:
            raise ResourceError(
                f"inference.urls: {client.url} gives log-probabilities of another distribution than it draws from; "
                "start it with --logprobs-mode processed_logprobs"
            )

    def _wake(self) -> None:
        if self.spec.sleep:
            for client in self._clients:
                if client.now("GET", "/is_sleeping", None, lambda reply: reply.json()["is_sleeping"], self._no_sleep):
                    client.now("POST", "/wake_up", {}, _nothing, self._no_sleep)

    def _no_sleep(self, reply: Reply, text: str) -> Exception | None:
        if reply.status == 404:
            return ResourceError(
                f"inference.sleep: the server does not sleep ({text}); start it with VLLM_SERVER_DEV_MODE=1 and "
                "--enable-sleep-mode, on a GPU, or set inference.sleep=false"
            )
        return None


def continued(request: ChatRequest) -> str | None:
    """The conversation up to the last answer in it, as `Router` knows it; None where there is no answer yet."""
    for turn in range(len(request.messages) - 1, -1, -1):
        if request.messages[turn]["role"] == "assistant":
            return key_of(request.messages[: turn + 1], request.tools)
    return None


def stop_ids(base_dir: Path, chat: ChatFormat) -> frozenset[int]:
    """Tokens that end an answer: those that the model's files list, and the end of a turn."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(base_dir).eos_token_id
    except OSError:  # no such file: transformers reads the model's configuration then
        declared = json.loads((base_dir / "config.json").read_text()).get("eos_token_id")
    listed = declared if isinstance(declared, list) else [declared]
    return frozenset([*(token for token in listed if token is not None), chat.end_id])


def _tokens(answer: dict[str, Any], asked: dict[str, Any], policy: str) -> tuple[list[int], list[float]]:
    """Sampled tokens and their log-probabilities. Raises Failed for an answer that is none, StalePolicy for one by
    another model than was asked, ResourceError for one without token ids."""
    try:
        model, choice = str(answer["model"]), answer["choices"][0]
        sampled, given = choice.get("token_ids"), choice.get("logprobs")
        if sampled is None or given is None:
            raise ResourceError("a server answers without token ids and log-probabilities; expected vLLM")
        logprobs = [float(one) for one in given["token_logprobs"]]
        tokens = [int(token) for token in sampled]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Failed(f"an answer that is none ({type(error).__name__}: {error})", empty=True) from None
    if model != asked["model"]:
        raise StalePolicy(f"asked for policy {policy} ({asked['model']}), and {model} answered")
    if not tokens or len(tokens) != len(logprobs) or not math.isfinite(sum(logprobs)):
        raise Failed(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities, not all of them finite", empty=True)
    return tokens, logprobs


def _nothing(reply: Reply) -> None:
    """The status says it all."""
