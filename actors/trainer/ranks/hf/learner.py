"""The learner of one rank of a transformers model, with or without expert parallelism."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from torch.distributed.tensor import DTensor

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import fix_threads
from penstock.actors.policy.hf.weights import stored_shapes
from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.trainer.config import OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.learner import Pass
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
        return self.tensors.held_runs(has_buffers=self._world.rank == 0)

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


def load_learner(
    folder: Path, policy_config: PolicyConfig, config: TrainerConfig, world: World
) -> TransformersLearner:
    """Return a learner of a Hugging Face folder's weights, of which each rank loads its part.

    Args:
        folder: of the model.
        policy_config: what `read_hf_config` says of it, and how it is computed.
        config: of the trainer.
        world: all ranks.

    Raises:
        ModelFormatError: Ranks do not compute, or do not publish, a model of this architecture.

    """
    policy = load_policy(folder, policy_config, config.ranks, world)
    learner = TransformersLearner(policy, config.optimizer, world, config.ranks)
    model_type = policy.model.config.model_type
    check_names(learner.published_shapes(), stored_shapes(folder), model_type)
    return learner
