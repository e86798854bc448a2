"""The learner of one rank of a transformers model, with or without expert parallelism."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from penstock.actors.policy.adapter import PREFIX
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import fix_threads
from penstock.actors.policy.hf.weights import stored_shapes
from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.trainer.config import OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.learner import Learner, Pass, published
from penstock.actors.trainer.ranks.hf.checks import check_names
from penstock.actors.trainer.ranks.hf.policy import TransformersPolicy, load_policy
from penstock.actors.trainer.ranks.hf.tensors import TensorNames
from penstock.actors.trainer.ranks.learner import RankedLearner
from penstock.actors.trainer.ranks.plan import rounds
from penstock.actors.trainer.ranks.world import World

Result = TypeVar("Result")


class TransformersLearner(RankedLearner):
    """Like `RankedLearner`, of a model of transformers.

    Under expert parallelism a rank's experts compute the tokens of all ranks. So a rank without a
    pass of its own cannot be left out of the sums: it computes one again, whose loss counts 0.
    Tokens of several passes meet in one product of matrices, so that the bits depend on the number
    of ranks and on how the experts are divided. Otherwise they depend on neither.
    """

    policy: TransformersPolicy

    def __init__(
        self,
        policy: TransformersPolicy,
        config: OptimizerConfig,
        world: World,
        ranks: RanksConfig,
    ) -> None:
        """Take a policy that is cut over the ranks.

        Args:
            policy: as `load_policy` cuts it.
            config: of the optimizer.
            world: all ranks.
            ranks: how it is computed.

        """
        super().__init__(policy, config, world)
        self.tensors = TensorNames(policy.model)
        self._rounds_itself = ranks.dtype == "bfloat16"
        self._divides_experts = ranks.num_expert_ranks > 1
        self._ordered = [
            parameter
            for parameter in self.parameters.values()
            if isinstance(parameter, DTensor) and parameter.device_mesh.size(0) > 1
        ]
        """Parameters with a running sum of their own; to the gradients of others, experts that are
        whole on one rank, FSDP adds by itself."""

    @contextmanager
    def published_weights(self) -> Iterator[None]:
        """Compute with the published weights; FSDP2 gathers no others in bfloat16."""
        with nullcontext() if self._rounds_itself else super().published_weights():
            yield

    def published_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the tensors that are published, by name."""
        return self.tensors.shapes()

    def published_float32(self) -> list[str]:
        """Return the names of those that are published in float32."""
        return list(self.tensors.buffers())

    def held_runs(self) -> list[TensorRun]:
        """Return what this rank publishes; see `RankedLearner.held_runs`."""
        return self.tensors.held_runs(is_first=self._world.rank == 0)

    def accumulate(
        self, passes: Sequence[Pass[Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Add the gradients of passes; see `RankedLearner.accumulate`."""
        if not self._divides_experts:
            return super().accumulate(passes, num_workers=num_workers, num_threads=num_threads)
        fix_threads(num_threads)
        found: dict[int, Result] = {}
        rank = self._world.rank
        self._sums.num_active = self._world.num_ranks
        for turn in rounds(len(passes), self._world.num_ranks):
            for parameter in self._ordered:
                parameter.grad = None
            loss, figures = passes[turn.index(rank)]()
            (loss if turn.is_active(rank) else loss * 0.0).backward()
            if turn.is_active(rank):
                found[turn.index(rank)] = figures
        return self._in_order(found)


class AdapterLearner(TransformersLearner):
    """Like `TransformersLearner`, whose adapters alone train: every rank has them whole."""

    @contextmanager
    def published_weights(self) -> Iterator[None]:
        """Compute with the adapters as published; the base is always so."""
        with self.computing_with(published(self.parameters)):
            yield

    def accumulate(
        self, passes: Sequence[Pass[Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Add the gradients of passes in their order, alike on every rank."""
        fix_threads(num_threads)
        parameters = list(self.trained.values())
        totals = [parameter.grad for parameter in parameters]
        found: dict[int, Result] = {}
        rank = self._world.rank
        for turn in rounds(len(passes), self._world.num_ranks):
            self.optimizer.zero_grad(set_to_none=True)
            loss, figures = passes[turn.index(rank)]()
            (loss if turn.is_active(rank) else loss * 0.0).backward()
            if turn.is_active(rank):
                found[turn.index(rank)] = figures
            for gradients in self._gathered(parameters)[: turn.num_active]:
                totals = [
                    gradient if total is None else total.add_(gradient)
                    for total, gradient in zip(totals, gradients, strict=True)
                ]
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        return self._in_order(found)

    def squares(self) -> list[float]:
        """Return the sums of squares of all rows of the gradient, which every rank has."""
        return Learner.squares(self)

    def _gathered(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the gradients of each rank's pass, by rank."""
        own = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        num_ranks = self._world.num_ranks
        if num_ranks == 1:
            return [own]
        flat = torch.cat([gradient.flatten() for gradient in own])
        flats = [torch.empty_like(flat) for _ in range(num_ranks)]
        dist.all_gather(flats, flat, group=self._world.mesh.get_group())
        sizes = [gradient.numel() for gradient in own]
        return [
            [part.view_as(like) for part, like in zip(each.split(sizes), own, strict=True)]
            for each in flats
        ]


def load_learner(
    folder: Path, policy_config: PolicyConfig, config: TrainerConfig, world: World, seed: int = 0
) -> TransformersLearner:
    """Return a learner of a Hugging Face folder's weights, of which each rank loads its part.

    Args:
        folder: of the model.
        policy_config: what `read_hf_config` says of it, and how it is computed.
        config: of the trainer.
        world: all ranks.
        seed: of an adapter's first values.

    Raises:
        ModelFormatError: Ranks do not compute, or do not publish, a model of this architecture.

    """
    policy = load_policy(folder, policy_config, config.ranks, world, seed)
    kind = AdapterLearner if policy_config.adapter else TransformersLearner
    learner = kind(policy, config.optimizer, world, config.ranks)
    model_type = policy.model.config.model_type
    shapes = learner.published_shapes()
    base = {name: shapes[name] for name in shapes if not name.startswith(PREFIX)}
    check_names(base, stored_shapes(folder), model_type)
    return learner
