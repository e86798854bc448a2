"""Collects the documents of one corpus."""

from collections.abc import Sequence

import numpy as np

from penstock.actors.trainer.midtraining.corpus import Corpus

MIDTRAIN_KEY = "midtrain/tokens"
MIDTRAIN_HELDOUT_KEY = "midtrain/heldout"


class CorpusBuilder:
    """Documents with a weight for each token, in the order of adding."""

    def __init__(self) -> None:
        self._documents: list[list[int]] = []
        self._weights: list[list[float]] = []

    def add(self, ids: list[int], weights: list[float]) -> None:
        """Add one document; `weights` says how much each token counts as a target."""
        self._documents.append(ids)
        self._weights.append(weights)

    def add_pieces(self, ids: list[int], weight: float, tokens_max: int) -> int:
        """Add a text in pieces of at most `tokens_max` tokens; return how many tokens it has."""
        for start in range(0, len(ids), tokens_max):
            piece = ids[start : start + tokens_max]
            self.add(piece, [weight] * len(piece))
        return len(ids)

    def build(self) -> Corpus:
        """Return all documents."""
        return Corpus(
            tokens=_flat(self._documents, np.int32),
            lengths=np.array([len(document) for document in self._documents], np.int32),
            weights=_flat(self._weights, np.float32),
        )


def _flat(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.array(row, dtype) for row in rows])
