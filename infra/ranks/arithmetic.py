"""How a run's trainer computes, as its log records it."""

from importlib.metadata import PackageNotFoundError, version

from penstock.infra.config.settings import RunConfig
from penstock.messages.control import Arithmetic
from penstock.messages.errors import ConfigError


def arithmetic_of(config: RunConfig) -> Arithmetic:
    """Return how the trainer of a run computes.

    Raises:
        ConfigError: A package that its settings ask for is not installed.

    """
    trainer = config.trainer
    is_ranked = trainer.engine == "ranks"
    num_ranks, divided = trainer.ranks.num_ranks, trainer.ranks.num_expert_ranks
    has_layout = is_ranked and divided > 1
    return Arithmetic(
        engine=trainer.engine,
        num_ranks=num_ranks if is_ranked else 1,
        layout=f"{num_ranks} ranks, experts over {divided}" if has_layout else "",
        model=_model(config) if is_ranked else "own",
        device=trainer.device,
        torch=version("torch"),
        num_threads=trainer.num_threads,
        processor=_processor(),
    )


def _processor() -> str:
    from penstock.actors.trainer.machine import arithmetic  # Torch takes seconds to import.

    return arithmetic()


def replay_refusal(recorded: Arithmetic) -> str:
    """Return why no replay gives a run's bits again; empty where any number of ranks does."""
    if not recorded.layout:
        return ""
    return (
        f"the run's experts were divided ({recorded.layout}), and its bits depend on that: "
        "trainer.ranks.num_expert_ranks = 1 gives a run that any number of processes can replay"
    )


def _model(config: RunConfig) -> str:
    """Return whose layers the ranks compute, with the version of a package."""
    name = config.trainer.ranks.model
    if name == "own":
        return name
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError as error:
        text = f"got {name!r}, a package that is not installed here; `make ranks-env` installs it"
        raise ConfigError(f"trainer.ranks.model: {text}") from error
