"""The application of the training service: the routes of the Tinker API below /api/v1.

Errors have the statuses that the client expects: 400 for a request that is refused, 404 for what does not exist, 408
for a result that is not there yet (the client asks again), 410 for a finished session. Errors of a request with a
future are its result: `{"error": …, "category": "user" | "server"}`. Telemetry of the client is read and dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from components.errors import EspalierError
from components.inference.connection import PendingBytes, read_body, read_json_object
from components.inference.refusals import refuse
from components.specs.validation import validate
from flows.train_service import bodies
from flows.train_service.bodies import Body
from flows.train_service.checkpoints import SCHEME, date
from flows.train_service.entries import ModelEntry
from flows.train_service.journal import FAILED
from flows.train_service.messages import PROTO_TYPE, message
from flows.train_service.service import Service

B = TypeVar("B", bound=Body)

POLL_SECONDS = 25.0
"""Longest wait for a result in one request; the client waits for 45 s."""
CHUNK_BYTES = 2_000_000
"""Largest number of bytes of a batch in one request of a client, which divides larger ones."""
Count = Annotated[int, Query(ge=0)]


def create_app(service: Service) -> FastAPI:
    """Return the application of a service."""
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    pending = PendingBytes()
    resumed = False

    async def parse(request: Request, kind: type[B]) -> B:
        return validate(kind, await read_json_object(request, pending), configuration=False)

    def future(owner: str, number: int, kind: str, body: bytes | Body) -> dict[str, Any]:
        stored = body if isinstance(body, bytes) else body.model_dump_json(exclude_unset=True).encode()
        return {"request_id": service.submit(owner, number, kind, stored), "model_id": owner}

    @app.middleware("http")
    async def resume(request: Request, proceed: Any) -> Any:
        nonlocal resumed
        if not resumed:  # on the event loop of the server
            resumed = True
            service.resume()
        return await proceed(request)

    @app.get("/health")
    @app.get("/api/v1/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/api/v1/client/config")
    async def client_config() -> dict[str, Any]:
        return {"fwdbwd_max_chunk_bytes_count": CHUNK_BYTES, "use_pyqwest_transport": False}

    @app.post("/api/v1/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {}

    @app.post("/api/v1/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        await read_body(request, pending)
        return {"status": "accepted"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        common = {"max_context_length": service.trainer.limits.max_length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **common} for name in service.place.names]}

    # Sessions

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        session = service.sessions.create(await parse(request, bodies.CreateSession))
        return {"type": "create_session", "session_id": session}

    @app.post("/api/v1/session_heartbeat")
    async def session_heartbeat(request: Request) -> dict[str, str]:
        service.sessions.heartbeat((await parse(request, bodies.OfSession)).session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish_session(session: str, request: Request) -> Response:
        await service.finish_session(session, await read_json_object(request, pending))
        return Response(status_code=204)

    @app.get("/api/v1/sessions")
    async def sessions(limit: Count = 20, offset: Count = 0) -> dict[str, Any]:
        return {"sessions": service.sessions.ids()[offset : offset + limit]}

    @app.get("/api/v1/sessions/{session}")
    async def get_session(session: str) -> dict[str, Any]:
        data = service.sessions.get(session)
        return {
            "training_run_ids": [entry.id for entry in service.models_of(session)],
            "sampler_ids": service.sessions.samplers(session),
            "user_metadata": data["user_metadata"],
            "display_name": data["display_name"],
        }

    # Training

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        asked = await parse(request, bodies.CreateModel)
        return future(f"{asked.session_id}:train:{asked.model_seq_id}", 0, "create_model", asked)

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        entry = service.model((await parse(request, bodies.OfModel)).model_id)
        data = {"model_name": entry.base, "tokenizer_id": service.place.tokenizer}
        return {"type": "get_info", "model_data": data, "model_id": entry.id, "is_lora": True,
                "lora_rank": entry.config.rank, "model_name": entry.base}  # fmt: skip

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "") != PROTO_TYPE or request.headers.get("content-encoding"):
            raise HTTPException(400, f"expected a body of type {PROTO_TYPE}, not compressed")
        body = await read_body(request, pending)
        try:
            head = message("ForwardBackwardRequest", body)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        service.model(head.model_id)
        return future(head.model_id, head.seq_id, "forward_backward", body)

    def training(content: dict[str, Any], kind: str) -> dict[str, Any]:
        """Accept a request to a model. The client has counted its number, so what is wrong with the rest is its result:
        without it, the requests after it would wait."""
        numbered = {name: content[name] for name in ("model_id", "seq_id") if name in content}
        asked = validate(bodies.Training, numbered, configuration=False)
        service.model(asked.model_id)
        return future(asked.model_id, asked.seq_id, kind, json.dumps(content, sort_keys=True).encode())

    @app.post("/api/v1/optim_step")
    @app.post("/api/v1/save_weights")
    @app.post("/api/v1/save_weights_for_sampler")
    async def train(request: Request) -> dict[str, Any]:
        return training(await read_json_object(request, pending), request.url.path.rpartition("/")[2])

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        content = await read_json_object(request, pending)
        if content.get("session_id") is None:
            return training(content, "load_weights")
        asked = validate(bodies.CreateFrom, content, configuration=False)
        return future(f"{asked.session_id}:train:{asked.model_seq_id}", 0, "create_from", asked)

    # Samples and results

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        sampler = service.create_sampler(await parse(request, bodies.CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @app.get("/api/v1/samplers/{sampler}")
    async def get_sampler(sampler: str) -> dict[str, Any]:
        data = service.sessions.sampler(sampler)
        return {"sampler_id": sampler, "base_model": data["base"], "model_path": data["path"]}

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> dict[str, Any]:
        asked = await parse(request, bodies.Sample)
        service.sessions.sampler(asked.sampling_session_id)
        accepted = future(asked.sampling_session_id, asked.seq_id, "asample", asked)
        names = [f"{accepted['request_id']}:{index}" for index in range(asked.num_samples)]
        return accepted | {"sample_sequence_ids": names}

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        asked = await parse(request, bodies.RetrieveFuture)
        result = await service.result(asked.request_id, POLL_SECONDS)
        if result is None:
            waiting = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408, {"x-should-retry": "false"})
        kind = "application/json" if result.media_type == FAILED else result.media_type
        return Response(result.content, media_type=kind)

    # Checkpoints and models

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        saved = service.checkpoints.get((await parse(request, bodies.Checkpoint)).tinker_path)
        config = saved["config"]
        flags = {name: config[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": saved["base"], "is_lora": True, "lora_rank": config["rank"], **flags}

    def run_of(entry: ModelEntry) -> dict[str, Any]:
        latest = {saved["checkpoint_type"]: saved for saved in reversed(service.checkpoints.listed(entry.id))}
        return {"training_run_id": entry.id, "base_model": entry.base, "model_owner": "espalier", "is_lora": True,
                "lora_rank": entry.config.rank, "last_request_time": date(entry.created),
                "last_checkpoint": latest.get("training"), "last_sampler_checkpoint": latest.get("sampler"),
                "user_metadata": entry.metadata}  # fmt: skip

    def page(name: str, entries: Sequence[Any], limit: int, offset: int) -> dict[str, Any]:
        cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
        return {name: entries[offset : offset + limit], "cursor": cursor}

    @app.get("/api/v1/training_runs")
    async def training_runs(limit: Count = 20, offset: Count = 0) -> dict[str, Any]:
        entries = sorted(service.models.values(), key=lambda entry: -entry.created)
        listed = page("training_runs", entries, limit, offset)
        return listed | {"training_runs": [run_of(entry) for entry in listed["training_runs"]]}

    @app.get("/api/v1/training_runs/{model}")
    async def training_run(model: str) -> dict[str, Any]:
        return run_of(service.model(model))

    @app.get("/api/v1/checkpoints")
    async def all_checkpoints(limit: Count = 100, offset: Count = 0) -> dict[str, Any]:
        return page("checkpoints", service.checkpoints.listed(), limit, offset)

    @app.get("/api/v1/training_runs/{model}/checkpoints")
    async def checkpoints(model: str) -> dict[str, Any]:
        return {"checkpoints": service.checkpoints.listed(service.model(model).id), "cursor": None}

    @app.put("/api/v1/training_runs/{model}/checkpoints/{kind}/{name:path}/ttl")
    async def set_lifetime(model: str, kind: str, name: str, request: Request) -> Response:
        asked = await parse(request, bodies.SetLifetime)
        service.checkpoints.set_lifetime(f"{SCHEME}{model}/{kind}/{name}", asked.ttl_seconds)
        return Response(status_code=204)

    @app.delete("/api/v1/training_runs/{model}/checkpoints/{checkpoint:path}")
    async def delete_checkpoint(model: str, checkpoint: str) -> Response:
        service.checkpoints.delete(f"{SCHEME}{model}/{checkpoint}")
        return Response(status_code=204)

    for error in (EspalierError, HTTPException, Exception):
        app.add_exception_handler(error, refuse)
    return app
