"""The layout of `decode.c`'s data: structures, shapes and packed weights."""

import ctypes
from dataclasses import dataclass

import numpy as np

PANEL = 32
"""Columns of a packed panel."""
TILE = 16
"""Positions of a key tile; every dimension must be a multiple of it."""

_SHAPE_FIELDS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "chosen", "width", "vocab"),
    *("rows", "positions", "normalize", "wide_routes", "mxfp8"),
)
_LAYER_FIELDS = (
    *("attention_norm", "qkv", "output", "query_norm", "key_norm"),
    *("expert_norm", "gate", "gate_up", "down"),
)
_WEIGHT_FIELDS = ("layers", "embedding", "head", "final_norm", "cos", "sin")
_STEP_FIELDS = (
    *("token_ids", "rows", "positions", "outputs"),
    *("kv", "logits", "scratch", "routes", "replay", "states", "flips"),
)


class ShapeStruct(ctypes.Structure):
    """`shape_t`."""

    _fields_ = [*((name, ctypes.c_int32) for name in _SHAPE_FIELDS), ("eps", ctypes.c_float)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _LAYER_FIELDS]


class _Weights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _WEIGHT_FIELDS]


class StepStruct(ctypes.Structure):
    """`step_t`."""

    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _STEP_FIELDS),
        ("plausible", ctypes.c_float),
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
    """Intermediate size of one expert."""
    vocab: int
    rows: int
    """Rows of the cache."""
    positions: int
    """Positions of one cache row."""
    normalize: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    wide_routes: bool
    """Whether routes are int16 instead of uint8."""
    mxfp8: bool
    """Whether the inputs of the experts' matmuls are rounded to MXFP8; the weights' owner rounds
    them before packing."""
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
    gate: np.ndarray | None
    """The router's; None in a dense model, whose every token goes through the one expert."""
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


class StepCache:
    """What steps extend; where it lies is looked up once and not in every step."""

    def __init__(self, kv: np.ndarray, routes: np.ndarray | None) -> None:
        """Take the arrays of a cache; they are extended in place.

        Args:
            kv: [L, rows, 2*Hkv, T, D] float32; keys lie in tiles.
            routes: [rows, T, L, K] uint8 or int16; None records none.

        """
        self._arrays = (kv, routes)
        self.kv_address: int = kv.ctypes.data
        self.routes_address: int | None = None if routes is None else routes.ctypes.data


def round_up(num_tokens: int) -> int:
    """Round up to whole tiles of positions."""
    return -(-num_tokens // TILE) * TILE


def pack(matrix: np.ndarray) -> np.ndarray:
    """Cut [..., N, K] into zero-padded panels [..., ceil(N/32), K, 32]."""
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
