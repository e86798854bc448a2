"""The sum of gradients over ranks, in one order.

For each part of the model (a layer, or what is outside of layers) FSDP passes this rank's gradient
to a reduce-scatter, and expects this rank's rows of the sum. Here an all-to-all exchanges the rows,
and each rank adds those it receives to a running sum in rank order: that of the micro-batches.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class OrderedSums:
    """The running sums of all parts of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Replace the reduce-scatter of every part.

        Args:
            model: after `fully_shard`.

        """
        self.num_active = 0
        """Ranks whose gradients count, from rank 0."""
        self._parts: list[_RunningSum] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                part = _RunningSum(self)
                module.set_custom_reduce_scatter(part)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                self._parts.append(part)

    def clear(self) -> None:
        """Drop the running sums."""
        for part in self._parts:
            part.total = None


class _RunningSum(ReduceScatter):
    """Of one part."""

    def __init__(self, sums: OrderedSums) -> None:
        self._sums = sums
        self.total: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Put this rank's rows of the sum up to this round into `output_tensor`."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.view(group.size(), -1)[: self._sums.num_active]
        if self.total is None:
            output_tensor.copy_(first)
        else:
            torch.add(self.total, first, out=output_tensor)
        for rows in others:
            output_tensor.add_(rows)
        self.total = output_tensor
