"""Sealed segments of recorded routes: packed expert ids with a header and a checksum.

A segment holds the experts to which one policy version routed consecutive tokens. A sequence that
spans a weight update, or several turns with a shared prefix, has several segments, because each
turn sends only its new tokens. The trainer joins them, so that each token has the routes of exactly
the version that sampled it. Damaged, missing or stale routes are an error and never filled in.

Layout, little-endian: magic `PSRT`, format version u8, bits per id u8, layers u16, experts per
token u16, experts u16, tokens u32, first position u32, policy version i64, xxh3-64 of everything
else u64; then the bytes of `ops.routes_pack`. The header has 36 bytes, and a token takes 540 bytes
for 60 layers with 8 of 384 experts.
"""

import struct
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from penstock.kernels.ops.routing import routes_pack
from penstock.kernels.reference.routing import bits_per_id, unpack_routes
from penstock.messages.errors import CorruptDataError

_MAGIC, _FORMAT = b"PSRT", 1
_FIELDS = struct.Struct("<4sBBHHHIIq")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class RouteSegment(NamedTuple):
    """Unpacked segment."""

    routes: torch.Tensor
    """int16 [T, L, K]: expert ids in slot order."""
    first_position: int
    """Position of the first token in the sequence."""
    policy_version: int


def seal_routes(
    routes: torch.Tensor, *, num_experts: int, policy_version: int, first_position: int = 0
) -> bytes:
    """Pack routes int16 [T, L, K], on any device, into a segment.

    Raises:
        KernelArgumentError: The shape is wrong, or an id is outside 0..E-1, e.g. was not recorded.

    """
    packed = routes_pack(routes, num_experts).cpu().numpy().tobytes()
    num_tokens, num_layers, num_chosen = routes.shape
    fields = _FIELDS.pack(
        *(_MAGIC, _FORMAT, bits_per_id(num_experts), num_layers, num_chosen, num_experts),
        *(num_tokens, first_position, policy_version),
    )
    return fields + _CHECKSUM.pack(_checksum(fields, packed)) + packed


def open_routes(segment: bytes) -> RouteSegment:
    """Verify and unpack one segment.

    Raises:
        CorruptDataError: The bytes are not a segment, have a wrong length, or fail the checksum.

    """
    if len(segment) < HEADER_BYTES:
        raise CorruptDataError(
            f"routes: expected at least {HEADER_BYTES} bytes of header, got {len(segment)}"
        )
    fields, packed = segment[: _FIELDS.size], segment[HEADER_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(segment, _FIELDS.size)
    # First of all, so that no field of a damaged header is believed.
    if checksum != _checksum(fields, packed):
        raise CorruptDataError("routes: the checksum does not match the bytes")
    magic, version, width, num_layers, num_chosen, num_experts, *rest = _FIELDS.unpack(fields)
    num_tokens, first_position, policy_version = rest
    num_bytes = -(-num_layers * num_chosen * width // 8)
    if (magic, version) != (_MAGIC, _FORMAT) or width != bits_per_id(num_experts):
        raise CorruptDataError(f"routes: not a segment of format {_FORMAT}")
    # Before unpacking, which allocates memory by these counts.
    if len(packed) != num_tokens * num_bytes:
        raise CorruptDataError(
            f"routes: expected {num_tokens} x {num_bytes} bytes, got {len(packed)}"
        )
    rows = np.frombuffer(packed, np.uint8).reshape(num_tokens, num_bytes)
    routes = torch.from_numpy(unpack_routes(rows, num_layers, num_chosen, num_experts))
    if routes.numel() and int(routes.max()) >= num_experts:
        raise CorruptDataError(f"routes: expected ids below {num_experts}, got {int(routes.max())}")
    return RouteSegment(routes, first_position, policy_version)


def _checksum(fields: bytes, packed: bytes) -> int:
    hasher = xxhash.xxh3_64(fields)
    hasher.update(packed)
    return hasher.intdigest()
