"""Drafts: tokens proposed from what has passed through the engine, for it to verify in one step.

Agents repeat themselves and each other: attempts at one task read the same files, calls have the
same form, an edit copies what was read. The index maps the last tokens of a context to what
followed them when they were last seen, in prompts and in sampled turns of any request.

    context ... a b c ──last 8 or 3 tokens──▶ where they were seen ──▶ d e f, the draft

A draft changes no result. The engine computes its tokens in one step at the positions that they
would have, draws each position with the uniform number that belongs to it, and keeps the draws up
to the first one that the draft did not foresee.
"""

from collections.abc import Set as AbstractSet

import numpy as np

_ORDERS = (8, 3)
"""Numbers of last tokens that are looked up, the longest first: it predicts best."""
_GENERATION_TOKENS = 1 << 16
"""Tokens in a generation of the index, of which there are two: about 20 MB each."""
_ITEM = np.dtype(np.int32).itemsize
_GAP = np.array([-1], dtype=np.int32).tobytes()
"""Follows each record, so that no draft runs from one into the next."""


class _Generation:
    """Records of up to `_GENERATION_TOKENS` tokens, and where each short run of them ended."""

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.ends: dict[bytes, int] = {}
        """Bytes of some consecutive tokens -> offset in `tokens` of the one that followed."""


class DraftIndex:
    """Bounded memory of token sequences. Used by one thread."""

    def __init__(self) -> None:
        """Start empty."""
        self._young, self._old = _Generation(), _Generation()

    def __len__(self) -> int:
        """Return how many tokens are remembered."""
        return (len(self._young.tokens) + len(self._old.tokens)) // _ITEM

    def record(self, token_ids: np.ndarray, start: int) -> None:
        """Remember the tokens int32 [N]; those before `start` are already known."""
        # Enough of the known ones for the first new one to be found by what precedes it.
        data = token_ids[max(0, start - _ORDERS[0]) :].tobytes()
        offset, ends = len(self._young.tokens), self._young.ends
        self._young.tokens += data + _GAP
        for order in _ORDERS:
            width = order * _ITEM
            for end in range(width, len(data), _ITEM):
                ends[data[end - width : end]] = offset + end
        # Half of the memory is dropped at once: neither order of use nor counts are kept.
        if len(self._young.tokens) > _GENERATION_TOKENS * _ITEM:
            self._young, self._old = _Generation(), self._young

    def propose(self, context: np.ndarray, count: int, stop_ids: AbstractSet[int]) -> list[int]:
        """Return up to `count` tokens that may follow int32 [N], none of them a stop token.

        The draft ends before any stop token, because nothing is drawn after one. The list is empty
        if the end of the context has not been seen.
        """
        tail = context[-_ORDERS[0] :].tobytes()
        for order in _ORDERS:
            key = tail[-order * _ITEM :]
            for generation in (self._young, self._old):
                start = generation.ends.get(key)
                if start is not None:
                    found = generation.tokens[start : start + count * _ITEM]
                    return _before_stop(np.frombuffer(found, dtype=np.int32).tolist(), stop_ids)
        return []


def _before_stop(token_ids: list[int], stop_ids: AbstractSet[int]) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if token_id < 0 or token_id in stop_ids:
            return token_ids[:index]
    return token_ids
