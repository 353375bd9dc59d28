"""The training service: its losses against float64, the requests of the real client, restarts, and bad requests.

`train_service_requests.jsonl` holds requests that tinker 0.38 sent, in their order; SESSION0… is the id of the session.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from components.artifacts import lock_file
from components.errors import SpecError
from components.inference.transformers.engine import TransformersEngine
from components.models.spec import ModelSpec
from components.models.untied import untied
from components.models.weights import load_model, prepare
from components.tracking.store import connect, local_uri
from flows.experiment.compose import compose
from flows.history.records import Records
from flows.loop.policy import SETTINGS
from flows.runs.clean import Cleaner
from flows.runs.listing import RunFilter, list_runs
from flows.train_server import main
from flows.train_service.app import create_app
from flows.train_service.batch import BatchLimits, read_batch
from flows.train_service.bodies import AdamParams, LoraConfig
from flows.train_service.journal import Journal, StoredRequest
from flows.train_service.messages import FLOAT32, INT64, PROTO_TYPE, message
from flows.train_service.retention import FOLDER, LOCK, unneeded
from flows.train_service.runs import ModelRuns
from flows.train_service.sampler import Sampler
from flows.train_service.service import ServedBase, Service
from flows.train_service.trainer import AdapterTrainer

SESSION = "SESSION0" * 4
SPEC = ModelSpec(name="tiny", source="random", max_length=64)
A, B = [10, 11, 12, 13, 14, 15], [10, 11, 12, 20, 21]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("models")
    return untied(prepare(SPEC, cache), SPEC, cache)


class Client:
    """Plain HTTP client of a service on `root`."""

    def __init__(self, http: TestClient, service: Service):
        self.http, self.service = http, service

    def post(self, path: str, body: Any) -> Any:
        """Send JSON, or a message, and return the answer."""
        if isinstance(body, bytes):
            return self.http.post(f"/api/v1/{path}", content=body, headers={"content-type": PROTO_TYPE})
        return self.http.post(f"/api/v1/{path}", json=body)

    def result(self, answer: Any) -> Any:
        """Return the result of a request: JSON data, or a message's bytes."""
        assert answer.status_code == 200, answer.text
        asked = {"request_id": answer.json()["request_id"]}
        while (fetched := self.post("retrieve_future", asked)).status_code == 408:  # not computed yet
            pass
        assert fetched.status_code == 200, fetched.text
        return fetched.content if fetched.headers["content-type"] == PROTO_TYPE else fetched.json()

    def created(self, **config: Any) -> str:
        session = self.post("create_session", {"tags": [], "sdk_version": "0.38"}).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 3}}
        asked["lora_config"] |= config
        return self.result(self.post("create_model", asked))["model_id"]


@contextmanager
def opened(base_dir: Path, root: Path, runs: ModelRuns | None = None) -> Iterator[Client]:
    engine = TransformersEngine(base_dir, max_length=64, device="cpu")
    place = ServedBase(("tiny",), "tiny", root)
    service = Service(place, AdapterTrainer(base_dir, SPEC, root / "states"), Sampler(engine), runs)
    with TestClient(create_app(service)) as http:
        yield Client(http, service)


@pytest.fixture(scope="module")
def client(base_dir, tmp_path_factory) -> Iterator[Client]:
    with opened(base_dir, tmp_path_factory.mktemp("service")) as running:
        yield running


def tensor(values: Any) -> Any:
    array = np.asarray(values)
    kind = INT64 if array.dtype.kind == "i" else FLOAT32
    dense = array.astype(np.int64 if kind == INT64 else np.float32).tobytes()
    return message("Tensor", dense=dense, dtype=kind, shape=array.shape)


def batch(
    data: list[tuple[list[int], dict[str, Any]]],
    loss: str,
    *,
    model: str = "",
    number: int = 1,
    options: dict[str, float] | None = None,
    only: bool = False,
) -> bytes:
    """Return a request. data: input tokens, and inputs of the loss by name."""
    request = message("ForwardBackwardRequest", model_id=model, seq_id=number, loss_fn=loss, forward_only=only)
    for name, value in (options or {}).items():
        request.loss_fn_config_v2[name].number = value
    for tokens, inputs in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(tensor(values))
    return request.SerializeToString()


