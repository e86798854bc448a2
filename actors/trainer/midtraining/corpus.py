"""Token arrays for mid-training: their encoding in the store, and segments of documents.

The object is a safetensors file: `tokens` int32 [N]; optionally `lengths` int32 [D], the lengths of
documents (each starts at position 0 and attends only to itself), and `weights` float32 [N], the
weight of each token as a target.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from penstock.messages.errors import CorruptDataError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """N tokens of D documents."""

    tokens: np.ndarray
    """[N] int32."""
    lengths: np.ndarray | None = None
    """[D] int32, summing to N; None for one stream without boundaries."""
    weights: np.ndarray | None = None
    """[N] float32 >= 0; None if all are 1."""


class MidtrainCorpora(NamedTuple):
    """Training and held-out corpus."""

    train: Corpus
    heldout: Corpus


def encode_corpus(corpus: Corpus) -> bytes:
    """Encode a corpus for the object store.

    Raises:
        CorruptDataError: The arrays have inconsistent shapes.

    """
    _check(corpus)
    arrays: dict[str, np.ndarray] = {"tokens": corpus.tokens.astype(np.int32)}
    if corpus.lengths is not None:
        arrays["lengths"] = corpus.lengths.astype(np.int32)
    if corpus.weights is not None:
        arrays["weights"] = corpus.weights.astype(np.float32)
    return save(arrays)


def decode_corpus(data: bytes) -> Corpus:
    """Decode a corpus of the object store.

    Raises:
        CorruptDataError: The object is not a corpus.

    """
    try:
        arrays = load(data)
    except SafetensorError as error:
        raise CorruptDataError(f"corpus: not a safetensors file: {error}") from error
    if "tokens" not in arrays:
        raise CorruptDataError(f"corpus: expected an array `tokens`, got {sorted(arrays)}")
    corpus = Corpus(
        tokens=arrays["tokens"], lengths=arrays.get("lengths"), weights=arrays.get("weights")
    )
    _check(corpus)
    return corpus


def segments(corpus: Corpus, tokens_max: int) -> np.ndarray:
    """Cut every document into pieces of at most `tokens_max` tokens.

    Returns:
        [S, 2] int64: start and length. Pieces of one token, which predict nothing, are left out.

    Raises:
        CorruptDataError: No piece is left.

    """
    lengths = corpus.lengths if corpus.lengths is not None else np.array([corpus.tokens.size])
    pieces, start = [], 0
    for length in lengths.tolist():
        for offset in range(0, length, tokens_max):
            size = min(tokens_max, length - offset)
            if size > 1:
                pieces.append((start + offset, size))
        start += length
    if not pieces:
        raise CorruptDataError("corpus.lengths: expected a document of at least 2 tokens")
    return np.array(pieces, dtype=np.int64)


def _check(corpus: Corpus) -> None:
    # Two tokens at least: the first one has no context to be predicted from.
    if corpus.tokens.ndim != 1 or corpus.tokens.dtype.kind not in "iu" or corpus.tokens.size < 2:
        raise CorruptDataError("corpus.tokens: expected a flat integer array of at least 2 tokens")
    if corpus.lengths is not None and int(corpus.lengths.sum()) != corpus.tokens.size:
        raise CorruptDataError(
            f"corpus.lengths: expected a sum of {corpus.tokens.size}, "
            f"got {int(corpus.lengths.sum())}"
        )
    if corpus.weights is not None and corpus.weights.shape != corpus.tokens.shape:
        raise CorruptDataError(
            f"corpus.weights: expected shape {corpus.tokens.shape}, got {corpus.weights.shape}"
        )
