"""Packing sequences so that what they share at the beginning is computed once.

The rollouts of a group start from one prompt, and often continue alike: the same file read, the
same first call. As a tree of pieces,

    system prompt ─┬─ task A, first turn ─┬─ rollout 0
                   │                      └─ rollout 1
                   └─ task B ─── ...

a token's hidden state depends on its ancestors alone, so losses and gradients are those of the
sequences apart, at the cost of the distinct tokens. Shared tokens must also share their recorded
routes, so pieces part where routes do. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SHARED_TOKENS_MIN = 16
"""A shorter shared piece is not worth an attention call of its own."""


@dataclass(frozen=True, kw_only=True)
class PackedTree:
    """Sequences as pieces, for `Policy.forward`."""

    input_ids: np.ndarray
    """[T] int64."""
    routed_experts: np.ndarray
    """[T, L, K] int64."""
    lengths: list[int]
    """Tokens of each piece."""
    parents: list[int]
    """The piece that each piece continues, or -1."""
    places: list[np.ndarray]
    """For each sequence, where in 0 .. T-1 its tokens are, [n] int64."""


def pack_tree(token_ids: Sequence[np.ndarray], routes: Sequence[np.ndarray]) -> PackedTree:
    """Lay sequences out so that common beginnings come once.

    The layout is a function of the arguments alone, their order included.

    Args:
        token_ids: integers [n] of each sequence, n >= 1.
        routes: recorded experts [n, L, K] of each; K is 0 in a dense model.

    """
    keys = [_keys(ids, route) for ids, route in zip(token_ids, routes, strict=True)]
    places = [np.empty(len(key), dtype=np.int64) for key in keys]
    pieces: list[tuple[int, int, int]] = []
    parents: list[int] = []
    total = 0
    branches = [(members, 0, -1) for members in reversed(_partition(keys, range(len(keys)), 0))]
    while branches:
        members, depth, parent = branches.pop()
        end = _common_end(keys, members, depth)
        if end - depth < _SHARED_TOKENS_MIN and len(members) > 1:
            branches += [([member], depth, parent) for member in reversed(members)]
            continue
        for member in members:
            places[member][depth:end] = np.arange(total, total + end - depth)
        pieces.append((members[0], depth, end))
        parents.append(parent)
        total += end - depth
        longer = [member for member in members if len(keys[member]) > end]
        parts = _partition(keys, longer, end)
        branches += [(part, end, len(pieces) - 1) for part in reversed(parts)]
    return PackedTree(
        input_ids=np.concatenate([token_ids[i][a:b] for i, a, b in pieces]).astype(np.int64),
        routed_experts=np.concatenate([routes[i][a:b] for i, a, b in pieces]).astype(np.int64),
        lengths=[end - start for _, start, end in pieces],
        parents=parents,
        places=places,
    )


def _keys(token_ids: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Return [n, 1 + L*K]: what must agree for two tokens to be one."""
    columns = (
        token_ids.reshape(-1, 1),
        routes.reshape(len(token_ids), math.prod(routes.shape[1:])),
    )
    return np.concatenate(columns, axis=1).astype(np.int32)


def _partition(keys: Sequence[np.ndarray], members: Sequence[int], depth: int) -> list[list[int]]:
    """Group members by their token at `depth`, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for member in members:
        groups.setdefault(keys[member][depth].tobytes(), []).append(member)
    return list(groups.values())


def _common_end(keys: Sequence[np.ndarray], members: Sequence[int], depth: int) -> int:
    """Return up to where all members agree, given that they do up to `depth`."""
    first = keys[members[0]]
    end = len(first)
    for member in members[1:]:
        other = keys[member]
        end = min(end, len(other))
        differs = (first[depth:end] != other[depth:end]).any(1)
        if differs.any():
            end = depth + int(differs.argmax())
    return end
