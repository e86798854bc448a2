"""Reference norms, log probabilities and products, whose rows do not depend on the batch."""

import numpy as np

from penstock.kernels.reference.float32 import exp, lane_dot, lane_sum, log

LOGIT_CHUNK = 1024
"""Logits per chunk of a row; each chunk is summed relative to its own maximum."""


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scale rows of float32 [M, H] to root mean square 1, then multiply by weight [H]."""
    width = np.float32(x.shape[1])
    mean = lane_dot(x, x) / width
    inverse = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    return x * inverse[:, None] * weight


def token_logprobs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the log-softmax of float32 [N, V] at targets [N] -> [N].

    Chunk c of a row has the maximum m_c and the lane sum s_c of exp(x - m_c). The sum of the row is
    the lane sum over chunks of s_c * exp(m_c - m), with m the largest m_c. A chunk that is all
    -inf, as masked logits are, adds nothing.
    """
    num_chunks = -(-logits.shape[1] // LOGIT_CHUNK)
    tops, sums = [], []
    with np.errstate(invalid="ignore"):
        for c in range(num_chunks):
            chunk = logits[:, c * LOGIT_CHUNK : (c + 1) * LOGIT_CHUNK]
            tops.append(np.fmax.reduce(chunk, axis=1))
            # -inf minus -inf would be NaN.
            shift = np.where(np.isneginf(tops[-1]), np.float32(0.0), tops[-1])
            sums.append(lane_sum(exp(chunk - shift[:, None])))
        top = np.fmax.reduce(tops)
        terms = [s * exp(t - top) for s, t in zip(sums, tops, strict=True)]
        total = lane_sum(np.stack(terms, axis=1))
        chosen = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (chosen - top) - log(total)


def matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply float32 [M, K] by the transpose of [N, K] -> [M, N]: one lane sum per output."""
    return np.stack([lane_dot(row, weight) for row in x]) if len(x) else x @ weight.T


def grouped_matmul(x: np.ndarray, weights: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Multiply rows offsets[e] to offsets[e+1] of [R, K] by expert e of [E, N, K] -> [R, N]."""
    parts = [
        matmul(x[start:end], weight)
        for start, end, weight in zip(offsets[:-1], offsets[1:], weights, strict=True)
    ]
    return np.concatenate(parts)
