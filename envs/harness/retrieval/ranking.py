"""Ranks texts for a query by words, by embeddings, and by both.

Sources: BM25 (Robertson and Zaragoza, 2009) from the library bm25s; reciprocal rank fusion (Cormack
et al., SIGIR 2009): score = sum over rankings of 1 / (k + rank), k = 60.
"""

import os
import re
from collections.abc import Sequence

# bm25s imports JAX if installed, which would reserve three quarters of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s
import numpy as np

FUSION_K = 60.0
_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])|[a-z]+|\d+|[^\W\d_]+")
_COMMON = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "if", "in", "is", "it", "its",
     "of", "on", "or", "that", "the", "this", "to", "was", "which", "with", "self", "return"}
)  # fmt: skip


def words(text: str) -> list[str]:
    """Return a text's words: identifiers split, lower case, without plural `s`."""
    found = (word.lower() for word in _WORD.findall(text))
    kept = [word for word in found if word not in _COMMON]
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in kept]


class WordIndex:
    """BM25 index of one or more texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._model = bm25s.BM25(k1=1.2, b=0.75)
        self._model.index([words(text) or ["_"] for text in texts], show_progress=False)

    def scores(self, query: str) -> np.ndarray:
        """Return float32 [N]; 0 for texts without a word of the query."""
        tokens = [word for word in words(query) if word in self._model.vocab_dict]
        if not tokens:
            return np.zeros(self._model.scores["num_docs"], np.float32)
        return self._model.get_scores(tokens)


def cosine_scores(query: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return float32 [N]: cosine of [D] with each row of [N, D], after subtracting their mean."""
    # Hidden states share a large common component, which would make all cosines similar.
    mean = texts.mean(axis=0) if len(texts) > 1 else np.zeros_like(query)
    rows, one = texts - mean, query - mean
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(one)
    return (rows @ one / np.maximum(norms, 1e-9)).astype(np.float32)


def fused_scores(rankings: Sequence[np.ndarray]) -> np.ndarray:
    """Return float32 [N]: reciprocal rank fusion of several score arrays [N]."""
    total = np.zeros(len(rankings[0]), np.float32)
    for scores in rankings:
        ranks = np.empty(len(scores), np.int64)
        ranks[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
        # A text without any score must not profit from its arbitrary rank.
        total += np.where(scores > 0, 1.0 / (FUSION_K + 1 + ranks), 0.0).astype(np.float32)
    return total
