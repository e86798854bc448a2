"""The learner of one rank: some rows of every tensor, and the bits of a single process.

What a rank publishes: its rows of the policy's parameters, as runs of the format's tensors.

Every tensor of the format is a contiguous part of one parameter (`policy/checkpoint.py`), and a
rank holds a range of each parameter's rows. So what it holds of a tensor is one run.

The sum of gradients over ranks, in one order.

For each part of the model (a layer, or what is outside of layers) FSDP passes this rank's gradient
to a reduce-scatter, and expects this rank's rows of the sum. Here an all-to-all exchanges the rows,
and each rank adds those it receives to a running sum in rank order: that of the micro-batches.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy, hf_views
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import fix_threads
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.trainer.config import OptimizerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.learner import Learner, Pass, Weights, row_squares
from penstock.actors.trainer.ranks.models import cut_like, gathered, own_policy, release
from penstock.actors.trainer.ranks.plan import rounds
from penstock.actors.trainer.ranks.world import World
from penstock.kernels.digest import named_digest, root_of, tensor_digest


def published_shapes(config: PolicyConfig) -> dict[str, list[int]]:
    """Return the shapes of the tensors that are published of a policy, by name."""
    with torch.device("meta"):
        return {name: list(view.shape) for name, view in hf_views(Policy(config)).items()}


def held_runs(policy: Policy) -> list[TensorRun]:
    """Return copies of what this rank holds, rounded as published: over all ranks, everything once.

    Args:
        policy: Cut over the ranks by rows.

    """
    with torch.device("meta"):
        whole = Policy(policy.config)
    names = {p.untyped_storage()._cdata: name for name, p in whole.named_parameters()}
    parameters = dict(policy.named_parameters())
    runs: list[TensorRun] = []
    for name, view in hf_views(whole).items():
        parameter = parameters[names[view.untyped_storage()._cdata]]
        first, values = _held(parameter)
        offset = int(view.storage_offset())
        begin = max(offset, first)
        end = min(offset + view.numel(), first + values.numel())
        if begin < end:
            rounded = values[begin - first : end - first].to(PUBLISHED_DTYPE, copy=True)
            runs.append(TensorRun(name, begin - offset, as_numpy(rounded)))
    return runs


def _held(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the first element that this rank holds of a flattened parameter, and all of them."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.detach().reshape(-1)
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter[:1].numel() if parameter.dim() > 1 else 1
    return int(offset[0]) * row, parameter.to_local().detach().reshape(-1)


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


Result = TypeVar("Result")


class RankedLearner(Learner):
    """A `Learner` whose methods are collective: all ranks call the same ones in the same order.

    Tensors are `DTensor`s, of which a rank holds some rows. A rank computes one pass at a time:
    `num_workers` has no effect.
    """

    is_ranked = True

    def __init__(self, policy: Policy, config: OptimizerConfig, world: World) -> None:
        """Take a policy that is sharded over the ranks (`models.py`)."""
        super().__init__(policy, config)
        self._world, self.rank = world, world.rank
        self._sums = OrderedSums(policy)
        self._sharded = dict(policy.named_parameters())

    @classmethod
    def of_world(
        cls, policy_config: PolicyConfig, config: OptimizerConfig, seed: int, world: World
    ) -> "RankedLearner":
        """Return a learner of random weights, those of `Learner.initialized`."""
        return cls(own_policy(policy_config, world, seed), config, world)

    def forward(self) -> SequenceForward:
        """Return forward passes; exact mode packs the whole weights, on every rank."""
        if not self.policy.config.numerics.is_exact:
            return SequenceForward(self.policy)
        with gathered(self.policy):
            return SequenceForward(self.policy)

    def run_all(
        self, tasks: Sequence[Callable[[], Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Return what forward passes give, in their order; each ran on one rank."""
        fix_threads(num_threads)
        found: dict[int, Result] = {}
        with torch.no_grad():
            for turn in rounds(len(tasks), self._world.num_ranks):
                result = tasks[turn.index(self._world.rank)]()
                if turn.is_active(self._world.rank):
                    found[turn.index(self._world.rank)] = result
        release(self.policy)
        return self._in_order(found)

    def accumulate(
        self, passes: Sequence[Pass[Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Add the gradients of passes, one after the other; each runs on one rank.

        Returns:
            The figures of each pass, in order, on every rank.

        """
        fix_threads(num_threads)
        found: dict[int, Result] = {}
        for turn in rounds(len(passes), self._world.num_ranks):
            if self._world.num_ranks > 1:  # Alone, FSDP adds to the gradient by itself.
                self.optimizer.zero_grad(set_to_none=True)
            self._sums.num_active = turn.num_active
            loss, figures = passes[turn.index(self._world.rank)]()
            loss.backward()
            if turn.is_active(self._world.rank):
                found[turn.index(self._world.rank)] = figures
        return self._in_order(found)

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all ranks, by rank; they must be picklable."""
        return self._world.gather(value)

    def squares(self) -> list[float]:
        """Return the sums of squares of all rows of the gradient, of all ranks."""
        mine = [
            square
            for parameter in self.parameters.values()
            if parameter.grad is not None
            for square in row_squares(_own_rows(parameter.grad))
        ]
        return [square for each in self._world.gather(mine) for square in each]

    def digest(self, tensors: Weights) -> str:
        """Digest tensors by name, each as a whole; one at a time is whole in memory."""
        total = 0
        for index, (name, tensor) in enumerate(tensors.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if index % self._world.num_ranks == self._world.rank:
                total += named_digest(name, tensor_digest(as_numpy(whole.cpu())))
        return root_of(self._world.gather(total))

    def placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter's value or moment: a copy."""
        parameter = self._sharded[name]
        if isinstance(value, DTensor) or value.shape != parameter.shape:
            return value.to(parameter.device, copy=True)
        return cut_like(parameter, value)

    def published_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the tensors that are published, by name."""
        return published_shapes(self.policy.config)

    def published_float32(self) -> list[str]:
        """Return the names of those that are published in float32, all others being bfloat16."""
        return []

    def held_runs(self) -> list[TensorRun]:
        """Return copies of what this rank publishes: over all ranks, every element once."""
        return held_runs(self.policy)

    def clear(self) -> None:
        """Forget the gradients."""
        super().clear()
        self._sums.clear()

    def _in_order(self, found: dict[int, Result]) -> list[Result]:
        merged = {index: each for part in self._world.gather(found) for index, each in part.items()}
        return [merged[index] for index in sorted(merged)]


def _own_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank counts: each row of the whole once over all ranks."""
    if not isinstance(gradient, DTensor):
        return gradient
    local, mesh = gradient.to_local(), gradient.device_mesh
    is_copy = any(
        placement.is_replicate() and mesh.get_local_rank(dim) > 0
        for dim, placement in enumerate(gradient.placements)
    )
    return local[:0] if is_copy else local
