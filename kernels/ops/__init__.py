"""The kernels, one function each; the tensors' device decides what runs.

CPU tensors go through compiled C (the references where there is no compiler), CUDA tensors through
the kernels of `kernels/cuda`. `backend=` names another one: `reference` (slow, plain, on the CPU),
`cpu`, `simt` (the CUDA sources on the CPU, for tests) or `cuda`. All results but those of
tensor-core kernels are the same bits on every backend: `kernels/reference` is the frozen
arithmetic.

All functions are forward only and allocate their results; none keeps its arguments. A CUDA call
does not wait: what lies in its tensors is checked behind it, see `raise_deferred_errors`.

To add a kernel: a function in `kernels/reference`, a method of `KernelBackend` in each backend, a
function here that checks and allocates, and a line in the table of docs/kernels.md.
"""

from penstock.kernels.ops.delta import delta_apply, delta_changes
from penstock.kernels.ops.matmul import matmul, mxfp8_grouped_matmul
from penstock.kernels.ops.quantize import (
    Mxfp8,
    Nvfp4,
    mxfp8_dequantize,
    mxfp8_quantize_both,
    mxfp8_quantize_columns,
    mxfp8_quantize_rows,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from penstock.kernels.ops.routing import (
    Routing,
    moe_combine,
    router_topk,
    routes_pack,
    routes_unpack,
)
from penstock.kernels.ops.rows import rms_norm, token_logprobs
from penstock.kernels.ops.values import raise_deferred_errors

__all__ = [
    "Mxfp8",
    "Nvfp4",
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
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "raise_deferred_errors",
    "rms_norm",
    "router_topk",
    "routes_pack",
    "routes_unpack",
    "token_logprobs",
]
