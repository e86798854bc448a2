"""How a run's trainer computes, as its log records it."""

from importlib.metadata import version

from penstock.infra.run.config import RunConfig
from penstock.messages.control import Arithmetic


def arithmetic_of(config: RunConfig) -> Arithmetic:
    """Return how the trainer of a run computes."""
    trainer = config.trainer
    return Arithmetic(
        engine=trainer.engine,
        num_ranks=trainer.ranks.num_ranks if trainer.engine == "ranks" else 1,
        device=trainer.device,
        torch=version("torch"),
        num_threads=trainer.num_threads,
    )