def supervised(model: str, number: int, scale: float = 1.0, only: bool = False) -> bytes:
    data = [(ids[:-1], {"target_tokens": ids[1:], "weights": [scale] * (len(ids) - 1)}) for ids in (A, B)]
    return batch(data, "cross_entropy", model=model, number=number, only=only)


def step(model: str, number: int, **params: float) -> dict[str, Any]:
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-2, **params}}


def logprobs(output: bytes) -> list[np.ndarray]:
    records = message("ForwardBackwardOutput", output).loss_fn_outputs
    return [np.frombuffer(record.fields["logprobs"].data, np.float32) for record in records]


# Losses


def written_out(loss: str, logprob: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The losses as the API's documentation states them."""
    if loss == "cross_entropy":
        return (-logprob * given["weights"]).sum()
    old, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(logprob - old)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    clipped = torch.clamp(ratio, 0.9, 1.3)
    if loss == "ppo":
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    if loss == "cispo":
        return -(clipped.detach() * logprob * advantages).sum()
    return -(logprob * advantages - 0.5 * 0.2 * (logprob - old) ** 2).sum()


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "several targets"])
def test_gradient_of_each_loss_equals_that_of_its_formula_in_float64(base_dir, tmp_path, loss):
    trainer = AdapterTrainer(base_dir, SPEC, tmp_path)
    model = trainer.create(LoraConfig(rank=4, seed=3))
    limits, random = BatchLimits(64, trainer.limits.vocabulary), np.random.default_rng(0)
    warm = read_batch(supervised("m", 1), limits)
    trainer.forward_backward(model, warm)
    trainer.optimizer_step(model, AdamParams(learning_rate=1e-2))  # B is no longer zero

    data, options = [], {}
    for ids in (A, B, A):
        size = (len(ids) - 1, 3) if loss == "several targets" else (len(ids) - 1,)
        targets = random.integers(0, limits.vocabulary, size) if loss == "several targets" else np.array(ids[1:])
        sampled = {"logprobs": random.normal(-5.4, 0.3, size), "advantages": random.normal(size=size)}
        weights = {"weights": random.normal(size=size)}
        inputs = weights if loss in ("cross_entropy", "several targets") else sampled
        data.append((ids[:-1], {"target_tokens": targets, **inputs}))
    if loss in ("ppo", "cispo"):
        options = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    if loss == "dro":
        options = {"beta": 0.2}
    name = "cross_entropy" if loss == "several targets" else loss
    sent = read_batch(batch(data, name, options=options), limits)
    _, losses = trainer.forward_backward(model, sent)
    with trainer.policy.activate(model.name) as parameters:
        ours = {key: parameter.grad.double() for key, parameter in parameters.items()}
        values = {key: parameter.detach().double().requires_grad_() for key, parameter in parameters.items()}

    plain = load_model(base_dir).double()
    weights = dict(plain.named_parameters())
    for key, matrix in values.items():
        if ".lora_A." in key:
            layer = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
            update = values[key.replace(".lora_A.", ".lora_B.")] @ matrix
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"].detach() + 32 / 4 * update
    total = torch.zeros((), dtype=torch.float64)
    for tokens, inputs in data:
        logits = torch.func.functional_call(plain, weights, kwargs={"input_ids": torch.tensor([tokens])}).logits[0]
        targets = torch.tensor(np.asarray(inputs["target_tokens"])).reshape(len(tokens), -1)
        logprob = logits.log_softmax(-1).gather(-1, targets)
        given = {
            key: torch.tensor(np.float32(value)).double().reshape(targets.shape)
            for key, value in inputs.items()
            if key != "target_tokens"
        }
        total = total + written_out(name, logprob, given)
    total.backward()
    assert float(losses.sum(dtype=np.float64)) == pytest.approx(total.item(), rel=1e-5, abs=1e-4)
    assert any("lm_head" in key for key in values)
    for key, value in values.items():
        scale = max(float(value.grad.abs().max()), 1e-3)
        assert float((value.grad - ours[key]).abs().max()) < 2e-4 * scale, key


