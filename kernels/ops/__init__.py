"""Public interface of the kernels: one function per operation, run on the device of its tensors.

CPU tensors use the reference implementations, which are simple and slow; a run only packs routes
with them. CUDA tensors use the kernels of `kernels/cuda`. `backend=` selects another backend.
Results are the same bits on every backend, as defined by `kernels/reference`, except for kernels on
tensor cores.

All functions are forward only, allocate their results and keep no arguments. Calls on CUDA are
asynchronous, and so are the checks of values in their tensors; see `raise_deferred_errors`.

To add a kernel, write a function in `kernels/reference`, a method of `KernelBackend` in each
backend, a function here that checks and allocates, and a line in the table of docs/kernels.md.
"""

from penstock.kernels.backend import Mxfp8, Routing
from penstock.kernels.ops.checks import raise_deferred_errors
from penstock.kernels.ops.delta import delta_apply, delta_changes
from penstock.kernels.ops.quantize import (
    mxfp8_dequantize,
    mxfp8_quantize_both,
    mxfp8_quantize_columns,
    mxfp8_quantize_rows,
)
from penstock.kernels.ops.routing import (
    moe_combine,
    router_topk,
    routes_pack,
    routes_unpack,
)
from penstock.kernels.ops.rows import matmul, mxfp8_grouped_matmul, rms_norm, token_logprobs

__all__ = [
    "Mxfp8",
    "Routing",
    "delta_apply",
    "delta_changes",
    "matmul",
    "moe_combine",
    "mxfp8_dequantize",
    "mxfp8_grouped_matmul",
    "mxfp8_quantize_both",
    "mxfp8_quantize_columns",
    "mxfp8_quantize_rows",
    "raise_deferred_errors",
    "rms_norm",
    "router_topk",
    "routes_pack",
    "routes_unpack",
    "token_logprobs",
]
