"""Collects the documents of one corpus."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from penstock.actors.trainer.midtraining.corpus import Corpus, encode_corpus
from penstock.messages.errors import ConfigError, PenstockError

Document = tuple[list[int], list[float]]
"""Token ids, and the weight of each as a target."""
T = TypeVar("T")
MIDTRAIN_KEY = "midtrain/tokens"
MIDTRAIN_HELDOUT_KEY = "midtrain/heldout"
HELDOUT_EVERY = 20
"""One of so many documents, pairs or labels is held out."""


class PreparationStoppedError(PenstockError, RuntimeError):
    """The preparation was stopped, because nobody waits for its result."""


class CorpusBuilder:
    """Documents with a weight for each token, in the order of adding."""

    def __init__(self) -> None:
        self._documents: list[list[int]] = []
        self._weights: list[list[float]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is no document yet."""
        return not self._documents

    def add(self, ids: list[int], weights: list[float]) -> None:
        """Add one document with the weight of each token as a target."""
        self._documents.append(ids)
        self._weights.append(weights)

    def add_pieces(self, ids: list[int], weight: float, tokens_max: int) -> int:
        """Add a text in pieces of at most `tokens_max` tokens; return its number of tokens."""
        # Without overlap: each token is trained once per epoch.
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


def corpora_built(train: CorpusBuilder, heldout: CorpusBuilder, expected: str) -> dict[str, bytes]:
    """Return the training and the held-out corpus by key.

    Raises:
        ConfigError: One of them is empty; the text is `expected`, which names the setting.

    """
    if train.is_empty or heldout.is_empty:
        raise ConfigError(expected)
    return {
        MIDTRAIN_KEY: encode_corpus(train.build()),
        MIDTRAIN_HELDOUT_KEY: encode_corpus(heldout.build()),
    }


def until(stopped: threading.Event, items: Iterable[T]) -> Iterator[T]:
    """Yield the items until the event is set.

    Raises:
        PreparationStoppedError: The event was set.

    """
    for item in items:
        if stopped.is_set():
            raise PreparationStoppedError("the preparation was stopped")
        yield item


def _flat(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.array(row, dtype) for row in rows])
