"""The ladder of codecs: each payload takes the one of the smallest predicted size.

```
 nothing changed ──▶ equal        a sample ──▶ predicted bits of each ──▶ class_gap_ulp │ gap_ulp │
                                                           bitmask_ulp │ xor_zstd │ raw
```
"""

from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import numpy as np

from penstock.kernels.delta import predict
from penstock.kernels.delta.arrays import (
    Patch,
    check_of,
    check_out,
    check_pair,
    join_nibbles,
    patch_between,
)
from penstock.kernels.delta.compiled import apply_steps, decode_steps, encode_steps
from penstock.kernels.delta.container import pack, plain_body, unpack
from penstock.kernels.delta.dtypes import Dtype, pack_nibbles, unpack_nibbles
from penstock.kernels.delta.header import Codec, Header
from penstock.messages.errors import CorruptDataError


def encode(base: np.ndarray, target: np.ndarray, dtype: Dtype | None = None) -> bytes:
    """Encode what turns `base` into `target`.

    Args:
        base: bit patterns, as unsigned integers of the element size; contiguous, any shape.
        target: the same shape and dtype.
        dtype: what the elements are; without it uint8 is INT8, uint16 BF16, uint32 FP32,
            uint64 INT64.

    Returns:
        The payload of the smallest predicted size.

    Raises:
        ValueError: not two contiguous arrays of one shape and of the kind's storage type.

    """
    dtype = check_pair(base, target, dtype)
    old, new = _elements(base, dtype), _elements(target, dtype)
    chosen = predict.choose_codec(old, new, dtype)
    header, body = _encode(chosen, base, target, dtype)
    if header.num_changed == 0:
        header, body = _encode(predict.CodecChoice(Codec.EQUAL, [0]), base, target, dtype)
    elif header.plain_bytes > target.nbytes:
        header, body = _encode(predict.CodecChoice(Codec.RAW, [0]), base, target, dtype)
    return pack(header, body)


def encode_with(
    codec: Codec, base: np.ndarray, target: np.ndarray, dtype: Dtype | None = None
) -> bytes:
    """Encode with one codec, whatever the size.

    Raises:
        ValueError: arrays that do not fit each other or the codec.

    """
    dtype = check_pair(base, target, dtype)
    if codec.has_steps and not dtype.traits.has_steps:
        raise ValueError(f"{codec.name} is not for {dtype.name}")
    if codec is Codec.EQUAL and not np.array_equal(base, target):
        raise ValueError("EQUAL is for equal arrays")
    thresholds = [0]
    if codec is Codec.CLASS_GAP_ULP:
        thresholds = predict.class_thresholds(base, target, dtype)
    return pack(*_encode(predict.CodecChoice(codec, thresholds), base, target, dtype))


def decode(base: np.ndarray, payload: bytes | memoryview) -> Patch:
    """Decode to overwrites of `base`; nothing is written.

    Args:
        base: what the payload was made against, contiguous.
        payload: of `encode`.

    Raises:
        CorruptDataError: the payload is damaged or foreign, or was made against another base.

    """
    header, body = _open(base, payload)
    _prove_base(header, base)
    flat = base.reshape(-1)
    with _streams_refused():
        if header.codec is Codec.EQUAL:
            return Patch(np.zeros(0, np.int64), flat[:0])
        if not header.codec.has_steps:
            return patch_between(flat, _decode_planes(header, flat, body))
        patch = Patch(*decode_steps(header, _elements(flat, header.dtype), body))
        return join_nibbles(patch, flat) if header.dtype is Dtype.INT4X2 else patch


