"""Recorded routes as sealed segments: packed ids behind a header that says whose they are.

A segment holds the experts of consecutive tokens that one policy version went through. A sequence
that spans a weight update, or several turns over a shared prefix, is several segments: each turn
sends only its new tokens. The trainer joins them and gets every token's routes of exactly the
version that sampled it, or an error: routes that are damaged, missing or stale are never filled in.

Layout, little-endian: magic `PSRT`, format version u8, bits per id u8, layers u16, experts per
token u16, experts u16, tokens u32, first position u32, policy version i64, xxh3-64 of everything
else u64; then `ops.routes_pack`'s bytes. 36 bytes and, for 60 layers x 8 of 384 experts,
540 per token.
"""

import struct
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from penstock.kernels.ops.routing import routes_pack, routes_unpack
from penstock.kernels.reference.routing import bits_per_id
from penstock.messages.errors import CorruptDataError

_MAGIC, _FORMAT = b"PSRT", 1
_FIELDS = struct.Struct("<4sBBHHHIIq")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class RouteSegment(NamedTuple):
    """An opened segment."""

    routes: torch.Tensor
    """int16 [T, L, K], in slot order."""
    first_position: int
    """Position of its first token in the sequence."""
    policy_version: int


def seal_routes(
    routes: torch.Tensor, *, num_experts: int, policy_version: int, first_position: int = 0
) -> bytes:
    """Pack int16 [T, L, K], on any device, into a segment.

    Raises:
        KernelArgumentError: a wrong shape, or an id outside 0..E-1 (so one that was not recorded).

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
        CorruptDataError: foreign bytes, a wrong length, or a checksum that does not match.

    """
    if len(segment) < HEADER_BYTES:
        raise CorruptDataError(f"routes: {len(segment)} bytes do not hold a header")
    fields, packed = segment[: _FIELDS.size], segment[HEADER_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(segment, _FIELDS.size)
    if checksum != _checksum(fields, packed):
        raise CorruptDataError("routes: the checksum does not match the bytes")
    magic, version, width, num_layers, num_chosen, num_experts, *rest = _FIELDS.unpack(fields)
    num_tokens, first_position, policy_version = rest
    num_bytes = -(-num_layers * num_chosen * width // 8)
    if (magic, version) != (_MAGIC, _FORMAT) or width != bits_per_id(num_experts):
        raise CorruptDataError(f"routes: not a segment of format {_FORMAT}")
    if len(packed) != num_tokens * num_bytes:
        raise CorruptDataError(f"routes: {len(packed)} bytes for {num_tokens} x {num_bytes}")
    rows = torch.from_numpy(np.frombuffer(packed, np.uint8).copy()).view(num_tokens, num_bytes)
    routes = routes_unpack(rows, num_layers, num_chosen, num_experts)
    if routes.numel() and int(routes.max()) >= num_experts:
        raise CorruptDataError(f"routes: an id is not below {num_experts}")
    return RouteSegment(routes, first_position, policy_version)


def _checksum(fields: bytes, packed: bytes) -> int:
    hasher = xxhash.xxh3_64(fields)
    hasher.update(packed)
    return hasher.intdigest()