# The protocol


def test_requests_of_the_real_client_are_answered(client):
    lines = (Path(__file__).parent / "train_service_requests.jsonl").read_text().splitlines()
    session, answers = "", []
    for line in lines:
        call = json.loads(line.replace(SESSION, session) if session else line)
        if call["method"] == "GET":
            answer = client.http.get(call["path"])
        elif isinstance(call["body"], dict) and "base64" in call["body"]:
            body = base64.b64decode(call["body"]["base64"]).replace(SESSION.encode(), session.encode())
            answer = client.post(call["path"].removeprefix("/api/v1/"), body)
        else:
            answer = client.http.post(call["path"], json=call["body"])
        assert answer.status_code in (200, 204), (line, answer.text)
        answers.append((call["path"].rpartition("/")[2], answer))
        if call["path"].endswith("create_session"):
            session = answer.json()["session_id"]
    results = [answer for path, answer in answers if path == "retrieve_future"]
    passes = [result.content for result in results if result.headers["content-type"] == PROTO_TYPE]
    first, clipped, sample, loaded = passes
    losses = message("ForwardBackwardOutput", first)
    weights = [np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 0.5])]
    expected = -sum(float((lps * weight).sum()) for lps, weight in zip(logprobs(first), weights, strict=True))
    assert losses.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    assert message("ForwardBackwardOutput", clipped).loss_fn_outputs[0].num_datums == 1
    response = message("SampleResponse", sample)
    assert [len(sequence.tokens) // 4 for sequence in response.sequences] == [4, 4]  # no token ends them but 300
    scores = np.frombuffer(response.prompt_logprobs, np.float32)
    assert math.isnan(scores[0])
    assert scores[1:] == pytest.approx(logprobs(loaded)[0][:2], abs=1e-4)  # sampler and trainer have the same weights


def test_requests_run_in_the_order_of_their_numbers_and_once(client):
    model = client.created()
    late = client.post("optim_step", step(model, 2))  # before the batch that it applies
    again = client.post("optim_step", step(model, 2))
    first = client.post("forward_backward", supervised(model, 1))
    assert late.json() == again.json()
    assert client.result(first) == client.result(first)
    assert client.result(late)["metrics"]["grad_norm"] > 0
    assert client.result(late) == client.result(again)


def test_models_of_several_clients_do_not_affect_each_other(client):
    def trained(models: list[str]) -> list[Any]:
        outputs = []
        for number in (1, 3):
            outputs += [client.post("forward_backward", supervised(model, number)) for model in models]
            for model in models:
                client.post("optim_step", step(model, number + 1))
        return [client.result(output) for output in outputs]

    alone = trained([client.created()])
    small, large = client.created(), client.created(rank=8, train_mlp=False)
    both = trained([small, large])
    assert both[::2] == alone
    assert both[1] == alone[0]  # both adapters begin as the base
    assert both[3] != alone[1]


def test_a_new_process_continues_as_if_the_first_one_had_not_ended(base_dir, tmp_path):
    def play(client: Client, model: str, first: int, last: int) -> list[Any]:
        calls = [("forward_backward", supervised(model, 1)), ("forward_backward", supervised(model, 2, 0.3)),
                 ("optim_step", step(model, 3)), ("forward_backward", supervised(model, 4)),
                 ("optim_step", step(model, 5)), ("forward_backward", supervised(model, 6, only=True))]  # fmt: skip
        return [client.result(client.post(*call)) for call in calls[first:last]]

    with opened(base_dir, tmp_path / "whole") as client:
        whole = play(client, client.created(), 0, 6)
    for ended in range(1, 6):
        root = tmp_path / str(ended)
        with opened(base_dir, root) as client:
            model = client.created()
            early = play(client, model, 0, ended)
        with opened(base_dir, root) as client:
            assert play(client, model, 0, ended) == early  # the same requests again
            assert early + play(client, model, ended, 6) == whole, ended


def test_a_request_that_was_accepted_is_computed_by_the_next_process(base_dir, tmp_path):
    with opened(base_dir, tmp_path) as client:
        model = client.created()
        client.result(client.post("forward_backward", supervised(model, 1)))
        body = json.dumps(step(model, 2)).encode()
        client.service._journal.add(model, 2, StoredRequest.of("optim_step", body))  # and then the process ends
    with opened(base_dir, tmp_path) as client:
        fetched = client.post("retrieve_future", {"request_id": f"{model}:2"})
        assert fetched.json()["metrics"]["grad_norm"] > 0


def test_requests_arrive_while_the_service_computes(client, monkeypatch):
    """A client encodes and sends its next requests during a pass: its three requests are on disk before the first one
    has ended."""
    model, released, compute = client.created(), threading.Event(), client.service.trainer.forward_backward
    monkeypatch.setattr(client.service.trainer, "forward_backward", lambda *args: released.wait(60) and compute(*args))
    accepted = [
        client.post("forward_backward", supervised(model, 1)),
        client.post("optim_step", step(model, 2)),
        client.post("forward_backward", supervised(model, 3)),
    ]
    assert [answer.status_code for answer in accepted] == [200] * 3
    assert client.service._journal.numbers(model, "result") == [0]
    released.set()
    results = [client.result(answer) for answer in accepted]
    losses = [message("ForwardBackwardOutput", result).metrics["loss:sum"] for result in results[::2]]
    assert results[1]["metrics"]["loss:sum"] == losses[0] > losses[1]


# Runs and retention


def test_a_root_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "root").touch()
    assert main(["model=tiny", f"root={tmp_path / 'root'}", "--port=0"]) == 2
    assert "not writable" in capsys.readouterr().err


