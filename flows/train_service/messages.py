"""Binary messages of the Tinker API: requests and results of forward and backward passes, and samples.

The fields are those of `tinker_public.proto` in the client's package (tinker 0.38); fields that the service does not
read are left out. The messages live in a pool of their own, beside those of a client in the same process.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

PROTO_TYPE = "application/x-protobuf"
FLOAT32, INT64 = 1, 2
"""`DType` of a tensor."""
STOP, LENGTH = 0, 1
"""`StopReason` of a sample."""
_SCHEMA = """
ForwardBackwardRequest: model_id#1 string, seq_id#2 int32, data#3 Datum*, loss_fn#4 string,
    loss_fn_config#5 {double}, forward_only#6 bool, loss_fn_config_v2#7 {LossConfigValue}
LossConfigValue: number#1 double?, text#2 string?
Datum: model_input#1 Chunk*, loss_fn_inputs#2 {Tensor}
Chunk: encoded_text#1 EncodedTextChunk, image#2 bytes?, dmel#3 bytes?
EncodedTextChunk: tokens#1 bytes
Tensor: dense#1 bytes, sparse_csr#2 SparseCsr, dtype#3 int32, shape#4 int64*
SparseCsr: values#1 bytes, crow_indices#2 bytes, col_indices#3 bytes
ForwardBackwardOutput: loss_fn_output_type#1 string, loss_fn_outputs#2 ArrayRecord*, metrics#3 {double}
ArrayRecord: type_tag#1 string, fields#2 {BatchedTensor}, num_datums#3 int64
BatchedTensor: data#1 bytes, offsets#2 bytes, dtype#3 int32, trailing_shape#4 int64*
SampleResponse: sequences#1 SampledSequence*, prompt_logprobs#2 bytes?, topk_prompt_logprobs#3 TopkLogprobs,
    prompt_cache_hit_tokens#4 int32
SampledSequence: stop_reason#1 int32, tokens#2 bytes, logprobs#3 bytes?, topk_sampled_logprobs#4 TopkLogprobs
TopkLogprobs: token_ids#1 bytes, logprobs#2 bytes, k#3 uint32, length#4 uint32
"""
"""Messages and their fields: `NAME#NUMBER TYPE`; `*` repeats a field, `?` tells an absent one from an empty one, and
`{TYPE}` maps strings to values. Enumerations are read as their numbers."""
_FIELD = re.compile(r"\b(\w+)#(\d+) (\{?)(\w+)\}?([*?]?)")
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
"""Numbers of `FieldDescriptorProto.Type`."""
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


@cache
def _classes() -> dict[str, Any]:
    """Return the class of each message by its name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    package = "espalier"
    file = descriptor_pb2.FileDescriptorProto(name="train_service.proto", package=package, syntax="proto3")

    def add(message: Any, name: str, number: int, kind: str, label: int, path: str = "") -> Any:
        field = message.field.add(name=name, number=number, label=label, type=_SCALARS.get(kind, _MESSAGE))
        if kind not in _SCALARS:
            field.type_name = path or f".{package}.{kind}"
        return field

    for name, text in re.findall(r"^(\w+):((?:.*\n)(?:    .*\n)*)", _SCHEMA, re.M):
        message = file.message_type.add(name=name)
        for field, number, mapped, kind, mark in _FIELD.findall(text):
            if mapped:
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                add(entry, "key", 1, "string", _OPTIONAL)
                add(entry, "value", 2, kind, _OPTIONAL)
                add(message, field, int(number), "map", _REPEATED, f".{package}.{name}.{entry.name}")
                continue
            added = add(message, field, int(number), kind, _REPEATED if mark == "*" else _OPTIONAL)
            if mark == "?":
                added.proto3_optional = True
                added.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{message.name}"))
        for message in file.message_type
    }


def message(name: str, data: bytes | None = None, **fields: Any) -> Any:
    """Return a message: that which `data` encodes, or one with these fields. Raises ValueError for other data."""
    from google.protobuf.message import DecodeError

    created = _classes()[name](**fields)
    if data is not None:
        try:
            created.ParseFromString(data)
        except DecodeError as error:
            raise ValueError(f"the body is no {name}: {error}") from None
    return created
