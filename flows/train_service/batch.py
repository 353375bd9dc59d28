"""Batches of a training client: tokens, targets and the inputs of a loss, validated.

A datum predicts `target_tokens[i]` from the tokens up to `model_input[i]`. Targets of shape (T, K) are K tokens at each
place. Where the targets are the following tokens, as almost always, a batch packs like episodes do: prefixes that data
share are computed once (`components.algorithms.policy.packing`).

Legend: T tokens of a datum, K targets of a place, S targets of the batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.algorithms.client_losses import LOSSES, ClientLoss
from components.algorithms.policy.packing import TokenSequence
from components.errors import Problem, SpecError
from components.inference.refusals import SHOWN_PROBLEMS
from flows.train_service.messages import FLOAT32, INT64, message

TARGETS = "target_tokens"
MOST_TARGETS = 2**20
"""Largest number of targets of a batch. A body bounds dense ones, but not sparse ones."""
_TYPES = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}


@dataclass(frozen=True)
class ClientBatch:
    """A request of a forward pass, or of a forward and backward pass."""

    loss: str
    sequences: list[TokenSequence]
    """Sequence of each datum; its targets are numbered consecutively over the batch."""
    shapes: list[tuple[int, ...]]
    """Shape of the targets of each datum."""
    inputs: dict[str, np.ndarray]
    """Inputs and options of the loss, (S,) each."""
    forward_only: bool
    digest: str
    """Digest of the content, without the model and the number of the request."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a model."""

    max_length: int
    vocabulary: int


def read_batch(body: bytes, limits: BatchLimits) -> ClientBatch:
    """Return the batch of a request. Raises SpecError with the first problem of each datum, for the first invalid
    ones."""
    try:
        request = message("ForwardBackwardRequest", body)
    except ValueError as error:
        raise SpecError.at("body", str(error)) from None
    request.ClearField("model_id")
    request.ClearField("seq_id")
    if request.loss_fn not in LOSSES:
        known = ", ".join(LOSSES)
        text = f"{request.loss_fn!r:.60} is not computed here; expected {known}, or a custom loss of the client"
        raise SpecError.at("loss_fn", text)
    loss = LOSSES[request.loss_fn]
    options = dict(loss.options) | _options(request, loss)
    if not request.data:
        raise SpecError.at("data", "empty; expected at least one datum")
    sequences, shapes, columns, problems, first = [], [], [], [], 0
    for index, datum in enumerate(request.data):
        try:
            tokens, tensors = _tokens(datum, limits), _tensors(datum, loss, MOST_TARGETS - first)
            targets = _targets(tensors.pop(TARGETS), len(tokens), limits)
            shape = targets.shape
            for name, values in tensors.items():
                if values.shape != shape:
                    text = f"shape {values.shape}; expected {shape}, as {TARGETS}"
                    raise SpecError.at(f"loss_fn_inputs.{name}", text)
            sequences.append(_sequence(tokens, targets, first))
            shapes.append(shape)
            first += targets.size
            columns.append({name: np.full(shape, value, np.float32) for name, value in options.items()} | tensors)
        except SpecError as error:
            problems += [Problem(f"data[{index}].{problem.path}", problem.message) for problem in error.problems]
            if len(problems) > SHOWN_PROBLEMS:  # each of many invalid ones may be large when it is written out
                break
    if problems:
        raise SpecError(problems)
    inputs = {name: np.concatenate([column[name].reshape(-1) for column in columns]) for name in columns[0]}
    digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    return ClientBatch(request.loss_fn, sequences, shapes, inputs, request.forward_only, digest)


def _options(request: Any, loss: ClientLoss) -> dict[str, float]:
    """Return the options of the request. Raises SpecError."""
    options: dict[str, Any] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        options[name] = value.number if value.HasField("number") else value.text
    for name, value in options.items():
        if name not in loss.options:
            known = ", ".join(loss.options) or "none"
            raise SpecError.at(f"loss_fn_config.{name}", f"no option of {request.loss_fn}; its options: {known}")
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise SpecError.at(f"loss_fn_config.{name}", f"{value!r:.60}; expected a number from 0")
    return options


def _tokens(datum: Any, limits: BatchLimits) -> np.ndarray:
    """Return the (T,) input tokens of a datum."""
    parts = []
    for chunk in datum.model_input:
        if chunk.HasField("image") or chunk.HasField("dmel"):
            raise SpecError.at("model_input", "has an image or audio; expected tokens")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), "model_input"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    if not len(tokens):
        raise SpecError.at("model_input", "no tokens; expected at least one")
    if len(tokens) > limits.max_length:
        text = f"{len(tokens)} tokens; expected at most model.max_length = {limits.max_length}"
        raise SpecError.at("model_input", text)
    _check_ids(tokens, "model_input", limits)
    return tokens


def _check_ids(tokens: np.ndarray, place: str, limits: BatchLimits) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= limits.vocabulary)]
    if wrong.size:
        raise SpecError.at(place, f"token {wrong[0]}; the model has the tokens 0 to {limits.vocabulary - 1}")