def test_models_are_runs_that_continue_and_are_cleaned_when_no_client_needs_them(base_dir, tmp_path, monkeypatch):
    spec = compose([*SETTINGS, "name=train_server", "model=tiny", f"root={tmp_path}"])
    folder = tmp_path / FOLDER

    def play(client: Client, model: str, first: int) -> list[float]:
        losses = []
        for number in (first, first + 2):
            client.result(client.post("forward_backward", supervised(model, number)))
            losses.append(client.result(client.post("optim_step", step(model, number + 1)))["metrics"]["loss:sum"])
        return losses

    with ModelRuns(spec, ["model=tiny"]) as runs, opened(base_dir, folder, runs) as client:
        model, other, third = client.created(), client.created(rank=2), client.created(rank=3)
        losses = play(client, model, 1)
        play(client, other, 1)
        saved = {"model_id": other, "seq_id": 5, "path": "w"}
        client.result(client.post("save_weights", saved))
        client.http.post(f"/api/v1/sessions/{other.partition(':')[0]}/finish", json={})
        assert client.post("optim_step", step(other, 6)).status_code == 410
        states = {name: client.service.models[name].state for name in (model, other, third)}
        records = Records(tmp_path)
        status = {run.id: records.status(run) for run in records.all()}
        named = {entry.id: entry.run for entry in client.service.models.values()}
        assert [status[named[name]] for name in (model, other, third)] == ["running", "finished", "running"]
    with ModelRuns(spec, ["model=tiny"]) as runs, opened(base_dir, folder, runs) as client:
        losses += play(client, model, 5)
        states[model] = client.service.models[model].state
        run = records.get(named[model])
        assert (records.status(run), run.result["steps"]) == ("running", 4)
        assert run.spec["model"]["lora"]["rank"] == 4
        assert [listed.id for listed in list_runs(tmp_path, RunFilter(), "steps")] == [named[model], named[other]]
    tracked = connect(local_uri(tmp_path), tmp_path).get_metric_history(named[model], "train/loss_sum")
    assert [(point.step, point.value) for point in tracked] == [*enumerate(losses, 1)]

    with open(folder / LOCK, "a+") as lock:
        lock_file(lock, "the service", 1.0)
        assert Cleaner(tmp_path).deletable() == []  # the service is running
    cleaner = Cleaner(tmp_path, [named[third]])
    cleaner.delete(cleaner.deletable())
    assert {path.name for path in (folder / "states").iterdir()} == {states[model], states[other]}
    assert [path.name for path in (folder / "sessions").iterdir()] == [model.partition(":")[0]]
    assert {path.stem for path in (folder / "models").iterdir()} == {model, other}
    with opened(base_dir, folder) as client:
        again = client.post("optim_step", step(model, 8))  # its body was dropped, its result is there
        assert client.result(again)["metrics"]["loss:sum"] == losses[-1]
        assert client.post("optim_step", step(model, 8, weight_decay=0.5)).status_code == 400
        client.result(client.post("forward_backward", supervised(model, 9)))
        asked = {"session_id": model.partition(":")[0], "model_seq_id": 9, "optimizer": True}
        copy = client.result(client.post("load_weights", {**asked, "path": f"tinker://{other}/weights/w"}))
        assert client.service.models[copy["model_id"]].state == states[other]
    now = time.time()
    monkeypatch.setattr("flows.train_service.retention.time.time", lambda: now + 8 * 86400)
    silent = {item.why for item in unneeded(folder, {named[model], named[other], ""})}
    assert silent == {"its client has sent nothing for 7 days", "no model, checkpoint or sampling session needs it"}


