"""Memory layout of the data of `decode.c`: structures, shapes and packed weights."""

import ctypes
from dataclasses import dataclass

import numpy as np

PANEL = 32
"""Number of columns in a packed panel."""
TILE = 16
"""Number of positions in a tile of keys; every dimension must be a multiple of it."""

_SHAPE_FIELDS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "chosen", "width", "vocab"),
    *("rows", "positions", "normalize", "wide_routes", "mxfp8"),
)
_LAYER_FIELDS = (
    *("attention_norm", "qkv", "qkv_bias", "output", "query_norm", "key_norm"),
    *("expert_norm", "gate", "gate_up", "down"),
)
_WEIGHT_FIELDS = ("layers", "embedding", "head", "final_norm", "cos", "sin")
_STEP_FIELDS = (
    *("token_ids", "rows", "positions", "outputs"),
    *("kv", "logits", "scratch", "routes", "replay", "states", "flips"),
)


class ShapeStruct(ctypes.Structure):
    """C structure `shape_t` of `shapes.h`."""

    _fields_ = [*((name, ctypes.c_int32) for name in _SHAPE_FIELDS), ("eps", ctypes.c_float)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _LAYER_FIELDS]


class _Weights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _WEIGHT_FIELDS]


class StepStruct(ctypes.Structure):
    """C structure `step_t` of `shapes.h`."""

    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _STEP_FIELDS),
        ("plausible", ctypes.c_float),
    ]


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Dimensions of the model and the KV cache."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    width: int
    """Intermediate size of one expert."""
    vocab: int
    rows: int
    """Number of rows of the cache."""
    positions: int
    """Number of positions in a cache row."""
    normalize: bool
    """Whether the weights of the chosen experts are scaled to add up to one."""
    wide_routes: bool
    """Whether routes are int16, for more than 256 experts, instead of uint8."""
    mxfp8: bool
    """Whether inputs of the experts' matrix products are rounded to MXFP8; callers must round the
    experts' weights before packing."""
    eps: float


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer, float32 and C-contiguous, with matrices packed by `pack`."""

    attention_norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray | None
    """Biases of queries, keys and values; None for none."""
    output: np.ndarray
    query_norm: np.ndarray | None
    """Weights of the norm of each query head; None where queries and keys are not normalized."""
    key_norm: np.ndarray | None
    expert_norm: np.ndarray
    gate: np.ndarray | None
    """Weights of the router; None in a dense model, which has a single expert for all tokens."""
    gate_up: np.ndarray
    """[E, ...]: gate rows, then up rows of each expert, packed as one matrix."""
    down: np.ndarray


class DecodeWeights:
    """Packed weights of a model, for `decode.c`."""

    def __init__(
        self,
        layers: list[LayerWeights],
        embedding: np.ndarray,
        head: np.ndarray,
        final_norm: np.ndarray,
        rotary: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Take layers, embedding [V, d], packed head, norm [d], and (cos, sin) [positions, D/2]."""
        # The C structure holds bare pointers, so this object must keep the arrays alive.
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


class StepCache:
    """KV cache and recorded routes, with their addresses looked up once instead of in each step."""

    def __init__(self, kv: np.ndarray, routes: np.ndarray | None) -> None:
        """Take the arrays of a cache, which steps extend in place.

        Args:
            kv: Keys and values float32 [L, rows, 2*Hkv, T, D], with keys in tiles.
            routes: Recorded routes [rows, T, L, K], uint8 or int16; None to record none.

        """
        self._arrays = (kv, routes)
        self.kv_address: int = kv.ctypes.data
        self.routes_address: int | None = None if routes is None else routes.ctypes.data


def round_up(num_tokens: int) -> int:
    """Round a number of positions up to whole tiles."""
    return -(-num_tokens // TILE) * TILE


def pack(matrix: np.ndarray) -> np.ndarray:
    """Pack a matrix [..., N, K] into zero-padded panels [..., ceil(N/32), K, 32]."""
    *lead, rows, columns = matrix.shape
    padded = np.zeros((*lead, -(-rows // PANEL) * PANEL, columns), dtype=np.float32)
    padded[..., :rows, :] = matrix
    panels = padded.reshape(*lead, -1, PANEL, columns)
    return np.ascontiguousarray(np.swapaxes(panels, -1, -2))


def _address(array: np.ndarray | None) -> int | None:
    if array is None:
        return None
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return array.ctypes.data