def _tensors(datum: Any, loss: ClientLoss, most: int) -> dict[str, np.ndarray]:
    """Return the inputs of the loss by name. most: largest number of values of each one. Raises SpecError for missing
    and unknown names, and for NaN."""
    needed = (TARGETS, *loss.inputs)
    names = set(datum.loss_fn_inputs)
    if missing := [name for name in needed if name not in names]:
        raise SpecError.at("loss_fn_inputs", f"{missing[0]} is missing; expected {', '.join(needed)}")
    if unknown := sorted(names - {*needed, *loss.options}):
        raise SpecError.at(f"loss_fn_inputs.{unknown[0]:.60}", f"unknown; expected {', '.join(needed)}")
    tensors = {}
    for name, tensor in datum.loss_fn_inputs.items():
        place = f"loss_fn_inputs.{name}"
        values = _dense(tensor, place, most)
        if (values.dtype == np.int64) != (name == TARGETS):
            raise SpecError.at(place, f"type {values.dtype}; expected {'int64' if name == TARGETS else 'float32'}")
        if not np.isfinite(values).all():
            raise SpecError.at(place, "has values that are not finite; expected numbers")
        tensors[name] = values
    return tensors


def _dense(tensor: Any, place: str, most: int) -> np.ndarray:
    """Return a tensor of a message; entries that a sparse one leaves out are 0."""
    if tensor.dtype not in _TYPES:
        raise SpecError.at(place, f"dtype {tensor.dtype}; expected float32 or int64")
    kind, shape = _TYPES[tensor.dtype], tuple(tensor.shape)
    sparse = tensor.HasField("sparse_csr")
    values = _array(tensor.sparse_csr.values if sparse else tensor.dense, kind, place)
    if not sparse:
        shape = shape or values.shape
        if math.prod(shape) != values.size or min(shape) < 0:
            raise SpecError.at(place, f"{values.size} values; expected those of shape {shape}")
        return values.reshape(shape)
    starts, columns = (
        _array(data, np.dtype(np.int64), place)
        for data in (tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices)
    )
    if math.prod(shape) > most:
        raise SpecError.at(place, f"sparse with shape {shape}; expected at most {MOST_TARGETS} targets in a batch")
    if len(shape) != 2 or min(shape) < 0 or len(starts) != shape[0] + 1:
        raise SpecError.at(place, f"sparse with shape {shape} and {len(starts)} row pointers; expected a matrix")
    rows = np.diff(starts)
    if starts[0] or (rows < 0).any() or rows.sum() != len(values) or len(columns) != len(values):
        raise SpecError.at(place, "row pointers, columns and values of the sparse matrix do not agree")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise SpecError.at(place, f"a column outside of 0 to {shape[1] - 1}")
    dense = np.zeros(shape, kind)
    dense[np.repeat(np.arange(shape[0]), rows), columns] = values
    return dense


def _array(data: bytes, kind: np.dtype, place: str) -> np.ndarray:
    if len(data) % kind.itemsize:
        raise SpecError.at(place, f"{len(data)} bytes; expected a multiple of {kind.itemsize}")
    return np.frombuffer(data, kind)


def _targets(targets: np.ndarray, length: int, limits: BatchLimits) -> np.ndarray:
    if targets.ndim not in (1, 2) or len(targets) != length or not targets.size:
        text = f"shape {targets.shape}; expected ({length},), or ({length}, K) for K targets of each token"
        raise SpecError.at(f"loss_fn_inputs.{TARGETS}", text)
    _check_ids(targets.reshape(-1), f"loss_fn_inputs.{TARGETS}", limits)
    return targets


def _sequence(tokens: np.ndarray, targets: np.ndarray, first: int) -> TokenSequence:
    """Return the sequence of a datum. first: number of its first target."""
    places: Sequence[int] = range(1, len(tokens) + 1)
    if targets.ndim == 1 and np.array_equal(targets[:-1], tokens[1:]):
        return TokenSequence([*tokens.tolist(), int(targets[-1])], places, first=first)
    count = targets.size // len(tokens)
    return TokenSequence(
        tokens.tolist(), np.repeat(np.arange(1, len(tokens) + 1), count).tolist(), first=first,
        labels=targets.reshape(-1).tolist(),
    )  # fmt: skip


def pass_output(batch: ClientBatch, logprob_S: np.ndarray, loss_S: np.ndarray) -> bytes:
    """Return the result of a pass: for each datum its log-probabilities, and for cross-entropy its losses."""
    output = message("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord")
    columns = {"logprobs": logprob_S} | ({"elementwise_loss": loss_S} if batch.loss == "cross_entropy" else {})
    first = 0
    for shape in batch.shapes:
        size = math.prod(shape)
        record = output.loss_fn_outputs.add(num_datums=1)
        for name, values in columns.items():
            data = values[first : first + size].tobytes()
            tensor = record.fields[name]
            tensor.data, tensor.dtype = data, FLOAT32
            tensor.offsets = np.array([0, len(data)], np.int64).tobytes()
            tensor.trailing_shape.extend(shape[1:])
        first += size
    output.metrics["loss:sum"] = float(loss_S.sum(dtype=np.float64))
    encoded: bytes = output.SerializeToString()
    return encoded
