"""The compiled CPU kernels behind the interface of all backends.

C sources here do the operations of `kernels/reference` in the same order; `load` gives None where
there is no compiler, and the references do the work.
"""

import ctypes
from itertools import pairwise
from pathlib import Path

import torch

from penstock.kernels.native import load_library
from penstock.kernels.ops.quantize import Mxfp8
from penstock.kernels.ops.routing import Routing
from penstock.kernels.reference.backend import ReferenceBackend

Tensor = torch.Tensor
_SOURCES = ("quantize", "routing", "rows")
_FLAGS = ("-ffp-contract=off",)
_Argument = Tensor | int | float | None


class CpuBackend(ReferenceBackend):
    """Calls C; what has no C function here runs as in the reference."""

    def __init__(self, libraries: dict[str, ctypes.CDLL]) -> None:
        self._libraries = libraries

    @classmethod
    def load(cls) -> "CpuBackend | None":
        """Compile or load the sources; None if one cannot be."""
        paths = {name: Path(__file__).with_name(f"{name}.c") for name in _SOURCES}
        libraries = {name: load_library(path, _FLAGS) for name, path in paths.items()}
        found = {name: library for name, library in libraries.items() if library is not None}
        return cls(found) if len(found) == len(_SOURCES) else None

    def mxfp8_quantize(self, x: Tensor, rows: Mxfp8 | None, columns: Mxfp8 | None) -> None:
        """See `KernelBackend`."""
        if rows is not None:
            self._call("quantize.mxfp8_rows", x, _dtype(x), *x.shape, *rows)
        if columns is not None:
            self._call("quantize.mxfp8_columns", x, _dtype(x), *x.shape, *columns)

    def mxfp8_dequantize(self, quantized: Mxfp8, out: Tensor) -> None:
        """See `KernelBackend`."""
        by_rows = int(quantized.scales.shape[0] == out.shape[0])
        self._call("quantize.mxfp8_dequantize", *quantized, by_rows, _dtype(out), *out.shape, out)

    def router_topk(
        self,
        logits: Tensor,
        recorded: Tensor | None,
        routing: Routing,
        normalize: bool,
        plausibility_min: float,
    ) -> None:
        """See `KernelBackend`."""
        sizes = (*logits.shape, routing.ids.shape[1], int(normalize))
        arguments = (logits, recorded, *sizes, plausibility_min, *routing)
        self._call("routing.router_topk", *arguments)

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """See `KernelBackend`."""
        self._call("routing.routes_pack", ids, *ids.shape, width, packed.shape[1], packed)

    def routes_unpack(self, packed: Tensor, width: int, ids: Tensor) -> None:
        """See `KernelBackend`."""
        self._call("routing.routes_unpack", packed, *ids.shape, width, packed.shape[1], ids)

    def moe_combine(self, per_slot: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        arguments = (per_slot, weights, _dtype(out), *per_slot.shape, out)
        self._call("routing.moe_combine", *arguments)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `KernelBackend`."""
        self._call("rows.rms_norm", x, weight, _dtype(x), eps, *x.shape, out)

    def token_logprobs(self, logits: Tensor, targets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        self._call("rows.token_logprobs", logits, _dtype(logits), targets, *logits.shape, out)

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `KernelBackend`; bfloat16 is widened first, which is exact."""
        wide = out if out.dtype == torch.float32 else torch.empty(out.shape)
        sizes = (len(x), len(weight), x.shape[1])
        self._call("rows.matmul", x.float(), weight.float(), *sizes, wide)
        if wide is not out:
            out.copy_(wide)

    def mxfp8_grouped_matmul(self, x: Tensor, weight: Mxfp8, offsets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        bounds = offsets.tolist()
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                codes = weight.codes[expert]
                dense = torch.empty(codes.shape)
                self.mxfp8_dequantize(Mxfp8(codes, weight.scales[expert]), dense)
                self.matmul(
                    x[start:end].float(), dense, wide := torch.empty(end - start, len(dense))
                )
                out[start:end] = wide

    def _call(self, name: str, *arguments: _Argument) -> None:
        """Call a C function; releases the interpreter lock."""
        source, function = name.split(".")
        run = getattr(self._libraries[source], f"penstock_{function}")
        run.restype = None
        run(*map(_value, arguments))


def _value(argument: _Argument) -> ctypes.c_void_p | ctypes.c_float | ctypes.c_long:
    """Convert: tensors and None to pointers, numbers to `float` and `long` (`int` takes it too)."""
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument)


def _dtype(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)
