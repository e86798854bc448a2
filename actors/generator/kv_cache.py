"""The KV cache of the torch engine: one row per sequence, with its keys, values, routes and tokens.

Rows 0 .. num_decoding-1 are kept dense by swapping, so that a decoding step reads one contiguous
block. All other rows are prefilling, parked (a finished turn whose session may return, or whose
prompt another member of the group may share) or empty.
"""

import math
import mmap

import numpy as np
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.native import has_wide_routes
from penstock.kernels.decode.layout import round_up
from penstock.messages.rollout import VersionSpan


class CacheRow:
    """Metadata of one row; it moves with the row's contents when rows are swapped."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Current position of the row's contents in the cache."""
        self.length = 0
        """Number of tokens whose keys and values are valid."""
        self.session_id = ""
        self.is_fresh = True
        """Whether all of its contents were computed with the weights in use."""
        self.is_pinned = False
        """Whether a request is using the row."""
        self.last_used = 0
        self.versions: list[tuple[int, int]] = []
        """Weight versions that computed the row, as (first position, policy version), ascending."""

    def note_version(self, policy_version: int) -> None:
        """Note that positions from `length` on are computed by these weights."""
        # Later entries describe positions that are about to be overwritten.
        before = [(first, version) for first, version in self.versions if first < self.length]
        if not before or before[-1][1] != policy_version:
            before.append((self.length, policy_version))
        self.versions = before

    def version_spans(self, start: int) -> list[VersionSpan]:
        """Return the versions that computed positions start .. length-1."""
        ends = [first for first, _ in self.versions[1:]] + [self.length]
        counts = (
            (version, min(end, self.length) - max(first, start))
            for (first, version), end in zip(self.versions, ends, strict=True)
        )
        return [
            VersionSpan(policy_version=version, num_tokens=count)
            for version, count in counts
            if count > 0
        ]


