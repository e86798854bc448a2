"""Python interface of the compiled decoding step, sampling and MXFP8 rounding."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from penstock.kernels.decode.layout import (
    TILE,
    DecodeShape,
    DecodeWeights,
    ShapeStruct,
    StepCache,
    StepStruct,
)
from penstock.kernels.native import load_library
from penstock.kernels.reference.quantize import MX_BLOCK, mxfp8_dequantize, mxfp8_rows

log = logging.getLogger(__name__)

_BELOW_ONE = np.nextafter(np.float32(1.0), np.float32(0.0))


def decode_library() -> ctypes.CDLL | None:
    """Return the compiled library, or None without a compiler."""
    return load_library(Path(__file__).with_name("decode.c"))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Inputs and outputs of a step of N tokens that only trainers use."""

    states: np.ndarray
    """float32 [L, N, d]: output of each layer; written by the step."""
    flips: np.ndarray
    """int32 [L, 2]: counts, added to by the step, of replayed slots that the router would not have
    chosen, and of those that were replaced as implausible."""
    replay: np.ndarray | None = None
    """int16 [N, L, K]: experts to use, in slot order; a token whose first id is negative is routed
    freely."""
    plausible: float = 0.0
    """Threshold below which replayed experts are replaced by the router's own, as a fraction of
    the lowest score among the router's own choice."""


class DecodeKernel:
    """Compiled step for one model shape."""

    def __init__(self, library: ctypes.CDLL, shape: DecodeShape) -> None:
        self._shape = ShapeStruct(**shape.__dict__)
        self._vocab = shape.vocab
        self._scratch = np.empty(0, dtype=np.float32)
        self._run = library.penstock_step
        self._run.restype = None
        self._sample = library.penstock_sample
        self._sample.restype = None
        self._logprobs = library.penstock_logprobs
        self._logprobs.restype = None
        self._scratch_floats = library.penstock_scratch
        self._scratch_floats.restype = ctypes.c_int64

    @classmethod
    def load(cls, shape: DecodeShape) -> "DecodeKernel | None":
        """Return the kernel, or None without a compiler or for an unsupported shape."""
        if not _is_supported(shape):
            return None
        library = decode_library()
        return None if library is None else cls(library, shape)

    def step(
        self,
        weights: DecodeWeights,
        cache: StepCache,
        tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
        outputs: np.ndarray,
        *,
        trace: Trace | None = None,
    ) -> np.ndarray:
        """Run N tokens through the model, without holding the interpreter lock.

        Args:
            weights: Packed weights.
            cache: KV cache and routes, extended in place.
            tokens: Token ids, cache rows and positions, int32 [N] each; tokens of one row must
                be in order of position.
            outputs: Indices int32 [M] of the tokens whose logits to return.
            trace: Inputs and outputs for trainers.

        Returns:
            Logits float32 [M, V].

        """
        num_tokens, num_outputs = len(tokens[0]), len(outputs)
        floats = self._scratch_floats(ctypes.byref(self._shape), ctypes.c_int64(num_tokens))
        # Kept from step to step, so threads must not share a kernel.
        if len(self._scratch) < floats:
            self._scratch = np.empty(floats, dtype=np.float32)
        logits = np.empty((num_outputs, self._vocab), dtype=np.float32)
        extras = (None, None, None) if trace is None else (trace.replay, trace.states, trace.flips)
        step = StepStruct(
            *(num_tokens, num_outputs, *map(_address, (*tokens, outputs)), cache.kv_address),
            *(_address(logits), _address(self._scratch), cache.routes_address),
            *map(_address, extras),
            0.0 if trace is None else trace.plausible,
        )
        self._run(ctypes.byref(self._shape), ctypes.byref(weights.struct), ctypes.byref(step))
        return logits

    def sample(
        self, logits: np.ndarray, temperatures: list[float], uniforms: list[float]
    ) -> tuple[list[int], list[float]]:
        """Sample one token per row by inverting the cumulative distribution.

        Args:
            logits: Logits float32 [M, V], C-contiguous.
            temperatures: M temperatures; 0 takes the most likely token.
            uniforms: M random numbers in [0, 1).

        Returns:
            Tokens, and their log probabilities at the given temperature (at 1 if it is 0).

        """
        count, vocab = logits.shape
        inverse = np.array([1.0 / t if t > 0 else 0.0 for t in temperatures], dtype=np.float32)
        # A float64 just below 1 may round to 1 in float32, which would be past the last token.
        numbers = np.minimum(np.array(uniforms, dtype=np.float32), _BELOW_ONE)
        tokens, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
        sizes = (ctypes.c_int64(count), ctypes.c_int64(vocab))
        arrays = (inverse, numbers, tokens, logprobs)
        self._sample(_pointer(logits), *sizes, *map(_pointer, arrays))
        return tokens.tolist(), logprobs.tolist()

    def logprobs(
        self, logits: np.ndarray, temperatures: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Return the log probabilities that `sample` would give for tokens, bit for bit.

        Args:
            logits: Logits float32 [M, V], C-contiguous.
            temperatures: Temperatures float64 [M], > 0.
            tokens: Tokens int32 [M].

        """
        count, vocab = logits.shape
        found = np.empty(count, np.float32)
        sizes = (ctypes.c_int64(count), ctypes.c_int64(vocab))
        inverse = (1.0 / temperatures).astype(np.float32)
        arrays = (logits, *sizes, inverse, tokens, found)
        self._logprobs(*(_pointer(a) if isinstance(a, np.ndarray) else a for a in arrays))
        return found


@cache  # So that it is logged once per shape, however many threads load a kernel.
def _is_supported(shape: DecodeShape) -> bool:
    # Vectors of the C code have 16 floats, and it has no code for remainders.
    dimensions = (shape.hidden, shape.head_dim, shape.width, shape.positions)
    if any(dimension % TILE for dimension in dimensions):
        log.warning(
            "no compiled decoding step: hidden size, head size, expert size and positions are %s,"
            " not all multiples of %d",
            dimensions,
            TILE,
        )
        return False
    return True


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def round_mxfp8(values: np.ndarray) -> None:
    """Round float32 [..., K] to values that MXFP8 can represent, in place.

    Args:
        values: C-contiguous array, with blocks of 32 along K, which is a multiple of 32.

    """
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert values.shape[-1] % MX_BLOCK == 0
    library = decode_library()
    # Both give the same bits.
    if library is None:
        rows = values.reshape(-1, values.shape[-1])
        rows[...] = mxfp8_dequantize(*mxfp8_rows(rows))
    else:
        pointer = ctypes.c_void_p(values.ctypes.data)
        library.penstock_round_mxfp8(pointer, ctypes.c_int64(values.size))
