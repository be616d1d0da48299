"""Messages of the Tinker API that are not JSON: requests of forward_backward, and the answers with arrays.

The fields and their numbers are those of the package tinker 0.38 (Apache-2.0). Numbers that come in bulk are bytes,
little-endian: tokens int32, log-probabilities float32, offsets int64.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError
from jaxtrain.serving.datums import Datum

TYPE = "application/x-protobuf"
MOST_DATA = 4096  # of a request; the client sends 1024 at once
STOP, LENGTH = 0, 1  # why a sampled sequence ended
DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32, INT64 = 1, 2
_KINDS = descriptor_pb2.FieldDescriptorProto
# Message -> field: (number, kind, how often). A kind that is not of protobuf is another message.
_MESSAGES: dict[str, dict[str, tuple[int, str, str]]] = {
    "SparseCsr": {},  # refused, but known to be there
    "Tensor": {"dense": (1, "BYTES", ""), "sparse_csr": (2, "SparseCsr", ""), "dtype": (3, "INT32", ""),
               "shape": (4, "INT64", "many")},
    "EncodedTextChunk": {"tokens": (1, "BYTES", "")},
    "OtherChunk": {},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk", ""), "image": (2, "OtherChunk", ""),
              "dmel": (3, "OtherChunk", "")},
    "NamedTensor": {"key": (1, "STRING", ""), "value": (2, "Tensor", "")},
    "Datum": {"model_input": (1, "Chunk", "many"), "loss_fn_inputs": (2, "NamedTensor", "many")},
    "NamedNumber": {"key": (1, "STRING", ""), "value": (2, "DOUBLE", "")},
    "NumberOrText": {"number": (1, "DOUBLE", "maybe"), "text": (2, "STRING", "maybe")},
    "NamedSetting": {"key": (1, "STRING", ""), "value": (2, "NumberOrText", "")},
    "ForwardBackwardRequest": {
        "model_id": (1, "STRING", ""), "seq_id": (2, "INT32", ""), "data": (3, "Datum", "many"),
        "loss_fn": (4, "STRING", ""), "loss_fn_config": (5, "NamedNumber", "many"), "forward_only": (6, "BOOL", ""),
        "loss_fn_config_v2": (7, "NamedSetting", "many")},
    "BatchedTensor": {"data": (1, "BYTES", ""), "offsets": (2, "BYTES", ""), "dtype": (3, "INT32", "")},
    "NamedBatch": {"key": (1, "STRING", ""), "value": (2, "BatchedTensor", "")},
    "ArrayRecord": {"type_tag": (1, "STRING", ""), "fields": (2, "NamedBatch", "many"),
                    "num_datums": (3, "INT64", "")},
    "ForwardBackwardOutput": {"loss_fn_output_type": (1, "STRING", ""), "loss_fn_outputs": (2, "ArrayRecord", "many"),
                              "metrics": (3, "NamedNumber", "many")},
    "SampledSequence": {"stop_reason": (1, "INT32", ""), "tokens": (2, "BYTES", ""), "logprobs": (3, "BYTES", "maybe")},
    "SampleResponse": {"sequences": (1, "SampledSequence", "many"), "prompt_logprobs": (2, "BYTES", "maybe")},
}


@dataclass(frozen=True)
class ForwardBackward:
    """A request for the loss of data, and for its gradient unless it is `forward_only`."""

    model_id: str
    seq_id: int
    data: "Sequence[Message]"
    loss_fn: str
    numbers: Mapping[str, float]
    forward_only: bool


Message = PyTree  # of a kind that is described above: its fields are attributes


@functools.cache
def message_of(name: str) -> Callable[..., Message]:
    """Return the class of messages of this name."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"training_service.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptions of all messages, apart from those that other packages in this process have."""
    file = descriptor_pb2.FileDescriptorProto(name="training_service.proto", package="training_service",
                                              syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for field, (number, kind, often) in fields.items():
            other = kind in _MESSAGES
            one = made.field.add(name=field, number=number, type=getattr(_KINDS, "TYPE_MESSAGE" if other else
                                                                         f"TYPE_{kind}"),
                                 label=_KINDS.LABEL_REPEATED if often == "many" else _KINDS.LABEL_OPTIONAL)
            if other:
                one.type_name = f".training_service.{kind}"
            if often == "maybe":
                one.proto3_optional, one.oneof_index = True, len(made.oneof_decl)
                made.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def forward_backward_of(body: bytes) -> ForwardBackward:
    """Return a request of forward_backward; refuse anything else."""
    found = message_of("ForwardBackwardRequest")()
    try:
        found.ParseFromString(body)
    except message.DecodeError:
        raise UserError("request", "it is not a protobuf message of forward_backward",
                        "send what the package tinker 0.38 does") from None
    if len(found.data) > MOST_DATA:
        raise UserError("data", f"the request has {len(found.data):,}", f"send at most {MOST_DATA:,} at once")
    return ForwardBackward(found.model_id, found.seq_id, found.data, found.loss_fn, _numbers(found),
                           found.forward_only)


def datums_of(request: ForwardBackward) -> list[Datum]:
    """Return the data of a request; refuse what is not text."""
    return [Datum(_tokens(datum.model_input, at), {one.key: _array(one.value, f"{at}.loss_fn_inputs.{one.key}")
                                                   for one in datum.loss_fn_inputs})
            for at, datum in ((f"data[{number}]", datum) for number, datum in enumerate(request.data))]


def _numbers(request: Message) -> dict[str, float]:
    found = {one.key: one.value for one in request.loss_fn_config}
    for one in request.loss_fn_config_v2:
        found[one.key] = one.value.number if one.value.HasField("number") else math.nan
    return found


def _tokens(chunks: Sequence[Message], at: str) -> np.ndarray:
    if any(not chunk.HasField("encoded_text") or chunk.HasField("image") or chunk.HasField("dmel") for chunk in chunks):
        raise UserError(f"{at}.model_input", "it has images or sound", "give tokens of text")
    return _numbers_of(b"".join(chunk.encoded_text.tokens for chunk in chunks), np.dtype("<i4"), f"{at}.model_input")


def _array(tensor: Message, at: str) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        raise UserError(at, "it is sparse, with several targets for each token", "give one target for each token")
    if tensor.dtype not in DTYPES:
        raise UserError(at, f"its dtype has number {tensor.dtype}", "give float32, int32 or int64")
    found = _numbers_of(tensor.dense, DTYPES[tensor.dtype], at)
    shape = tuple(tensor.shape) or found.shape
    if any(size < 0 for size in shape) or math.prod(shape) != found.size or len(shape) > 8:
        raise UserError(at, f"it has {found.size} numbers, and its shape is {list(shape)}", "give the shape it has")
    return found.reshape(shape)


def _numbers_of(content: bytes, kind: np.dtype, at: str) -> np.ndarray:
    if len(content) % kind.itemsize:
        raise UserError(at, f"{len(content)} bytes are no whole number of {kind}", "send it again")
    return np.frombuffer(content, kind)


def forward_backward_output(loss: float, logprobs: Sequence[np.ndarray]) -> bytes:
    """Return the answer of forward_backward."""
    found = message_of("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    record = found.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    batched = record.fields.add(key="logprobs").value
    batched.dtype = FLOAT32
    batched.data = b"".join(one.astype("<f4").tobytes() for one in logprobs)
    batched.offsets = np.cumsum([0, *(4 * len(one) for one in logprobs)]).astype("<i8").tobytes()
    found.metrics.add(key="loss:sum", value=loss)
    return found.SerializeToString()


def sample_response(sequences: Sequence[tuple[int, np.ndarray, np.ndarray]],
                    prompt_logprobs: np.ndarray | None) -> bytes:
    """Return the answer of a sampling request: of each sequence why it ended, tokens and their log-probabilities.

    `prompt_logprobs`: NaN where there is none; None: they were not asked for.
    """
    found = message_of("SampleResponse")()
    for reason, tokens, logprobs in sequences:
        found.sequences.add(stop_reason=reason, tokens=tokens.astype("<i4").tobytes(),
                            logprobs=logprobs.astype("<f4").tobytes())
    if prompt_logprobs is not None:
        found.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return found.SerializeToString()
