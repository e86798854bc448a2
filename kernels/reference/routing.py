"""Router top-k with record and replay, packed routes, and the fixed-order sum of experts' outputs.

Routes are packed in as few whole bits as ids need: bit i of id j of a token is bit j * width + i.
"""

from typing import NamedTuple

import numpy as np
import torch

from penstock.kernels.reference.float32 import exp, fma, lane_sum

ROUTE_FREE = -1
"""An id that means: nothing was recorded for this token, take the router's own choice."""


class ExpertChoice(NamedTuple):
    """T tokens' experts in slot order."""

    ids: torch.Tensor
    """int64 [T, K]."""
    num_mismatched: torch.Tensor
    """[T]: recorded ids that are not among the router's own."""
    num_replaced: torch.Tensor
    """[T]: recorded ids that were implausible and gave way."""


def replay_experts(
    own: torch.Tensor, scores: torch.Tensor, recorded: torch.Tensor, plausibility_min: float
) -> ExpertChoice:
    """Put recorded experts in the place of the router's own; the only such code in Python.

    Args:
        own: int64 [T, K] the router's choice, best first.
        scores: [T, E] probabilities of this pass.
        recorded: integers [T, K] to replay, in slot order; a row that starts with `ROUTE_FREE` is
            routed freely.
        plausibility_min: a recorded expert whose score is below this share of the weakest of the
            router's own gives way to the best of those that the token does not use yet (Composer
            2, arXiv 2603.24477); how sharp the router is does not matter, nor how many experts it
            has.

    """
    is_recorded = recorded[:, :1] != ROUTE_FREE
    ids = torch.where(is_recorded, recorded.long(), own)
    num_mismatched = (ids[:, :, None] != own[:, None]).all(2).sum(1)
    weakest = scores.gather(1, own[:, -1:])
    is_kept = ~is_recorded | (scores.gather(1, ids) >= plausibility_min * weakest)
    if not is_kept.all():
        kept = torch.where(is_kept, ids, ROUTE_FREE)
        in_use = (own[:, :, None] == kept[:, None]).any(2)
        # Own experts that are not in use come first, best first: slot i takes the next of them.
        spare = own.gather(1, in_use.int().sort(dim=1, stable=True).indices)
        place = ((~is_kept).cumsum(1) - 1).clamp(min=0)
        ids = torch.where(is_kept, ids, spare.gather(1, place))
    return ExpertChoice(ids, num_mismatched, (~is_kept).sum(1))


def router_topk(
    logits: np.ndarray,
    num_chosen: int,
    *,
    normalize: bool,
    recorded: np.ndarray | None,
    plausibility_min: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Route float32 [T, E] -> the fields of `Routing`; see `penstock.kernels.ops.router_topk`."""
    scores = _softmax(logits)
    ranked = np.where(np.isnan(logits), -np.inf, logits)
    ids = np.argsort(-ranked, axis=1, kind="stable")[:, :num_chosen]
    num_mismatched = num_replaced = np.zeros(len(logits), np.int32)
    if recorded is not None:
        own, chances, replayed = map(torch.from_numpy, (ids, scores, recorded))
        choice = replay_experts(own, chances, replayed, plausibility_min)
        ids, num_mismatched, num_replaced = (tensor.numpy() for tensor in choice)
    weights = np.take_along_axis(scores, ids, axis=1)
    if normalize:
        weights = weights / _sum_in_order(weights)[:, None]
    return ids, weights, num_mismatched, num_replaced


def moe_combine(per_slot: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum float32 [T, K, H] weighted by [T, K] over K in slot order -> [T, H]."""
    total = per_slot[:, 0] * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total = fma(per_slot[:, slot], weights[:, slot : slot + 1], total)
    return total


def _softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        terms = exp(logits - np.fmax.reduce(logits, axis=1, keepdims=True))
        return terms / lane_sum(terms)[:, None]


def _sum_in_order(weights: np.ndarray) -> np.ndarray:
    total = weights[:, 0]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot]
    return total


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
