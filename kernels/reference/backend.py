"""Reference backend: PyTorch tensors in and out, NumPy inside."""

import torch

from penstock.kernels.reference import routing

Tensor = torch.Tensor


class ReferenceBackend:
    """Backend on CPUs."""

    device = "cpu"
    defers_checks = False

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """See `KernelBackend`."""
        packed.copy_(torch.from_numpy(routing.pack_routes(ids.numpy(), 1 << width)))

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """See `KernelBackend`."""
        bits.numpy()[positions.numpy()] = values.numpy()
