"""Logs of an agent with two calls of a model, as published libraries write them.

    PYTHONPATH=LIBRARIES python tests/data/log_writers.py NAME FOLDER

writes the logs of the library NAME. `tests/data/logs` has the files of each; `make test-logs` installs the libraries
and writes them again, except for those of servers: `phoenix_spans.jsonl` is `Client().spans.get_spans_dataframe()` of
arize-phoenix 20.26.1 as `to_json` writes it, and `langfuse_observations.csv` the observations of the JSON file with a
score, as `transformStreamToCsv` of Langfuse's server (August 2026) writes them.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
REQUESTS: list[dict[str, Any]] = []
ANSWERS: list[dict[str, Any]] = []


class Model(BaseHTTPRequestHandler):
    """OpenAI's API for a model that calls the tool, and then says its result."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "messages" not in body:  # what a library sends to its own service
            return self._send({})
        last = body["messages"][-1]
        called = last["role"] == "tool"
        message = {"content": f"It has {last['content']}."} if called else {"content": None, "tool_calls": [CALL]}
        choice = {"index": 0, "finish_reason": "stop" if called else "tool_calls", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": f"chatcmpl-{len(ANSWERS) + 1}", "object": "chat.completion", "created": 1, "usage": usage}
        answer = {**head, "model": body["model"], "choices": [{**choice, "message": {"role": "assistant", **message}}]}
        REQUESTS.append(body)
        ANSWERS.append(answer)
        return self._send(answer)

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


def serve() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def agent(client: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Oslo?"}]
    while True:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2 degrees"} for call in message.tool_calls]


def client() -> Any:
    from openai import OpenAI

    return OpenAI(base_url=serve(), api_key="none", max_retries=0)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, default=str) + "\n")


def spans(folder: Path, name: str, instrument: Any) -> None:
    """Write the spans of the agent as ConsoleSpanExporter prints them, and in OTLP's JSON where its encoder is."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, memory = TracerProvider(resource=Resource({})), InMemorySpanExporter()
    with (folder / f"{name}_console.json").open("w") as file:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file)))
        provider.add_span_processor(SimpleSpanProcessor(memory))
        instrument(provider)
        with provider.get_tracer("app").start_as_current_span("agent"):
            agent(client())
    try:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError:
        return
    write(folder / f"{name}_otlp.json", MessageToDict(encode_spans(memory.get_finished_spans())))


def openllmetry(folder: Path) -> None:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    spans(folder, "openllmetry", lambda provider: OpenAIInstrumentor().instrument(tracer_provider=provider))


def openllmetry_0_40(folder: Path) -> None:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    spans(folder, "openllmetry_0_40", lambda provider: OpenAIInstrumentor().instrument(tracer_provider=provider))


def openinference(folder: Path) -> None:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    spans(folder, "openinference", lambda provider: OpenAIInstrumentor().instrument(tracer_provider=provider))


def langfuse(folder: Path) -> None:
    """Write the spans of Langfuse's client, and the observations that its API's types make of them."""
    from langfuse import Langfuse
    from langfuse.api import ObservationsV2Meta, ObservationsV2Response, ObservationV2
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, memory = TracerProvider(), InMemorySpanExporter()
    with (folder / "langfuse_console.json").open("w") as file:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=file)))
        provider.add_span_processor(SimpleSpanProcessor(memory))
        tracing = Langfuse(public_key="none", secret_key="none", base_url=serve(), tracer_provider=provider, timeout=1)
        from langfuse.openai import OpenAI

        with tracing.start_as_current_observation(name="agent", as_type="agent"):
            agent(OpenAI(base_url=serve(), api_key="none"))
    copied = ("type", "input", "output", "name")
    observations = []
    for span in memory.get_finished_spans():
        known = {name: span.attributes.get(f"langfuse.observation.{name}") for name in copied}
        ids = {"id": f"{span.context.span_id:016x}", "trace_id": f"{span.context.trace_id:032x}"}
        times = {"start_time": span.start_time / 1e9, "end_time": span.end_time / 1e9}
        known["type"] = str(known["type"]).upper()
        observations.append(ObservationV2(project_id="p", **ids, **times, **known))
    response = ObservationsV2Response(data=observations, meta=ObservationsV2Meta())
    (folder / "langfuse_observations.json").write_text(response.model_dump_json(by_alias=True, exclude_none=True))


def langsmith(folder: Path) -> None:
    """Write the runs that LangSmith's client records, as its export writes them."""
    from langsmith import Client, traceable, tracing_context
    from langsmith.schemas import Run
    from langsmith.wrappers import wrap_openai

    runs: dict[Any, dict[str, Any]] = {}

    class Recorder(Client):
        def create_run(self, name: str, inputs: Any, run_type: Any, **more: Any) -> None:
            runs[more["id"]] = copy.deepcopy({"name": name, "inputs": inputs, "run_type": run_type, **more})

        def update_run(self, run_id: Any, **more: Any) -> None:
            runs[run_id] |= copy.deepcopy({name: value for name, value in more.items() if value is not None})

    recorder = Recorder(api_url="http://127.0.0.1:9", api_key="none", auto_batch_tracing=False)
    with tracing_context(enabled=True, client=recorder):
        wrapped = wrap_openai(client())
        traceable(lambda question: agent(wrapped), name="agent")("Weather in Oslo?")
    lines = [Run(**run).model_dump_json(exclude_none=True) for run in runs.values()]
    (folder / "langsmith_runs.jsonl").write_text("".join(f"{line}\n" for line in lines))


def mlflow(folder: Path) -> None:
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
    import mlflow as library

    library.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    library.openai.autolog()
    with library.start_span("agent", span_type="AGENT") as span:
        agent(client())
    library.log_feedback(trace_id=span.trace_id, name="score", value=0.5)
    (trace,) = library.search_traces(return_type="list")
    whole = trace.to_dict()
    for name in ("tags", "trace_metadata", "trace_location"):
        whole["info"].pop(name)
    write(folder / "mlflow_traces.json", [whole])
    table = library.search_traces().drop(columns=["tags", "trace_metadata"])
    table["trace"] = [json.dumps(whole)]
    table.to_csv(folder / "mlflow_traces.csv")


def openai(folder: Path) -> None:
    """Write the second call as a stored completion with its messages, and both as requests of a batch."""
    from openai.pagination import SyncCursorPage
    from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage

    agent(client())
    page = SyncCursorPage[ChatCompletion](data=[ChatCompletion(**ANSWERS[1])], has_more=False)
    stored = {"object": "list", **page.model_dump()}
    stored["data"] = [{**item, "tools": REQUESTS[1]["tools"]} for item in stored["data"]]
    write(folder / "openai_stored_completions.json", stored)
    asked = [
        ChatCompletionStoreMessage.model_construct(**{"id": f"{ANSWERS[1]['id']}-{number}", **message}).model_dump()
        for number, message in enumerate(REQUESTS[1]["messages"])
    ]
    write(folder / "openai_stored_messages.json", {"object": "list", "data": asked, "has_more": False})
    pairs = list(enumerate(zip(REQUESTS, ANSWERS, strict=True)))
    requests = [
        {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": request}
        for number, (request, _) in pairs
    ]
    responses = [
        {
            "id": f"batch_req_{number}",
            "custom_id": f"request-{number}",
            "response": {"status_code": 200, "request_id": "r", "body": ChatCompletion(**answer).model_dump()},
            "error": None,
        }
        for number, (_, answer) in pairs
    ]
    for name, lines in (("input", requests), ("output", responses)):
        (folder / f"openai_batch_{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # clients of services that are not there would keep the process
