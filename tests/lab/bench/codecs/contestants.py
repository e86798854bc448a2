"""The codecs that are measured: Penstock's ladder, its rungs, and what others use."""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard
from tests.lab.bench.codecs.pairs import ArrayPair, Pair

from penstock.kernels import delta
from penstock.kernels.delta import Codec, Dtype

PEER_FORMATS = ("arc_v2", "arc_v3")
PEER_HINT = "pip install -e '.[lab]' (the package fireworks-delta-compression)"
_PEER_MODULE = "fireworks_delta_compression"
_TORCH_DTYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.FP8_E4M3: torch.float8_e4m3fn,
}


class Coded(msgspec.Struct, frozen=True):
    """One encoded pair of arrays."""

    num_bytes: int
    body: Any


class Contestant(msgspec.Struct, frozen=True):
    """One codec: both directions, and how it cuts the weights."""

    encode: Callable[[ArrayPair], Coded]
    decode: Callable[[ArrayPair, Any, np.ndarray], np.ndarray]
    """Takes the base, a body, and memory for the target, used before; returns the target,
    there where the codec can write it there, checked as its users do."""
    takes_tensors: bool = False

    def pieces(self, pair: Pair) -> list[ArrayPair]:
        """Return the pair as this codec takes it."""
        return pair.tensors if self.takes_tensors else pair.extents


def contestants(pair: Pair) -> dict[str, Contestant]:
    """Return the codecs that can take the pair, by name; peers where they are installed."""
    found = {"ladder": Contestant(_encode, _apply)}
    has_steps = all(arrays.kind.traits.has_steps for arrays in pair.extents)
    for codec in Codec:
        if codec is not Codec.EQUAL and (has_steps or not codec.has_steps):
            name = "xor_planes" if codec is Codec.XOR_ZSTD else codec.name.lower()
            found[name] = Contestant(partial(_encode_with, codec), _apply)
    xor = _Xor()
    found["xor_zstd"] = Contestant(xor.encode, xor.decode)
    if peer_is_there():
        for name in PEER_FORMATS:
            encode, decode = partial(_peer_encode, name), partial(_peer_decode, name)
            found[name] = Contestant(encode, decode, takes_tensors=True)
    return found


def peer_is_there() -> bool:
    """Return whether the public peer's package can be imported."""
    try:
        importlib.import_module(_PEER_MODULE)
    except ImportError:
        return False
    return True


def _encode(arrays: ArrayPair) -> Coded:
    payload = delta.encode(arrays.base, arrays.target, arrays.kind)
    return Coded(len(payload), payload)


def _encode_with(codec: Codec, arrays: ArrayPair) -> Coded:
    payload = delta.encode_with(codec, arrays.base, arrays.target, arrays.kind)
    return Coded(len(payload), payload)


def _apply(arrays: ArrayPair, payload: bytes, out: np.ndarray) -> np.ndarray:
    return delta.apply(arrays.base, payload, out)


class _Xor:
    """XOR + zstd, whose contexts and difference stay in memory, as those of the others do."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self._difference = np.zeros(0, np.uint8)

    def encode(self, arrays: ArrayPair) -> Coded:
        if self._difference.nbytes < arrays.base.nbytes:
            self._difference = np.zeros(arrays.base.nbytes, np.uint8)
        difference = self._difference[: arrays.base.nbytes].view(arrays.base.dtype)
        np.bitwise_xor(arrays.base, arrays.target, out=difference)
        payload = self._compressor.compress(difference.data)
        return Coded(len(payload), payload)

    def decode(self, arrays: ArrayPair, payload: bytes, out: np.ndarray) -> np.ndarray:
        with self._decompressor.stream_reader(payload) as reader:
            reader.readinto(out.data.cast("B"))  # pyright: ignore[reportUnknownMemberType]
        return np.bitwise_xor(arrays.base, out, out=out)


def _peer_encode(name: str, arrays: ArrayPair) -> Coded:
    peer: Any = importlib.import_module(_PEER_MODULE)
    diff, checksum = peer.delta_compress(
        src=_tensor(arrays, arrays.base),
        dst=_tensor(arrays, arrays.target),
        compression_format=name,
    )
    return Coded(diff.numel(), (diff, checksum))


def _peer_decode(name: str, arrays: ArrayPair, body: tuple[Any, str], _: np.ndarray) -> np.ndarray:
    peer: Any = importlib.import_module(_PEER_MODULE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it views bytes that are not writable
        target = peer.delta_decompress(
            src=_tensor(arrays, arrays.base),
            compressed_diff=body[0],
            checksum=body[1],
            compression_format=name,
        )
    return target.view(torch.uint8).numpy().view(arrays.base.dtype)


def _tensor(arrays: ArrayPair, words: np.ndarray) -> torch.Tensor:
    raw = torch.from_numpy(words.view(np.uint8))  # pyright: ignore[reportUnknownMemberType]
    return raw.view(_TORCH_DTYPES.get(arrays.kind, torch.uint8))
