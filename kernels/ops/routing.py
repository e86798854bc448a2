"""Packing of the expert ids to which tokens were routed."""

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.checks import check_range, check_tensor, check_values
from penstock.kernels.reference.routing import bits_per_id

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def routes_pack(
    routes: torch.Tensor, num_experts: int, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Pack expert ids [T, L, K] into ceil(log2 E) bits each -> uint8 [T, ceil(L*K*bits/8)].

    Each token starts on a byte boundary, so that sequences can be cut and joined. 60 layers with 8
    of 384 experts take 540 bytes. `penstock.kernels.route_segments` adds a checksum and the policy
    version.

    Raises:
        KernelArgumentError: There are not three dimensions, the ids are not integers, or one is
            outside 0..E-1.

    """
    check_range("num_experts", num_experts, 1, 1 << 15)
    if routes.dim() != 3:
        raise KernelArgumentError(f"routes: expected [T, L, K], got {list(routes.shape)}")
    ids = check_tensor("expert ids", routes.flatten(1), (None, None), _INTEGERS)
    check_values("expert ids", ids, 0, num_experts - 1, backend)
    ids = ids.to(torch.int16)
    num_bytes = -(-ids.shape[1] * bits_per_id(num_experts) // 8)
    packed = torch.empty((ids.shape[0], num_bytes), dtype=torch.uint8, device=ids.device)
    if packed.numel():
        backend_for(ids, backend).routes_pack(ids, bits_per_id(num_experts), packed)
    return packed