class SlotCache:
    """Preallocated KV cache rows with longest-common-prefix reuse and LRU eviction."""

    def __init__(
        self,
        config: PolicyConfig,
        num_rows: int,
        num_tokens_max: int,
    ) -> None:
        layers, heads = config.num_hidden_layers, 2 * config.num_key_value_heads
        num_tokens_max = round_up(num_tokens_max)
        self.num_tokens_max = num_tokens_max
        kv_shape = (layers, num_rows, heads, num_tokens_max, config.head_dim)
        self.kv = torch.from_numpy(huge_zeros(kv_shape, np.float32))
        """Keys, then values: [L, rows, 2*Hkv, T, D]. Within a tile of positions the decoder chooses
        the layout."""
        route_dtype = torch.int16 if has_wide_routes(config) else torch.uint8
        shape = (num_rows, num_tokens_max, layers, config.num_experts_per_tok)
        self.routes = torch.zeros(shape, dtype=route_dtype)
        self.tokens = np.zeros((num_rows, num_tokens_max), dtype=np.int32)
        self.rows = [CacheRow(index) for index in range(num_rows)]
        """Metadata of each row, by the row's position."""
        self.policy_version = -1
        """Version of the weights that currently fill the rows."""
        self._clock = 0

    def holds(self, session_id: str) -> bool:
        """Return whether the cache has a row of this session, filled with the weights in use."""
        rows = (row for row in self.rows if session_id and row.session_id == session_id)
        return any(row.is_fresh for row in rows)

    def match(self, token_ids: np.ndarray, session_id: str) -> tuple[CacheRow | None, int]:
        """Find the row with the longest shared prefix, not counting the last token of the prompt.

        A session may continue on its own row even if that was filled by older weights; rows of
        other sessions are only used if they are fresh.

        Returns:
            The row and the number of shared tokens; (None, 0) if no row shares any.

        """
        lengths = np.array([self._usable_length(row, session_id) for row in self.rows])
        # The last token must be computed in any case, to get the logits of the next one.
        limit = min(int(lengths.max()), len(token_ids) - 1)
        if limit < 1:
            return None, 0
        same = self.tokens[:, :limit] == token_ids[:limit]
        first_difference = np.where(same.all(1), limit, same.argmin(1))
        shared = np.minimum(first_difference, lengths)
        best = int(shared.argmax())
        return (self.rows[best], int(shared[best])) if shared[best] else (None, 0)

    @staticmethod
    def _usable_length(row: CacheRow, session_id: str) -> int:
        own = bool(session_id) and row.session_id == session_id
        return row.length if row.is_fresh or (own and not row.is_pinned) else 0

    def acquire(self, token_ids: np.ndarray, session_id: str) -> CacheRow | None:
        """Pin a row for a request and fill it with the longest cached prefix.

        Returns:
            The row, whose `length` tokens need no prefill; None if every row is pinned.

        """
        donor, shared = self.match(token_ids, session_id)
        target = self._target(donor, session_id)
        if target is None:
            return None
        # Nothing of the row's old contents will be used.
        if donor is None:
            target.is_fresh = True
        elif donor is not target:
            self._copy_prefix(donor, target, shared)
        if donor is not None:
            target.versions = donor.versions
        target.length = shared
        target.note_version(self.policy_version)
        target.session_id = session_id
        target.is_pinned = True
        self.tokens[target.index, : len(token_ids)] = token_ids
        return target

    def _target(self, donor: CacheRow | None, session_id: str) -> CacheRow | None:
        """Choose a row for a request: the session's own, else an empty one, else the oldest."""
        parked = [row for row in self.rows if not row.is_pinned]
        if not parked:
            return None
        for row in parked:
            if session_id and row.session_id == session_id:
                return row
        # Not the donor if possible: other members of the group may still want its prefix.
        spare = [row for row in parked if row is not donor]
        return min(spare or parked, key=lambda row: (row.length > 0, row.last_used, row.index))

    def spare_row(self) -> CacheRow:
        """Empty and return a row that no request uses, for a temporary computation."""
        row = self._target(None, "")
        assert row is not None, "there are more rows than running requests"
        row.length, row.session_id, row.is_fresh = 0, "", True
        return row

    def release(self, row: CacheRow) -> None:
        """Unpin a row; its contents stay until another request needs the row."""
        self._clock += 1
        row.is_pinned = False
        row.last_used = self._clock

    def _copy_prefix(self, source: CacheRow, target: CacheRow, num_tokens: int) -> None:
        # Whole tiles, within which only the decoder knows the order of positions.
        a, b, n = source.index, target.index, round_up(num_tokens)
        self.kv[:, b, :, :n] = self.kv[:, a, :, :n]
        self.routes[b, :n] = self.routes[a, :n]
        target.is_fresh = source.is_fresh

    def swap(self, row: CacheRow, index: int) -> None:
        """Exchange the contents of a row with those at position `index`."""
        other = self.rows[index]
        if other is row:
            return
        # Positions beyond both lengths are not valid and need not be moved.
        a, b, n = row.index, index, round_up(max(row.length, other.length))
        for tensor in (self.kv[:, :, :, :n].transpose(0, 1), self.routes[:, :n]):
            held = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = held
        self.tokens[[a, b]] = self.tokens[[b, a]]
        self.rows[a], self.rows[b] = other, row
        row.index, other.index = b, a

    def mark_stale(self, policy_version: int) -> None:
        """Note new weights; rows filled by older ones only serve requests that continue them."""
        self.policy_version = policy_version
        for row in self.rows:
            # An empty row holds nothing that older weights computed.
            row.is_fresh = row.length == 0
            row.note_version(policy_version)

    def forget_all(self, policy_version: int) -> None:
        """Note new weights and drop everything that older weights computed."""
        self.policy_version = policy_version
        self.forget_parked()
        for row in self.rows:
            row.length, row.is_fresh = 0, True
            row.note_version(policy_version)

    def forget_parked(self) -> None:
        """Empty every row that no request uses."""
        for row in self.rows:
            if not row.is_pinned:
                row.length, row.session_id, row.is_fresh = 0, "", True


def huge_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an array of zeros, in huge pages if the system has them.

    Huge pages reduce stalls of random reads.
    """
    dtype = np.dtype(dtype)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the longest common prefix of two arrays of token ids."""
    limit = min(len(left), len(right))
    differs = left[:limit] != right[:limit]
    return int(differs.argmax()) if differs.any() else limit
