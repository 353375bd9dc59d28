"""The training service: sessions of clients, their models, checkpoints and samples, and the results of requests.

Requests to a model run in the order of their numbers, one at a time over all models; they may arrive in any order, and
while earlier ones run. A request is answered with an id at once. Its result is fetched with that id, as often as the
client asks: ids are made of the numbers that clients give, so a request that is sent again has the same id and runs
once. Everything is on disk (`journal`, `trainer`): after a crash the service continues unfinished requests.

    sessions/ID/   models/ID.json   checkpoints/MODEL/KIND/NAME.json   states/KEY/

`retention` says which of them are needed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from components.errors import EspalierError, SpecError
from components.inference.refusals import message_of
from components.json_text import read_json, write_json
from components.specs.validation import validate
from flows.train_service import bodies
from flows.train_service.batch import ClientBatch, pass_output, read_batch
from flows.train_service.bodies import Body, LoraConfig
from flows.train_service.checkpoints import Checkpoints, is_id
from flows.train_service.entries import ModelEntry
from flows.train_service.journal import FAILED, Journal, Result, StoredRequest
from flows.train_service.messages import PROTO_TYPE
from flows.train_service.runs import ModelRuns
from flows.train_service.sampler import Sampler
from flows.train_service.sessions import ClientSessions, session_of
from flows.train_service.trainer import AdapterTrainer, Model

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

JSON_TYPE = "application/json"
MODELS_IN_MEMORY = 16
"""Models whose adapters are in memory at a time; others are read from their last state when they are needed."""
STRAY_SECONDS = 600.0
"""Time for which a request waits for an earlier number that has not arrived."""


@dataclass(frozen=True)
class ServedBase:
    """Base model of a service and its folder."""

    names: tuple[str, ...]
    """Names by which clients may ask for it."""
    tokenizer: str
    """Hub name or folder of its tokenizer."""
    root: Path


class Service:
    """All that the routes need. Its coroutines run on one event loop. runs: None records no runs."""

    def __init__(self, place: ServedBase, trainer: AdapterTrainer, sampler: Sampler, runs: ModelRuns | None = None):
        self.place, self.trainer, self._sampler, self._runs = place, trainer, sampler, runs
        self.sessions, self._journal = ClientSessions(place.root / "sessions"), Journal(place.root / "sessions")
        self.checkpoints = Checkpoints(place.root / "checkpoints")
        self._done: dict[str, asyncio.Event] = {}
        """Event of each request that has no result yet."""
        self._unwritten: dict[str, Result] = {}
        """Failures of the requests whose results could not be written."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._training: asyncio.Task[None] | None = None
        self._compute = asyncio.Lock()
        self.models: dict[str, ModelEntry] = {}
        for path in sorted((place.root / "models").glob("*.json")):
            data = read_json(path)
            entry = ModelEntry(**{**data, "config": LoraConfig(**data["config"])})
            self.models[entry.id] = entry

    def resume(self) -> None:
        """Continue the requests that an earlier process has not finished."""
        for owner in self._journal.owners():
            finished = set(self._journal.numbers(owner, "result"))
            for number in self._journal.numbers(owner):
                if number not in finished:
                    self._begin(owner, number)
                elif owner in self.models:
                    entry = self.models[owner]
                    entry.next = max(entry.next, number + 1)

    def models_of(self, session: str) -> list[ModelEntry]:
        """Return the models of a session."""
        return [entry for entry in self.models.values() if session_of(entry.id) == session]

    async def finish_session(self, session: str, reason: dict[str, Any]) -> None:
        """Finish a session, and the runs of its models. Raises HTTPException as `ClientSessions.get`."""
        self.sessions.finish(session, reason)
        async with self._compute:  # a request of the session may still run
            for entry in self.models_of(session):
                self._forget(entry)
                if self._runs is not None:
                    await asyncio.to_thread(self._runs.end, entry)

    # Requests with a future

    def submit(self, owner: str, number: int, kind: str, body: bytes) -> str:
        """Accept a request; return its id. The same request may be sent again. Raises HTTPException for a number that
        another request has, and for a session that is finished."""
        self.sessions.get(session_of(owner))
        request, earlier = StoredRequest.of(kind, body), self._journal.request(owner, number)
        if earlier is None:
            entry = self.models.get(owner)
            if entry is not None and number < entry.next:
                raise HTTPException(400, f"seq_id {number} of {owner} is late; its next number is {entry.next}")
            with suppress(OSError):  # then its turn fails
                self._journal.add(owner, number, request)
            self._begin(owner, number)
        elif (earlier.kind, earlier.digest) != (kind, request.digest):
            raise HTTPException(400, f"seq_id {number} of {owner} is that of another request; numbers count up from 1")
        return f"{owner}:{number}"

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """Return the result of a request; None if it has none after some seconds. Raises HTTPException for an unknown
        id."""
        owner, _, number = request_id.rpartition(":")
        if not number.isdecimal() or len(number) > 20 or not is_id(owner):
            raise HTTPException(404, f"no request {request_id!r:.120}")
        if (event := self._done.get(request_id)) is not None:
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        result = self._unwritten.get(request_id) or self._journal.result(owner, int(number))
        if result is None:
            raise HTTPException(404, f"no request {request_id!r:.120}")
        return result

    def _begin(self, owner: str, number: int) -> None:
        self._done[f"{owner}:{number}"] = asyncio.Event()
        if owner in self.models and number > 0:
            self.models[owner].arrived[number] = time.monotonic()
            if self._training is None or self._training.done():
                self._training = asyncio.create_task(self._train())
            return
        task = asyncio.create_task(self._finish(owner, number, self._answer(owner, number)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, owner: str, number: int, answer: Any) -> None:
        """Await an answer and write it as the request's result: JSON data, or the bytes of a message."""
        request_id, entry = f"{owner}:{number}", self.models.get(owner)
        try:
            value = await answer
            kind, content = (PROTO_TYPE, value) if isinstance(value, bytes) else (JSON_TYPE, json.dumps(value).encode())
            result = Result(kind, content)
        except Exception as error:  # noqa: BLE001  # the result of the request
            result = self._failure(request_id, error)
        try:
            self._journal.finish(owner, number, result)
            if entry is None:
                self._journal.drop(owner, number)
        except OSError as error:
            self._unwritten[request_id] = self._failure(request_id, error)
            self._journal.remove(owner, number)
            if entry is not None:
                async with self._compute:
                    self._forget(entry)  # its next step applies the batches whose results are on disk
        if event := self._done.pop(request_id, None):
            event.set()

    def _failure(self, request_id: str, error: Exception) -> Result:
        user = isinstance(error, EspalierError | HTTPException)
        if not user:
            logger.error("request %s failed", request_id, exc_info=error)
        text = message_of(error)
        if isinstance(error, OSError) and not user:
            text = f"the service cannot write below {self.place.root.name}: {error.strerror}"
        return Result(FAILED, json.dumps({"error": text, "category": "user" if user else "server"}).encode())

    async def _train(self) -> None:
        """Run the requests of the models in turn, as long as one is due."""
        while due := [entry for entry in self.models.values() if entry.arrived]:
            ready = [entry for entry in due if entry.next in entry.arrived]
            for entry in ready:
                number = entry.next
                del entry.arrived[number]
                await self._finish(entry.id, number, self._answer(entry.id, number))
                entry.next += 1
            if not ready:
                await asyncio.sleep(0.05)
                await self._refuse_strays(due)

    async def _refuse_strays(self, due: list[ModelEntry]) -> None:
        for entry in due:
            first = min(entry.arrived)
            if entry.next in entry.arrived or time.monotonic() - entry.arrived[first] < STRAY_SECONDS:
                continue
            del entry.arrived[first]
            text = f"{first}: {entry.next} is the next number of this model, and did not arrive within "
            await self._finish(entry.id, first, _raise(SpecError.at("seq_id", f"{text}{STRAY_SECONDS:g} s")))
            entry.next = first + 1

    async def _answer(self, owner: str, number: int) -> Any:
        """Compute the answer to a request. Raises HTTPException if its session was finished meanwhile."""
        self.sessions.get(session_of(owner))
        request = self._journal.request(owner, number)
        if request is None:
            raise OSError(errno.ENOSPC, "the request is not on disk")
        match request.kind:
            case "create_model":
                return await self._create(owner, _parse(bodies.CreateModel, request.body))
            case "create_from":
                return await self._create_from(owner, _parse(bodies.CreateFrom, request.body))
            case "asample":
                state = self._state_of(owner)
                return await self._sampler.sample(f"{owner}:{number}", _parse(bodies.Sample, request.body), state)
        entry = self.models[owner]
        if number == entry.applied:  # the state was saved, and the process ended before it wrote the result
            return entry.answer
        async with self._compute:
            try:
                return await self._run(entry, await self._in_memory(entry), number, request)
            except BaseException:
                self._forget(entry)  # its last state is on disk
                raise

    async def _run(self, entry: ModelEntry, model: Model, number: int, request: StoredRequest) -> Any:
        """Run a request on its model."""
        match request.kind:
            case "forward_backward":
                return await asyncio.to_thread(self._pass, model, request.body)
            case "optim_step":
                params = _parse(bodies.OptimStep, request.body).adam_params
                metrics = await asyncio.to_thread(self.trainer.optimizer_step, model, params)
                answer = self._applied(entry, number, {"metrics": metrics}, steps=entry.steps + 1)
                if self._runs is not None:
                    self._runs.log(entry, metrics)
                return answer
            case "load_weights":
                load = _parse(bodies.LoadWeights, request.body)
                state = self.checkpoints.get(load.path)["state"]
                await asyncio.to_thread(self.trainer.load, model, state, optimizer=load.optimizer)
                return self._applied(entry, number, {"path": load.path, "model_id": entry.id, "type": request.kind})
            case "save_weights":
                save = _parse(bodies.SaveWeights, request.body)
                path = self.checkpoints.save(entry.id, "weights", save, entry.content)
                return {"path": path, "type": request.kind}
            case _:
                return self._save_for_sampler(entry, number, _parse(bodies.SaveForSampler, request.body))

    def _pass(self, model: Model, body: bytes) -> bytes:
        """Compute a batch in a thread of its own, so that requests arrive meanwhile. Return the result."""
        batch = read_batch(body, self.trainer.limits)
        compute = self.trainer.forward if batch.forward_only else self.trainer.forward_backward
        return pass_output(batch, *compute(model, batch))

    def _applied(self, entry: ModelEntry, number: int, answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Record that a request has changed the state of a model, with its answer, in one write. The requests since the
        last change are not computed again."""
        assert entry.model is not None
        changes |= {"state": entry.model.state, "applied": number, "answer": answer}
        self._write(entry.saved() | changes)
        with suppress(OSError):
            for earlier in range(entry.applied, number + 1):
                self._journal.drop(entry.id, earlier)
        vars(entry).update(changes)
        return answer

    async def _in_memory(self, entry: ModelEntry) -> Model:
        """Return a model, read from its state if it is not in memory, with the batches of its next step."""
        if entry.model is None:
            self._make_room()
            model = await asyncio.to_thread(self.trainer.restore, entry.config, entry.state)
            model.batches = self._batches_since(entry)
            entry.model = model
            if self._runs is not None:
                await asyncio.to_thread(self._runs.begin, entry)
        self.models[entry.id] = self.models.pop(entry.id)  # the most recently used is the last
        return entry.model

    def _batches_since(self, entry: ModelEntry) -> list[ClientBatch]:
        """Return the batches that the next step applies: those since the last change of a model's state, or the last
        step that failed, which has dropped those before it."""
        batches: list[ClientBatch] = []
        for number in self._journal.numbers(entry.id, "result"):
            if number <= entry.applied:
                continue
            request, result = self._journal.request(entry.id, number), self._journal.result(entry.id, number)
            if request is None or result is None:
                continue
            if request.kind == "optim_step":
                batches = []
            elif request.kind == "forward_backward" and result.media_type != FAILED:
                batch = read_batch(request.body, self.trainer.limits)
                batches += [] if batch.forward_only else [batch]
        return batches

    def _make_room(self) -> None:
        """Take the least recently used models out of memory, so that one more fits."""
        for other in [other for other in self.models.values() if other.model][: -MODELS_IN_MEMORY + 1]:
            self._forget(other)

    def _forget(self, entry: ModelEntry) -> None:
        if entry.model is not None:
            self.trainer.forget(entry.model)
            entry.model = None

    # Models

    async def _create(self, owner: str, asked: bodies.CreateModel) -> dict[str, Any]:
        config = asked.lora_config
        if config.seed is None:
            config = config.model_copy(update={"seed": secrets.randbits(31)})
        await self._add(owner, asked.base_model, config, asked.user_metadata)
        return {"model_id": owner, "type": "create_model"}

    async def _create_from(self, owner: str, asked: bodies.CreateFrom) -> dict[str, Any]:
        saved = self.checkpoints.get(asked.path)
        config, state = LoraConfig(**saved["config"]), (saved["state"], asked.optimizer)
        await self._add(owner, asked.base_model or saved["base"], config, asked.user_metadata, state)
        return {"path": asked.path, "model_id": owner, "type": "load_weights"}

    async def _add(
        self, owner: str, base: str, config: LoraConfig, metadata: Any, state: tuple[str, bool] | None = None
    ) -> None:
        """Add a model. state: key of the state that it begins with, and True if its optimizer is loaded too."""
        self._checked(base)
        if owner in self.models:
            return  # created before a restart
        async with self._compute:
            self._make_room()
            model = await asyncio.to_thread(self.trainer.create, config)
            if state is not None:
                await asyncio.to_thread(self.trainer.load, model, state[0], optimizer=state[1])
            entry = ModelEntry(owner, base, config, model.state, metadata=metadata, created=time.time(), model=model)
            if self._runs is not None:
                await asyncio.to_thread(self._runs.begin, entry)
            self._write(entry.saved())
            self.models[owner] = entry

    def _checked(self, base: str) -> str:
        """Return the name of a base. Raises SpecError for one that is not served."""
        if base not in self.place.names:
            names = ", ".join(repr(name) for name in self.place.names)
            raise SpecError.at("base_model", f"{base!r:.120} is not served here; expected {names}")
        return base

    def _write(self, data: dict[str, Any]) -> None:
        write_json(self.place.root / "models" / f"{data['id']}.json", data)

    def model(self, model_id: str) -> ModelEntry:
        """Return a model. Raises HTTPException if it does not exist."""
        if model_id not in self.models:
            raise HTTPException(404, f"no model {model_id!r:.120} here; create it, or load a checkpoint")
        return self.models[model_id]

    # Samplers

    def _save_for_sampler(self, entry: ModelEntry, number: int, asked: bodies.SaveForSampler) -> dict[str, Any]:
        if asked.path is not None:
            path = self.checkpoints.save(entry.id, "sampler_weights", asked, entry.content)
            return {"path": path, "type": "save_weights_for_sampler"}
        own = asked.sampling_session_seq_id
        sampler = f"{session_of(entry.id)}:sample:{number if own is None else own}"
        self.sessions.add_sampler(sampler, entry.base, entry.state)
        return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

    def create_sampler(self, asked: bodies.CreateSampler) -> str:
        """Return the id of a sampling session. Raises HTTPException for unknown weights, SpecError for another base."""
        self.sessions.get(asked.session_id)
        sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            saved = self.checkpoints.get(asked.model_path)
            self.sessions.add_sampler(sampler, saved["base"], saved["state"], asked.model_path)
        else:
            self.sessions.add_sampler(sampler, self._checked(asked.base_model or ""))
        return sampler

    def _state_of(self, sampler: str) -> Path | None:
        data = self.sessions.sampler(sampler)
        if data["path"] is not None:
            self.checkpoints.get(data["path"])  # it may have been deleted since
        return None if data["state"] is None else self.trainer.state(data["state"])


def _parse(kind: type[B], body: bytes) -> B:
    return validate(kind, json.loads(body), configuration=False)


async def _raise(error: Exception) -> Any:
    raise error
