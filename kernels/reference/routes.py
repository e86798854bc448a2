"""Expert ids in as few whole bits as they need: bit i of id j of a token is bit j * width + i."""

import numpy as np


def bits_per_id(num_experts: int) -> int:
    """Return ceil(log2(num_experts)), at least 1."""
    return max(1, (num_experts - 1).bit_length())


def pack_routes(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Pack ids [T, L, K] -> uint8 [T, ceil(L * K * bits / 8)]; a token starts on a byte."""
    ids = routes.reshape(len(routes), -1).astype(np.uint16)
    places = np.arange(bits_per_id(num_experts), dtype=np.uint16)
    bits = (ids[..., None] >> places & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(routes), -1), axis=1, bitorder="little")


def unpack_routes(
    packed: np.ndarray, num_layers: int, num_chosen: int, num_experts: int
) -> np.ndarray:
    """Invert `pack_routes` -> int16 [T, L, K]."""
    width = bits_per_id(num_experts)
    count = num_layers * num_chosen * width
    bits = np.unpackbits(packed, axis=1, count=count, bitorder="little").astype(np.int32)
    ids = (bits.reshape(-1, width) << np.arange(width)).sum(1)
    return ids.astype(np.int16).reshape(-1, num_layers, num_chosen)
