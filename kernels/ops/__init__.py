"""Public interface of the kernels: one function per operation, run on the device of its tensors.

CPU tensors use the reference implementations, CUDA tensors the kernels of `kernels/cuda`;
`backend=` selects another backend. Results are the same bits on every backend, as defined by
`kernels/reference`.

Functions keep no arguments. Calls on CUDA are asynchronous, and so are the checks of values in
their tensors; see `raise_deferred_errors`.

To add a kernel, write a function in `kernels/reference`, a method of `KernelBackend` in each
backend, a function here that checks and allocates, and a line in the table of docs/kernels.md.
"""

from penstock.kernels.ops.checks import raise_deferred_errors
from penstock.kernels.ops.delta import delta_apply
from penstock.kernels.ops.routing import routes_pack

__all__ = ["delta_apply", "raise_deferred_errors", "routes_pack"]
