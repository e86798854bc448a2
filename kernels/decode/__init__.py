"""The CPU's inference step: one call runs a batch of tokens through a Qwen3-MoE transformer.

`decode.c` says how it computes; this module packs weights for it and calls it. A token's results
are the same bits in any batch.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.kernels.native import load_library

PANEL = 32
"""Columns of a packed panel."""
TILE = 16
"""Positions of a key tile; every dimension must be a multiple of it."""

_BELOW_ONE = np.nextafter(np.float32(1.0), np.float32(0.0))
_SOURCE = Path(__file__).with_name("decode.c")
_SHAPE_FIELDS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "chosen", "width", "vocab"),
    *("rows", "positions", "normalize", "wide_routes"),
)
_LAYER_FIELDS = (
    *("attention_norm", "qkv", "output", "query_norm", "key_norm"),
    *("expert_norm", "gate", "gate_up", "down"),
)
_WEIGHT_FIELDS = ("layers", "embedding", "head", "final_norm", "cos", "sin")
_STEP_FIELDS = (
    *("token_ids", "rows", "positions", "outputs"),
    *("kv", "logits", "scratch", "routes"),
)


class _Shape(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int32) for name in _SHAPE_FIELDS), ("eps", ctypes.c_float)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _LAYER_FIELDS]


class _Weights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _WEIGHT_FIELDS]


class _Step(ctypes.Structure):
    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _STEP_FIELDS),
    ]


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """The model's and the cache's dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    width: int
    """Of one expert."""
    vocab: int
    rows: int
    """Of the cache."""
    positions: int
    """Of one cache row."""
    normalize: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    wide_routes: bool
    """Whether routes are int16 instead of uint8."""
    eps: float


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer, all float32 and C-contiguous; matrices packed by `pack`."""

    attention_norm: np.ndarray
    qkv: np.ndarray
    output: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    expert_norm: np.ndarray
    gate: np.ndarray
    gate_up: np.ndarray
    """[E, ...]: each expert's gate rows, then its up rows, packed as one matrix."""
    down: np.ndarray


class DecodeWeights:
    """A whole model, packed; keeps its arrays alive."""

    def __init__(
        self,
        layers: list[LayerWeights],
        embedding: np.ndarray,
        head: np.ndarray,
        final_norm: np.ndarray,
        rotary: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Take embedding [V, d], packed head, norm [d], and (cos, sin) [positions, D/2]."""
        self._arrays = (layers, embedding, head, final_norm, rotary)
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(*(_address(getattr(layer, name)) for name in _LAYER_FIELDS))
                for layer in layers
            )
        )
        self.struct = _Weights(
            ctypes.addressof(self._layers),
            *(_address(array) for array in (embedding, head, final_norm, *rotary)),
        )


class DecodeKernel:
    """The compiled step for one shape."""

    def __init__(self, library: ctypes.CDLL, shape: DecodeShape) -> None:
        self._shape = _Shape(**shape.__dict__)
        self._vocab = shape.vocab
        self._scratch = np.empty(0, dtype=np.float32)
        self._run = library.penstock_step
        self._run.restype = None
        self._sample = library.penstock_sample
        self._sample.restype = None
        self._scratch_floats = library.penstock_scratch
        self._scratch_floats.restype = ctypes.c_int64

    @classmethod
    def load(cls, shape: DecodeShape) -> "DecodeKernel | None":
        """Compile or load the kernel; None without a compiler or for an odd shape."""
        dimensions = (shape.hidden, shape.head_dim, shape.width, shape.positions)
        if any(dimension % TILE for dimension in dimensions):
            return None
        library = load_library(_SOURCE)
        return None if library is None else cls(library, shape)

    def step(
        self,
        weights: DecodeWeights,
        kv: np.ndarray,
        routes: np.ndarray,
        tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
        outputs: np.ndarray,
    ) -> np.ndarray:
        """Run N tokens; releases the interpreter lock.

        Args:
            weights: the packed model.
            kv: [L, rows, 2*Hkv, T, D] float32, extended in place; keys lie in tiles.
            routes: [rows, T, L, K] uint8 or int16, extended in place.
            tokens: token ids, cache rows and positions, int32 [N] each; a row's tokens in order.
            outputs: int32 [M], which tokens' logits are wanted.

        Returns:
            Logits [M, V] float32.

        """
        num_tokens, num_outputs = len(tokens[0]), len(outputs)
        floats = self._scratch_floats(ctypes.byref(self._shape), ctypes.c_int64(num_tokens))
        if len(self._scratch) < floats:
            self._scratch = np.empty(floats, dtype=np.float32)
        logits = np.empty((num_outputs, self._vocab), dtype=np.float32)
        arrays = (*tokens, outputs, kv, logits, self._scratch, routes)
        step = _Step(num_tokens, num_outputs, *(array.ctypes.data for array in arrays))
        self._run(ctypes.byref(self._shape), ctypes.byref(weights.struct), ctypes.byref(step))
        return logits

    def sample(
        self, logits: np.ndarray, temperatures: list[float], uniforms: list[float]
    ) -> tuple[list[int], list[float]]:
        """Draw one token a row by inverse CDF.

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


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def pack(matrix: np.ndarray) -> np.ndarray:
    """Cut [..., N, K] into zero-padded panels [..., ceil(N/32), K, 32]."""
    *lead, rows, columns = matrix.shape
    padded = np.zeros((*lead, -(-rows // PANEL) * PANEL, columns), dtype=np.float32)
    padded[..., :rows, :] = matrix
    panels = padded.reshape(*lead, -1, PANEL, columns)
    return np.ascontiguousarray(np.swapaxes(panels, -1, -2))


def _layer_struct(layer: LayerWeights) -> _Layer:
    return _Layer(*(_address(getattr(layer, name)) for name in _LAYER_FIELDS))


def _address(array: np.ndarray) -> int:
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return array.ctypes.data
