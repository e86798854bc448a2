"""Reference routing: replay of recorded experts, and packed routes.

Routes are packed with the smallest number of bits that holds an id: bit i of the j-th id of a token
is bit j * width + i.
"""

from typing import NamedTuple

import numpy as np
import torch

ROUTE_FREE = -1
"""Id of tokens without recorded routes, which get the router's own choice."""


class ExpertChoice(NamedTuple):
    """Experts of T tokens in slot order."""

    ids: torch.Tensor
    """int64 [T, K]: expert ids."""
    num_mismatched: torch.Tensor
    """[T]: number of recorded ids that are not among the router's own."""


def replay_experts(
    own: torch.Tensor, scores: torch.Tensor, recorded: torch.Tensor, plausibility_min: float
) -> ExpertChoice:
    """Replace the router's own experts by recorded ones; all Python code for replay is here.

    Args:
        own: Router's own choice int64 [T, K], best first.
        scores: Router probabilities [T, E] of this pass.
        recorded: Expert ids [T, K] to replay, in slot order; a row that starts with `ROUTE_FREE`
            is routed freely.
        plausibility_min: Threshold for recorded experts, as a fraction of the lowest score among
            the router's own. A recorded expert below it is replaced by the best expert that the
            token does not use yet (Composer 2, arXiv 2603.24477). Being relative, the threshold
            does not depend on the number of experts or the sharpness of the router.

    """
    is_recorded = recorded[:, :1] != ROUTE_FREE
    ids = torch.where(is_recorded, recorded.long(), own)
    num_mismatched = (ids[:, :, None] != own[:, None]).all(2).sum(1)
    weakest = scores.gather(1, own[:, -1:])
    is_kept = ~is_recorded | (scores.gather(1, ids) >= plausibility_min * weakest)
    if not is_kept.all():
        kept = torch.where(is_kept, ids, ROUTE_FREE)
        in_use = (own[:, :, None] == kept[:, None]).any(2)
        # A stable sort puts the own experts that are not in use first, best first; each replaced
        # slot takes the next of them.
        spare = own.gather(1, in_use.int().sort(dim=1, stable=True).indices)
        place = ((~is_kept).cumsum(1) - 1).clamp(min=0)
        ids = torch.where(is_kept, ids, spare.gather(1, place))
    return ExpertChoice(ids, num_mismatched)


def bits_per_id(num_experts: int) -> int:
    """Return ceil(log2(num_experts)), at least 1."""
    return max(1, (num_experts - 1).bit_length())


def pack_routes(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Pack ids [T, L, K] -> uint8 [T, ceil(L * K * bits / 8)]; tokens start on byte boundaries."""
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
