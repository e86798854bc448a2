"""The learner of one rank: some rows of every tensor, and the bits of a single process."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from penstock.actors.policy.checkpoint import as_numpy
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import fix_threads
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.trainer.config import OptimizerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.gradients import Pass
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.norms import row_squares
from penstock.actors.trainer.ranks.models import cut_like, gathered, own_policy, release
from penstock.actors.trainer.ranks.plan import rounds
from penstock.actors.trainer.ranks.shards import held_runs, published_shapes
from penstock.actors.trainer.ranks.sums import OrderedSums
from penstock.actors.trainer.ranks.world import World
from penstock.actors.trainer.versions import Weights
from penstock.kernels.digest import named_digest, root_of, tensor_digest

Result = TypeVar("Result")


class RankedLearner(Learner):
    """A `Learner` whose methods are collective: all ranks call the same ones in the same order.

    Tensors are `DTensor`s, of which a rank holds some rows. A rank computes one pass at a time:
    `num_workers` has no effect.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig, world: World) -> None:
        """Take a policy that is sharded over the ranks (`models.py`)."""
        super().__init__(policy, config)
        self._world = world
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
            return value.clone()
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
