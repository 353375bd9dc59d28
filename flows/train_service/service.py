"""The training service: sessions of clients, their models, checkpoints and samples, and the results of requests.

Requests to a model run in the order of their numbers, one at a time over all models; they may arrive in any order, and
while earlier ones run. A request is answered with an id at once. Its result is fetched with that id, as often as the
client asks: ids are made of the numbers that clients give, so a request that is sent again has the same id and runs
once. Everything is on disk (`journal`, `trainer`): after a crash the service continues unfinished requests.

    sessions/ID.json   models/ID.json   samplers/ID.json   checkpoints/MODEL/KIND/NAME.json   requests/   states/
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
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
from flows.train_service.journal import FAILED, Journal, Result
from flows.train_service.messages import PROTO_TYPE
from flows.train_service.sampler import Sampler
from flows.train_service.trainer import AdapterTrainer, Model

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

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
    """All that the routes need. Its coroutines run on one event loop."""

    def __init__(self, place: ServedBase, trainer: AdapterTrainer, sampler: Sampler):
        self.place, self.trainer, self._sampler = place, trainer, sampler
        self._journal = Journal(place.root / "requests")
        self.checkpoints = Checkpoints(place.root / "checkpoints")
        self._done: dict[str, asyncio.Event] = {}
        """Event of each request that has no result yet."""
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
                    kind, body = self._journal.request(owner, number) or ("", b"")
                    self._begin(owner, number, kind, body)
                elif owner in self.models:
                    entry = self.models[owner]
                    entry.next = max(entry.next, number + 1)

    # Sessions

    def create_session(self, asked: bodies.CreateSession) -> str:
        session = uuid.uuid4().hex
        self._write("sessions", session, {**asked.model_dump(exclude={"type"}), "created": time.time()})
        return session

    def session(self, session: str) -> dict[str, Any]:
        """Return a session. Raises HTTPException for one that does not exist, or is finished."""
        data = self._read("sessions", session)
        if data is None:
            raise HTTPException(404, f"no session {session!r:.80}; create one")
        if "finished" in data:
            raise HTTPException(410, f"the session {session} is finished; create another one")
        return data

    async def finish_session(self, session: str, reason: dict[str, Any]) -> None:
        data = self.session(session)
        self._write("sessions", session, {**data, "finished": time.time(), "reason": reason})
        async with self._compute:  # a request of the session may still run
            for entry in self.models.values():
                if entry.id.startswith(f"{session}:"):
                    self._forget(entry)

    # Requests with a future

    def submit(self, owner: str, number: int, kind: str, body: bytes) -> str:
        """Accept a request; return its id. The same request may be sent again. Raises HTTPException for a number that
        another request has."""
        earlier = self._journal.request(owner, number)
        if earlier is None:
            entry = self.models.get(owner)
            if entry is not None and number < entry.next:
                raise HTTPException(400, f"seq_id {number} of {owner} is late; its next number is {entry.next}")
            self._journal.add(owner, number, kind, body)
            self._begin(owner, number, kind, body)
        elif earlier != (kind, body):
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
        result = self._journal.result(owner, int(number))
        if result is None:
            raise HTTPException(404, f"no request {request_id!r:.120}")
        return result

    def _begin(self, owner: str, number: int, kind: str, body: bytes) -> None:
        self._done[f"{owner}:{number}"] = asyncio.Event()
        if owner in self.models and number > 0:
            self.models[owner].arrived[number] = time.monotonic()
            if self._training is None or self._training.done():
                self._training = asyncio.create_task(self._train())
            return
        task = asyncio.create_task(self._finish(owner, number, self._answer(owner, number, kind, body)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, owner: str, number: int, answer: Any) -> None:
        """Await an answer and write it as the request's result: JSON data, or the bytes of a message."""
        try:
            value = await answer
            if isinstance(value, bytes):
                result = Result(PROTO_TYPE, value)
            else:
                result = Result("application/json", json.dumps(value).encode())
        except Exception as error:
            user = isinstance(error, EspalierError | HTTPException)
            if not user:
                logger.exception("request %s:%d failed", owner, number)
            text = message_of(error)
            failure = {"error": text, "category": "user" if user else "server"}
            result = Result(FAILED, json.dumps(failure).encode())
        self._journal.finish(owner, number, result)
        if event := self._done.pop(f"{owner}:{number}", None):
            event.set()

    async def _train(self) -> None:
        """Run the requests of the models in turn, as long as one is due."""
        while due := [entry for entry in self.models.values() if entry.arrived]:
            ready = [entry for entry in due if entry.next in entry.arrived]
            for entry in ready:
                number = entry.next
                del entry.arrived[number]
                kind, body = self._journal.request(entry.id, number) or ("", b"")
                await self._finish(entry.id, number, self._answer(entry.id, number, kind, body))
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

    async def _answer(self, owner: str, number: int, kind: str, body: bytes) -> Any:
        """Compute the answer to a request."""
        match kind:
            case "create_model":
                return await self._create(owner, _parse(bodies.CreateModel, body))
            case "create_from":
                return await self._create_from(owner, _parse(bodies.CreateFrom, body))
            case "asample":
                state = self._state_of(owner)
                return await self._sampler.sample(f"{owner}:{number}", _parse(bodies.Sample, body), state)
        entry = self.models[owner]
        if number == entry.applied:  # the state was saved, and the process ended before it wrote the result
            return entry.answer
        async with self._compute:
            try:
                return await self._run(entry, await self._in_memory(entry), number, kind, body)
            except BaseException:
                self._forget(entry)  # its last state is on disk
                raise

    async def _run(self, entry: ModelEntry, model: Model, number: int, kind: str, body: bytes) -> Any:
        """Run a request on its model."""
        match kind:
            case "forward_backward":
                batch = read_batch(body, self.trainer.limits)[2]
                compute = self.trainer.forward if batch.forward_only else self.trainer.forward_backward
                return pass_output(batch, *await asyncio.to_thread(compute, model, batch))
            case "optim_step":
                params = _parse(bodies.OptimStep, body).adam_params
                metrics = await asyncio.to_thread(self.trainer.optimizer_step, model, params)
                return self._applied(entry, number, {"metrics": metrics})
            case "load_weights":
                load = _parse(bodies.LoadWeights, body)
                state = self.checkpoints.get(load.path)["state"]
                await asyncio.to_thread(self.trainer.load, model, state, optimizer=load.optimizer)
                return self._applied(entry, number, {"path": load.path, "model_id": entry.id, "type": kind})
            case "save_weights":
                save = _parse(bodies.SaveWeights, body)
                path = self.checkpoints.save(entry.id, "weights", save, entry.content, overwrite=save.overwrite)
                return {"path": path, "type": kind}
            case _:
                return self._save_for_sampler(entry, number, _parse(bodies.SaveForSampler, body))

    def _applied(self, entry: ModelEntry, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Record that a request has changed the state of a model, with its answer, in one write."""
        assert entry.model is not None
        entry.state, entry.applied, entry.answer = entry.model.state, number, answer
        self._write("models", entry.id, entry.saved())
        return answer

    async def _in_memory(self, entry: ModelEntry) -> Model:
        """Return a model, read from its state if it is not in memory, with the batches of its next step."""
        if entry.model is None:
            self._make_room()
            model = await asyncio.to_thread(self.trainer.restore, entry.id, entry.config, entry.state)
            model.batches = self._batches_since(entry)
            entry.model = model
        self.models[entry.id] = self.models.pop(entry.id)  # the most recently used is the last
        return entry.model

    def _batches_since(self, entry: ModelEntry) -> list[ClientBatch]:
        """Return the batches that the next step applies: those since the last change of a model's state, or the last
        step that failed, which has dropped those before it."""
        batches: list[ClientBatch] = []
        for number in self._journal.numbers(entry.id):
            if number <= entry.applied or (result := self._journal.result(entry.id, number)) is None:
                continue
            kind, body = self._journal.request(entry.id, number) or ("", b"")
            if kind == "optim_step":
                batches = []
            elif kind == "forward_backward" and result.media_type != FAILED:
                batch = read_batch(body, self.trainer.limits)[2]
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
        self._check_base(asked.base_model)
        config = asked.lora_config
        if config.seed is None:
            config = config.model_copy(update={"seed": secrets.randbits(31)})
        await self._add(owner, asked.base_model, config, asked.user_metadata, None, optimizer=False)
        return {"model_id": owner, "type": "create_model"}

    async def _create_from(self, owner: str, asked: bodies.CreateFrom) -> dict[str, Any]:
        saved = self.checkpoints.get(asked.path)
        base = asked.base_model or saved["base"]
        self._check_base(base)
        config = LoraConfig(**saved["config"])
        await self._add(owner, base, config, asked.user_metadata, saved["state"], optimizer=asked.optimizer)
        return {"path": asked.path, "model_id": owner, "type": "load_weights"}

    async def _add(
        self, owner: str, base: str, config: LoraConfig, metadata: Any, state: str | None, *, optimizer: bool
    ) -> None:
        if owner in self.models:
            return  # created before a restart
        async with self._compute:
            self._make_room()
            model = await asyncio.to_thread(self.trainer.create, owner, config)
            if state is not None:
                await asyncio.to_thread(self.trainer.load, model, state, optimizer=optimizer)
            entry = ModelEntry(owner, base, config, model.state, metadata=metadata, created=time.time(), model=model)
            self._write("models", owner, entry.saved())
            self.models[owner] = entry

    def _check_base(self, base: str) -> None:
        if base not in self.place.names:
            names = ", ".join(repr(name) for name in self.place.names)
            raise SpecError.at("base_model", f"{base!r:.120} is not served here; expected {names}")

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
        session = entry.id.partition(":")[0]
        sampler = (
            f"{session}:sample:{number if asked.sampling_session_seq_id is None else asked.sampling_session_seq_id}"
        )
        self._write("samplers", sampler, {"base": entry.base, "state": entry.state, "path": None})
        return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

    def create_sampler(self, asked: bodies.CreateSampler) -> str:
        """Return the id of a sampling session. Raises HTTPException for unknown weights, SpecError for another base."""
        self.session(asked.session_id)
        sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            saved = self.checkpoints.get(asked.model_path)
            data = {"base": saved["base"], "state": saved["state"], "path": asked.model_path}
        else:
            self._check_base(asked.base_model or "")
            data = {"base": asked.base_model, "state": None, "path": None}
        self._write("samplers", sampler, data)
        return sampler

    def sampler(self, sampler: str) -> dict[str, Any]:
        """Return a sampling session. Raises HTTPException if it does not exist."""
        data = self._read("samplers", sampler)
        if data is None:
            raise HTTPException(404, f"no sampling session {sampler!r:.120}; create one")
        return data

    def _state_of(self, sampler: str) -> Path | None:
        data = self.sampler(sampler)
        if data["path"] is not None:
            self.checkpoints.get(data["path"])  # it may have been deleted since
        return None if data["state"] is None else self.trainer.state(data["state"])

    def _write(self, kind: str, name: str, data: dict[str, Any]) -> None:
        write_json(self.place.root / kind / f"{name}.json", data)

    def _read(self, kind: str, name: str) -> dict[str, Any] | None:
        path = self.place.root / kind / f"{name}.json"
        return dict(read_json(path)) if is_id(name) and path.is_file() else None


def _parse(kind: type[B], body: bytes) -> B:
    return validate(kind, json.loads(body), configuration=False)


async def _raise(error: Exception) -> Any:
    raise error
