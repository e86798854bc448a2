"""Calls the compiled decoding step, its sampling, and its rounding of the experts' operands."""

import ctypes
from dataclasses import dataclass
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

_BELOW_ONE = np.nextafter(np.float32(1.0), np.float32(0.0))


def decode_library() -> ctypes.CDLL | None:
    """Compile or load the library; None without a compiler."""
    return load_library(Path(__file__).with_name("decode.c"))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Inputs and outputs of a step of N tokens that only a trainer has."""

    states: np.ndarray
    """[L, N, d] float32, written: what each layer gave."""
    flips: np.ndarray
    """[L, 2] int32, added to: replayed slots that the router would not have chosen, and those of
    them that were replaced as implausible."""
    replay: np.ndarray | None = None
    """[N, L, K] int16: experts to use, in slot order; a negative first id routes freely."""
    plausible: float = 0.0
    """Replayed experts give way to the router's best below this share of the weakest that it would
    choose."""


class DecodeKernel:
    """The compiled step for one shape."""

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
        """Compile or load the kernel; None without a compiler or for an odd shape."""
        dimensions = (shape.hidden, shape.head_dim, shape.width, shape.positions)
        if any(dimension % TILE for dimension in dimensions):
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
        """Run N tokens; releases the interpreter lock.

        Args:
            weights: the packed model.
            cache: keys, values and routes, extended in place.
            tokens: token ids, cache rows and positions, int32 [N] each; a row's tokens in order.
            outputs: int32 [M], which tokens' logits to return.
            trace: a trainer's options.

        Returns:
            Logits [M, V] float32.

        """
        num_tokens, num_outputs = len(tokens[0]), len(outputs)
        floats = self._scratch_floats(ctypes.byref(self._shape), ctypes.c_int64(num_tokens))
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
        """Draw one token per row by inverse CDF.

        Args:
            logits: [M, V] float32, C-contiguous.
            temperatures: M; 0 takes the best token.
            uniforms: M numbers in [0, 1).

        Returns:
            Tokens, and their log-probabilities under the tempered distribution (the untempered
            one where the temperature is 0).

        """
        count, vocab = logits.shape
        inverse = np.array([1.0 / t if t > 0 else 0.0 for t in temperatures], dtype=np.float32)
        numbers = np.minimum(np.array(uniforms, dtype=np.float32), _BELOW_ONE)
        tokens, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
        sizes = (ctypes.c_int64(count), ctypes.c_int64(vocab))
        arrays = (inverse, numbers, tokens, logprobs)
        self._sample(_pointer(logits), *sizes, *map(_pointer, arrays))
        return tokens.tolist(), logprobs.tolist()

    def logprobs(
        self, logits: np.ndarray, temperatures: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Return the log-probabilities that `sample` would give these tokens, bit for bit.

        Args:
            logits: [M, V] float32, C-contiguous.
            temperatures: float64 [M], > 0.
            tokens: int32 [M].

        """
        count, vocab = logits.shape
        found = np.empty(count, np.float32)
        sizes = (ctypes.c_int64(count), ctypes.c_int64(vocab))
        inverse = (1.0 / temperatures).astype(np.float32)
        arrays = (logits, *sizes, inverse, tokens, found)
        self._logprobs(*(_pointer(a) if isinstance(a, np.ndarray) else a for a in arrays))
        return found


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def round_mxfp8(values: np.ndarray) -> None:
    """Round float32 [..., K] to what MXFP8 can hold, in place.

    Args:
        values: C-contiguous; blocks of 32 lie along K, a multiple of 32.

    """
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert values.shape[-1] % MX_BLOCK == 0
    library = decode_library()
    if library is None:
        rows = values.reshape(-1, values.shape[-1])
        rows[...] = mxfp8_dequantize(*mxfp8_rows(rows))
    else:
        pointer = ctypes.c_void_p(values.ctypes.data)
        library.penstock_round_mxfp8(pointer, ctypes.c_int64(values.size))