# Bad requests


def test_a_failing_write_ends_the_request_with_an_error(client, monkeypatch):
    """The disk is full: no request is left without a result, and the next step has the batches of which the client
    knows."""
    model, write = client.created(), Journal._write
    client.result(client.post("forward_backward", supervised(model, 1)))
    for number, suffix in ((2, "result"), (3, "request")):

        def full(journal: Journal, owner: str, number: int, kind: str, *rest: Any, suffix: str = suffix) -> None:
            if kind in (suffix, "result"):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(journal, owner, number, kind, *rest)

        monkeypatch.setattr(Journal, "_write", full)
        failed = client.result(client.post("forward_backward", supervised(model, number)))
        assert failed["category"] == "server"
        assert "cannot write" in failed["error"]
    monkeypatch.setattr(Journal, "_write", write)
    twin = client.created()
    client.result(client.post("forward_backward", supervised(twin, 1)))
    expected = client.result(client.post("optim_step", step(twin, 2)))
    assert client.result(client.post("optim_step", step(model, 4))) == expected


def wrong(data: dict[str, Any] | None = None, loss: str = "cross_entropy", tokens: list[int] | None = None, **options):
    inputs = {"target_tokens": A[1:], "weights": [1.0] * 5} | (data or {})
    sent = {name: values for name, values in inputs.items() if values is not None}
    return batch([(tokens or A[:-1], sent)], loss, model="MODEL", options=options)


def bomb() -> bytes:
    """Return a batch of a few bytes that would need much memory if its sparse weights were written out."""
    request = message("ForwardBackwardRequest", wrong())
    weights = request.data[0].loss_fn_inputs["weights"]
    weights.CopyFrom(message("Tensor", dtype=FLOAT32, shape=[5, 10**6]))
    weights.sparse_csr.crow_indices = np.zeros(6, np.int64).tobytes()
    return request.SerializeToString()


