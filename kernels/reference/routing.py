"""Router top-k with record and replay, and the fixed-order sum of experts' outputs."""

from typing import NamedTuple

import numpy as np

from penstock.kernels.reference.float32 import exp, fma, lane_sum

ROUTE_FREE = -1
"""An id that means: nothing was recorded for this token, take the router's own choice."""


class Routed(NamedTuple):
    """T tokens' experts in slot order."""

    ids: np.ndarray
    """int16 [T, K]."""
    weights: np.ndarray
    """float32 [T, K]."""
    num_mismatched: np.ndarray
    """int32 [T]: recorded ids that are not among the router's own."""
    num_replaced: np.ndarray
    """int32 [T]: recorded ids that were implausible and gave way."""


def router_topk(
    logits: np.ndarray,
    num_chosen: int,
    *,
    normalize: bool,
    recorded: np.ndarray | None,
    plausibility_min: float,
) -> Routed:
    """Route float32 [T, E]; see `penstock.kernels.ops.router_topk`."""
    scores = _softmax(logits)
    ranked = np.where(np.isnan(logits), -np.inf, logits)
    own = np.argsort(-ranked, axis=1, kind="stable")[:, :num_chosen]
    ids = own.copy()
    mismatched = np.zeros(len(logits), np.int32)
    replaced = np.zeros(len(logits), np.int32)
    for t in range(len(logits)):
        if recorded is not None and recorded[t, 0] != ROUTE_FREE:
            mismatched[t] = np.sum(~np.isin(recorded[t], own[t]))
            ids[t], replaced[t] = _replay(recorded[t], own[t], scores[t], plausibility_min)
    weights = np.take_along_axis(scores, ids, axis=1)
    if normalize:
        weights = weights / _sum_in_order(weights)[:, None]
    return Routed(ids.astype(np.int16), weights, mismatched, replaced)


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


def _replay(
    recorded: np.ndarray, own: np.ndarray, scores: np.ndarray, plausibility_min: float
) -> tuple[np.ndarray, int]:
    """Keep the plausible ids; each other slot takes the next of the router's own not in use."""
    is_kept = scores[recorded] >= np.float32(plausibility_min)
    in_use = set(recorded[is_kept].tolist())
    spare = iter([expert for expert in own.tolist() if expert not in in_use])
    ids = [r if kept else next(spare) for r, kept in zip(recorded, is_kept, strict=True)]
    return np.array(ids), int(np.sum(~is_kept))


def _sum_in_order(weights: np.ndarray) -> np.ndarray:
    total = weights[:, 0]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot]
    return total
