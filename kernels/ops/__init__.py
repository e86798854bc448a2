"""The kernels, one function each; the tensors' device decides what runs.

CPU tensors go through the references, which are slow and plain: a run packs routes with them and
nothing else. CUDA tensors go through the kernels of `kernels/cuda`. `backend=` takes another one.
All results but those of tensor-core kernels are the same bits on every backend: `kernels/reference`
is the frozen arithmetic.

All functions are forward only and allocate their results; none keeps its arguments. A CUDA call
does not wait: the values in its tensors are checked behind it, see `raise_deferred_errors`.

To add a kernel: a function in `kernels/reference`, a method of `KernelBackend` in each backend, a
function here that checks and allocates, and a line in the table of docs/kernels.md.
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