BAD_BATCHES = {
    "weights of another length": (wrong({"weights": [1.0] * 4}), r"data\[0\].loss_fn_inputs.weights: shape \(4,\)"),
    "targets of another length": (wrong({"target_tokens": A}), r"target_tokens: shape \(6,\); expected \(5,\)"),
    "NaN": (wrong({"weights": [float("nan")] * 5}), "not finite"),
    "token outside": (wrong({"target_tokens": [1, 2, 3, 4, 10**6]}), "token 1000000; the model has the tokens 0 to"),
    "negative token": (wrong(tokens=[1, 2, 3, 4, -1]), "token -1"),
    "too long": (wrong(tokens=[1] * 65), "65 tokens; expected at most model.max_length = 64"),
    "missing input": (wrong({"weights": None}), "weights is missing; expected target_tokens, weights"),
    "unknown input": (wrong({"mask": [1.0] * 5}), "loss_fn_inputs.mask: unknown"),
    "unknown loss": (wrong(loss="gspo"), "'gspo' is not computed here; expected cross_entropy"),
    "unknown option": (wrong(beta=1.0), "loss_fn_config.beta: no option of cross_entropy"),
    "float targets": (wrong({"target_tokens": [1.0] * 5}), "type float32; expected int64"),
    "sparse bomb": (bomb(), r"weights: sparse with shape \(5, 1000000\); expected at most 1048576 targets"),
    "no data": (batch([], "cross_entropy", model="MODEL"), "data: empty"),
    "no message": (b"\xff\xff\xff", "the body is no ForwardBackwardRequest"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batch_is_refused_by_place_and_value(case):
    body, text = BAD_BATCHES[case]
    with pytest.raises(SpecError) as refused:
        read_batch(body, BatchLimits(64, 259))
    assert re.search(text, str(refused.value))


def test_bad_requests_are_refused_and_change_nothing(client):
    model = client.created()
    session = model.partition(":")[0]
    cases: list[tuple[str, Any, int, str]] = [
        ("forward_backward", supervised("0:train:0", 1), 404, "no model '0:train:0' here"),
        ("optim_step", step(model, 0), 400, "seq_id"),
        ("forward_backward", b"\xff\xff\xff", 400, "the body is no ForwardBackwardRequest"),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "gpt"}, 400,
         "'gpt' is not served here; expected 'tiny'"),
        ("retrieve_future", {"request_id": "../../x:1"}, 404, "no request"),
        ("session_heartbeat", {"session_id": "0" * 32}, 404, "no session"),
        ("create_custom_loss", {}, 404, "no such route"),
    ]  # fmt: skip
    for path, body, status, text in cases:
        answer = client.post(path, body)
        assert (answer.status_code, text in answer.text) == (status, True), (path, answer.text)
    entry = client.service.models[model]
    before = entry.state
    failing: list[tuple[str, Any, str]] = [
        ("load_weights", {"session_id": session, "model_seq_id": 1, "path": "tinker://../../x/weights/y",
                          "optimizer": True}, "no checkpoint"),
    ]  # fmt: skip
    for path, body, text in failing:
        assert text in client.result(client.post(path, body))["error"]
    failed = client.result(client.post("optim_step", step(model, 1)))
    assert failed["category"] == "user"
    assert "no gradients since the last step" in failed["error"]
    huge = client.result(client.post("forward_backward", supervised(model, 2, 3e38)))
    assert "not finite" in huge["error"]
    assert entry.state == before
    client.result(client.post("forward_backward", supervised(model, 3)))  # the model goes on
    assert client.result(client.post("optim_step", step(model, 4)))["metrics"]["grad_norm"] < 1e6
    again = client.post("optim_step", step(model, 4, weight_decay=0.5))
    assert "is that of another request" in again.json()["error"]["message"]


def test_a_refused_request_counts_so_that_the_next_one_does_not_wait(client):
    model = client.created()
    client.result(client.post("forward_backward", supervised(model, 1)))
    path = {"model_id": model, "path": f"tinker://{model}/weights/x", "optimizer": True}
    cases: list[tuple[str, Any, str]] = [
        ("forward_backward", supervised(model, 2, float("nan")), "not finite"),
        ("forward_backward", batch([], "gspo", model=model, number=3), "'gspo' is not computed here"),
        ("load_weights", {**path, "seq_id": 4}, "it was never saved"),
        ("save_weights", {"model_id": model, "seq_id": 5, "path": "../up"}, "path"),
        ("load_weights", {**path, "seq_id": 6, "session_id": None, "x": 1}, "x"),
    ]
    for route, body, text in cases:
        failed = client.result(client.post(route, body))
        assert failed["category"] == "user"
        assert text in failed["error"]
    assert client.result(client.post("optim_step", step(model, 7)))["metrics"]["grad_norm"] > 0  # that of batch 1
    client.result(client.post("forward_backward", supervised(model, 8)))
    for number, wrong_step, text in [
        (9, step(model, 9, learning_rate=-1.0), "learning_rate"),
        (10, {**step(model, 10), "optimizer_params": {"type": "dimuon"}}, "optimizer_params"),
        (11, step(model, 11), "no gradients"),  # a step that fails drops those before it
    ]:
        assert text in client.result(client.post("optim_step", wrong_step))["error"], number


