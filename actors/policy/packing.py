"""Packs sequences into a tree, so that common prefixes are computed once.

The rollouts of a group start from the same prompt and often continue in the same way: the same file
read, the same first call. As a tree of pieces:

    system prompt ─┬─ task A, first turn ─┬─ rollout 0
                   │                      └─ rollout 1
                   └─ task B ─── ...

A token's hidden state depends only on its ancestors, so losses and gradients equal those of
separate sequences, at the cost of the distinct tokens only. Shared tokens must also share their
recorded routes, so the tree also branches where routes differ. Must not import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SHARED_TOKENS_MIN = 16
"""Minimum length of a shared piece; a shorter one is not worth a separate attention call."""


@dataclass(frozen=True, kw_only=True)
class PackedTree:
    """Sequences packed into T distinct tokens, for `Policy.forward`."""

    input_ids: np.ndarray
    """Token ids of all pieces, int64 [T]."""
    routed_experts: np.ndarray
    """Recorded experts of each token, int64 [T, L, K]."""
    lengths: list[int]
    """Number of tokens of each piece."""
    parents: list[int]
    """Index of the piece that each piece continues, or -1."""
    places: list[np.ndarray]
    """Indices in 0 .. T-1 of the n tokens of each sequence, int64 [n]."""


def pack_tree(token_ids: Sequence[np.ndarray], routes: Sequence[np.ndarray]) -> PackedTree:
    """Pack sequences so that each common prefix appears once.

    The layout depends only on the arguments and their order.

    Args:
        token_ids: Token ids of each sequence, integers [n] with n >= 1.
        routes: Recorded experts of each sequence, [n, L, K]; K is 0 in a dense model.

    """
    keys = [_keys(ids, route) for ids, route in zip(token_ids, routes, strict=True)]
    places = [np.empty(len(key), dtype=np.int64) for key in keys]
    pieces: list[tuple[int, int, int]] = []
    parents: list[int] = []
    total = 0
    # A stack instead of recursion: a tree may be as deep as an episode has turns. Reversed, so that
    # pieces come in order of first appearance.
    branches = [(members, 0, -1) for members in reversed(_partition(keys, range(len(keys)), 0))]
    while branches:
        members, depth, parent = branches.pop()
        end = _common_end(keys, members, depth)
        # Computing a few shared tokens several times is cheaper than one more piece.
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
    """Return the values that must be equal for two tokens to be shared, [n, 1 + L*K]."""
    columns = (
        token_ids.reshape(-1, 1),
        routes.reshape(len(token_ids), math.prod(routes.shape[1:])),
    )
    return np.concatenate(columns, axis=1).astype(np.int32)


def _partition(keys: Sequence[np.ndarray], members: Sequence[int], depth: int) -> list[list[int]]:
    """Group sequences by their token at `depth`, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for member in members:
        groups.setdefault(keys[member][depth].tobytes(), []).append(member)
    return list(groups.values())


def _common_end(keys: Sequence[np.ndarray], members: Sequence[int], depth: int) -> int:
    """Return the end of the prefix that all members share, given that they agree up to `depth`."""
    first = keys[members[0]]
    end = len(first)
    for member in members[1:]:
        other = keys[member]
        end = min(end, len(other))
        differs = (first[depth:end] != other[depth:end]).any(1)
        if differs.any():
            end = depth + int(differs.argmax())
    return end