def apply(
    base: np.ndarray, payload: bytes | memoryview, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the target, verified against the one encoded.

    Args:
        base: what the payload was made against, contiguous.
        payload: of `encode`.
        out: where to write it, of the base's shape and dtype, contiguous and apart from it; without
            it, new memory, whose first touch can take longer than decoding. The base is proved
            while it is read, so that what this holds after an error is undefined.

    Raises:
        CorruptDataError: as `decode`, or the result is not the encoded target.
        ValueError: `out` does not fit.

    """
    header, body = _open(base, payload)
    target = np.empty_like(base) if out is None else check_out(base, out)
    old, new = base.reshape(-1), target.reshape(-1)
    with _streams_refused():
        if header.codec.has_steps and header.dtype is not Dtype.INT4X2:
            check = _apply_steps(header, old, body, new)
        else:
            _prove_base(header, base)
            _apply_whole(header, old, body, new)
            check = check_of(new)
    if check != header.target_check:
        raise CorruptDataError("delta: the result is not the array that was encoded")
    return target


def _apply_steps(header: Header, old: np.ndarray, body: bytes | memoryview, new: np.ndarray) -> int:
    """Write the target, checking the base at the same time; return the target's check."""
    try:
        base_check, target_check = apply_steps(header, old, body, new)
    except ValueError:
        _prove_base(header, old)  # streams contradict another base, too: report that instead
        raise
    _demand_base(header, base_check)
    return target_check


def _apply_whole(
    header: Header, old: np.ndarray, body: bytes | memoryview, new: np.ndarray
) -> None:
    """Write the target over `new`, array by array."""
    if header.codec is Codec.EQUAL:
        new[...] = old
    elif not header.codec.has_steps:
        new[...] = _decode_planes(header, old, body)
    else:
        halves = unpack_nibbles(old)
        apply_steps(header, halves.copy(), body, halves)
        new[...] = pack_nibbles(halves)


def _encode(
    chosen: predict.CodecChoice, base: np.ndarray, target: np.ndarray, dtype: Dtype
) -> tuple[Header, bytes | memoryview]:
    old, new = _elements(base, dtype), _elements(target, dtype)
    header = Header(
        codec=chosen.codec,
        dtype=dtype,
        num_elements=old.size,
        num_changed=0,
        base_check=0,
        target_check=0,
    )
    if chosen.codec.has_steps:
        header, body = encode_steps(header, chosen.thresholds, old, new)
    else:
        header, body = _encode_planes(header, base.reshape(-1), target.reshape(-1))
    if not chosen.codec.has_steps or dtype is Dtype.INT4X2:  # not taken on the way
        checks = {"base_check": check_of(base), "target_check": check_of(target)}
        header = msgspec.structs.replace(header, **checks)
    return header, body


def _elements(array: np.ndarray, dtype: Dtype) -> np.ndarray:
    flat = array.reshape(-1)
    return unpack_nibbles(flat) if dtype is Dtype.INT4X2 else flat


def _open(base: np.ndarray, payload: bytes | memoryview) -> tuple[Header, bytes | memoryview]:
    """Return header and body of a payload that fits a base; its base is not checked yet."""
    header, stored = unpack(payload)
    if base.size != header.num_items or base.dtype != header.dtype.storage:
        raise CorruptDataError(
            f"delta: made for {header.num_items} items of {header.dtype.storage}"
            f" ({header.dtype.name}), the base is {base.dtype}{base.shape}"
        )
    if not base.flags.c_contiguous:
        raise ValueError("expected a contiguous base, got a strided one")
    return header, plain_body(header, stored)


def _prove_base(header: Header, base: np.ndarray) -> None:
    if header.codec is not Codec.RAW:
        _demand_base(header, check_of(base))


def _demand_base(header: Header, check: int) -> None:
    if check != header.base_check:
        raise CorruptDataError("delta.base_check: the payload was made against another base")


@contextmanager
def _streams_refused() -> Generator[None]:
    try:
        yield
    except CorruptDataError:
        raise
    except ValueError as error:
        raise CorruptDataError(f"delta: its streams contradict each other: {error}") from error


def _encode_planes(header: Header, base: np.ndarray, target: np.ndarray) -> tuple[Header, bytes]:
    """Lay out byte planes of the target (RAW), of its difference (XOR_ZSTD), or nothing (EQUAL).

    Args:
        header: the codec and the kind; what the coding finds out is filled in.
        base: [N].
        target: [N].

    """
    if header.codec is Codec.EQUAL:
        return header, b""
    difference = base ^ target
    array = difference if header.codec is Codec.XOR_ZSTD else target
    body = array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    if header.dtype is Dtype.INT4X2:
        difference = unpack_nibbles(difference)
    num_changed = int(np.count_nonzero(difference))
    return msgspec.structs.replace(header, num_changed=num_changed, plain_bytes=len(body)), body


def _decode_planes(header: Header, base: np.ndarray, body: bytes | memoryview) -> np.ndarray:
    """Invert `_encode_planes`: return the target [N].

    Raises:
        ValueError: the planes do not fill the array.

    """
    if len(body) != base.nbytes:
        raise ValueError(f"{len(body)} bytes of planes for {base.nbytes} bytes of elements")
    planes = np.frombuffer(body, np.uint8).reshape(base.itemsize, -1)
    array = np.ascontiguousarray(planes.T).view(base.dtype).reshape(-1)
    return base ^ array if header.codec is Codec.XOR_ZSTD else array