def test_only_the_latest_models_are_in_memory(client, monkeypatch):
    monkeypatch.setattr("flows.train_service.service.MODELS_IN_MEMORY", 2)
    models = [client.created() for _ in range(4)]
    assert [model for model, entry in client.service.models.items() if entry.model is not None] == models[2:]


def test_an_expired_checkpoint_is_not_listed(client, monkeypatch):
    model = client.created()
    saved = {"model_id": model, "path": "w", "ttl_seconds": 3600}
    path = client.result(client.post("save_weights", {**saved, "seq_id": 1}))["path"]
    for missing, status in ((path, 200), (f"tinker://{model}/weights/{'x' * 500}", 404)):
        assert client.post("weights_info", {"tinker_path": missing}).status_code == status
    now = time.time()
    monkeypatch.setattr("flows.train_service.checkpoints.time.time", lambda: now + 4000)
    assert client.post("weights_info", {"tinker_path": path}).status_code == 404
    assert client.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"] == []


def test_checkpoints_and_sessions_are_listed(client):
    model, path = client.created(), "/api/v1/training_runs"
    session = model.partition(":")[0]
    for number, name in ((1, "a"), (2, "b/c")):
        client.result(client.post("save_weights", {"model_id": model, "seq_id": number, "path": name}))
    listed = client.http.get("/api/v1/checkpoints", params={"limit": 1}).json()
    assert [saved["tinker_path"] for saved in listed["checkpoints"]] == [f"tinker://{model}/weights/b/c"]
    assert listed["cursor"]["total_count"] >= 2
    assert client.http.put(f"{path}/{model}/checkpoints/weights/b/c/ttl", json={"ttl_seconds": 3600}).status_code == 204
    assert client.http.put(f"{path}/{model}/checkpoints/weights/a/ttl", json={"ttl_seconds": 1}).status_code == 400
    expiries = [
        saved["expires_at"] is None for saved in client.http.get(f"{path}/{model}/checkpoints").json()["checkpoints"]
    ]
    assert expiries == [False, True]
    assert client.http.get(f"{path}/{model}").json()["last_checkpoint"]["checkpoint_id"] == "weights/b/c"
    assert client.http.get("/api/v1/sessions").json()["sessions"][0] == session
    assert client.http.get(f"/api/v1/sessions/{session}").json()["training_run_ids"] == [model]
    assert client.http.get("/api/v1/checkpoints", params={"limit": -1}).status_code == 422
    for method, refused in (("post", "/api/v1/copy_weights"), ("get", "/api/v1/audit")):
        assert "no such route" in client.http.request(method, refused).json()["error"]["message"]


def test_a_deleted_checkpoint_is_neither_loaded_nor_sampled(client):
    model = client.created()
    session = model.partition(":")[0]
    path = client.result(client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "w"}))["path"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = client.post("create_sampling_session", asked).json()["sampling_session_id"]
    deleted = client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/w")
    assert deleted.status_code == 204
    prompt = {"prompt": {"chunks": [{"tokens": A}]}, "sampling_params": {"max_tokens": 1}}
    failed = client.result(client.post("asample", {**prompt, "sampling_session_id": sampler, "seq_id": 0}))
    assert "was deleted" in failed["error"]
    assert client.post("create_sampling_session", asked).status_code == 404
