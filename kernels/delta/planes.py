"""Whole arrays as byte planes, which zstd packs better: all first bytes, then all second ones."""

import msgspec
import numpy as np

from penstock.kernels.delta.dtypes import Dtype, unpack_nibbles
from penstock.kernels.delta.header import Codec, Header


def encode_planes(header: Header, base: np.ndarray, target: np.ndarray) -> tuple[Header, bytes]:
    """Lay out the target (RAW), what differs from the base (XOR_ZSTD), or nothing (EQUAL).

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


def decode_planes(header: Header, base: np.ndarray, body: bytes | memoryview) -> np.ndarray:
    """Invert `encode_planes`: return the target [N].

    Raises:
        ValueError: the planes do not fill the array.

    """
    if len(body) != base.nbytes:
        raise ValueError(f"{len(body)} bytes of planes for {base.nbytes} bytes of elements")
    planes = np.frombuffer(body, np.uint8).reshape(base.itemsize, -1)
    array = np.ascontiguousarray(planes.T).view(base.dtype).reshape(-1)
    return base ^ array if header.codec is Codec.XOR_ZSTD else array
