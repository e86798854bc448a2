"""The SDK's protobuf messages: requests of forward_backward, its answers, and those of samples."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.infra.tinker.protobuf import Value, field, read_fields
from penstock.messages.errors import CodecError

T = TypeVar("T")
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_DIMENSIONS_MAX = 2


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One training sequence of T tokens."""

    tokens: np.ndarray
    """int32 [T]."""
    inputs: dict[str, np.ndarray]
    """Inputs of the loss by name, float32 or int64, [T] or [T, K]."""


class ForwardBackward(msgspec.Struct, frozen=True, kw_only=True):
    """A request for losses, and for their gradients unless it is forward only."""

    model_id: str = ""
    seq_id: int = 0
    data: list[Datum]
    loss_fn: str = ""
    settings: dict[str, float]
    """The SDK's `loss_fn_config`."""
    forward_only: bool = False


class SampledSequence(NamedTuple):
    """N sampled tokens."""

    tokens: np.ndarray
    """int32 [N]."""
    logprobs: np.ndarray
    """float32 [N]."""
    is_stopped: bool
    """Whether a stop token or text ended it, and not its length."""
    top_ids: np.ndarray | None
    """int32 [N, K]."""
    top_logprobs: np.ndarray | None
    """float32 [N, K]."""


def read_forward_backward(data: bytes) -> ForwardBackward:
    """Decode a request.

    Raises:
        CodecError: It is malformed; the text begins with the field.

    """
    texts, numbers, data_found = dict[int, str](), dict[int, int](), list[Datum]()
    settings: dict[str, float] = {}
    for number, value in read_fields(data, "body"):
        if number in {1, 4}:
            texts[number] = _text(value, "model_id" if number == 1 else "loss_fn")
        elif number in {2, 6}:
            numbers[number] = _as(value, int, "seq_id" if number == 2 else "forward_only")
        elif number == 3:
            name = f"data[{len(data_found)}]"
            data_found.append(_datum(_as(value, bytes, name), name))
        elif number == 7:  # Its predecessor, 5, repeats the numbers.
            name, setting = _entry(value, "loss_fn_config")
            parts = dict(read_fields(_as(setting, bytes, name), "loss_fn_config"))
            setting = parts.get(1, parts.get(2))
            if not isinstance(setting, float):
                raise CodecError(f"loss_fn_config.{name}: expected a number")
            settings[name] = setting
    return ForwardBackward(
        model_id=texts.get(1, ""),
        seq_id=numbers.get(2, 0),
        data=data_found,
        loss_fn=texts.get(4, ""),
        settings=settings,
        forward_only=bool(numbers.get(6)),
    )


def _datum(data: bytes, what: str) -> Datum:
    chunks: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in read_fields(data, what):
        if number == 1:
            name = f"{what}.model_input[{len(chunks)}]"
            parts = dict(read_fields(_as(value, bytes, name), name))
            if set(parts) != {1}:
                raise CodecError(f"{name}: expected encoded_text: this server takes tokens alone")
            found = dict(read_fields(_as(parts[1], bytes, name), name)).get(1, b"")
            chunks.append(_array(_as(found, bytes, name), _DTYPES[3], name))
        elif number == 2:
            name, tensor = _entry(value, f"{what}.loss_fn_inputs")
            where = f"{what}.loss_fn_inputs.{name}"
            inputs[name] = _tensor(_as(tensor, bytes, where), where)
        # Spans of provenance (3 and 4) serve stable_reinforce alone, which is refused by its name.
    tokens = np.concatenate(chunks) if chunks else np.empty(0, np.int32)
    return Datum(tokens=tokens.astype(np.int32), inputs=inputs)


def _tensor(data: bytes, what: str) -> np.ndarray:
    values, kind, shape = b"", 0, list[int]()
    for number, value in read_fields(data, what):
        if number == 1:
            values = _as(value, bytes, what)
        elif number == 2:
            raise CodecError(f"{what}: expected a dense tensor, got a sparse one")
        elif number == 3:
            kind = _as(value, int, what)
        elif number == 4:
            # Repeated numbers come packed.
            packed = value if isinstance(value, bytes) else b""
            shape += _packed(packed, what) if packed else [_as(value, int, what)]
    if kind not in _DTYPES:
        raise CodecError(f"{what}: expected the dtype float32 or int64, got {kind}")
    found = _array(values, _DTYPES[kind], what)
    if len(shape) > _DIMENSIONS_MAX:
        raise CodecError(f"{what}: expected at most {_DIMENSIONS_MAX} dimensions, got {len(shape)}")
    if shape and math.prod(shape) != found.size:
        raise CodecError(f"{what}: expected values of the shape {shape}, got {found.size}")
    return found.reshape(shape) if shape else found


def _packed(data: bytes, what: str) -> list[int]:
    # As a message whose tags are put in front of each number.
    found, at = list[int](), 0
    for index, byte in enumerate(data):
        if byte < 0x80:
            found += [
                _as(v, int, what) for _, v in read_fields(b"\x08" + data[at : index + 1], what)
            ]
            at = index + 1
    return found


def _array(data: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise CodecError(f"{what}: expected whole numbers of {dtype.itemsize} bytes each")
    return np.frombuffer(data, dtype)


def _entry(value: Value, what: str) -> tuple[str, Value]:
    parts = dict(read_fields(_as(value, bytes, what), what))
    return _text(parts.get(1, b""), what), parts.get(2, b"")


def _text(value: Value, what: str) -> str:
    try:
        return _as(value, bytes, what).decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"{what}: expected UTF-8 text") from error


def _as(value: Value, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise CodecError(f"{what}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def forward_backward_reply(
    outputs: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
    """Encode an answer.

    Args:
        outputs: By name, float32 of each sequence, [T] or [T, K] with one K for all.
        metrics: By name and how the SDK reduces them, e.g. `loss:sum`.

    """
    record = field(1, "ArrayRecord")
    for name, arrays in outputs.items():
        flat = [np.ascontiguousarray(each, "<f4") for each in arrays]
        offsets = np.cumsum([0, *(each.nbytes for each in flat)], dtype="<i8")
        tensor = field(1, b"".join(each.tobytes() for each in flat)) + field(2, offsets.tobytes())
        tensor += field(3, _FLOAT32) + b"".join(field(4, int(n)) for n in flat[0].shape[1:])
        record += field(2, field(1, name) + field(2, tensor))
    record += field(3, len(next(iter(outputs.values()))))
    found = field(1, "ArrayRecord") + field(2, record)
    return found + b"".join(field(3, field(1, k) + field(2, float(v))) for k, v in metrics.items())


def sample_reply(sequences: Sequence[SampledSequence]) -> bytes:
    """Encode an answer without the logprobs of its prompt."""
    found = b""
    for each in sequences:
        part = field(1, int(not each.is_stopped)) + field(2, each.tokens.astype("<i4").tobytes())
        part += field(3, each.logprobs.astype("<f4").tobytes())
        if each.top_ids is not None and each.top_logprobs is not None:
            top = field(1, each.top_ids.astype("<i4").tobytes())
            top += field(2, each.top_logprobs.astype("<f4").tobytes())
            top += field(3, each.top_ids.shape[1]) + field(4, each.top_ids.shape[0])
            part += field(4, top)
        found += field(1, part)
    return found


def prompt_logprobs_reply(logprobs: np.ndarray) -> bytes:
    """Encode what an answer adds for its prompt: float32 [P], NaN where there is none."""
    return field(2, logprobs.astype("<f4").tobytes())
