"""Choice of a backend by the device of a tensor."""

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend
from penstock.kernels.cuda.backend import CudaBackend
from penstock.kernels.cuda.launch import launch_cuda
from penstock.kernels.reference.backend import ReferenceBackend

_BACKENDS: dict[str, KernelBackend] = {
    "cpu": ReferenceBackend(),
    "cuda": CudaBackend(launch_cuda, "cuda"),
}


def backend_for(tensor: torch.Tensor, backend: KernelBackend | None) -> KernelBackend:
    """Return the given backend, or by default the one for the tensor's device.

    Raises:
        KernelArgumentError: There is no backend for the tensor's device, or the given backend is
            for another device.

    """
    device = tensor.device.type
    chosen = backend or _BACKENDS.get(device)
    if chosen is None or chosen.device != device:
        expected = " or ".join(_BACKENDS) if chosen is None else chosen.device
        raise KernelArgumentError(f"backend: expected {expected} tensors, got {tensor.device}")
    return chosen
