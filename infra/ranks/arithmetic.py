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
        methods=_methods(config) if is_ranked else [],
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
    if recorded.model.startswith("transformers") and not recorded.methods:
        return (
            "the run's attention was computed under one mask over each micro-batch, as "
            "Penstock 0.2 did: replay it with that version"
        )
    if not recorded.layout:
        return ""
    return (
        f"the run's experts were divided ({recorded.layout}), and its bits depend on that: "
        "trainer.ranks.num_expert_ranks = 1 gives a run that any number of processes can replay"
    )


def _methods(config: RunConfig) -> list[str]:
    """Return how ranks compute a model of transformers."""
    ranks = config.trainer.ranks
    if ranks.model == "own":
        return []
    on_gpu = config.trainer.device == "cuda"
    chosen = [ranks.dtype, "fused AdamW" if on_gpu else "AdamW"]
    chosen.append("attention varlen, flex" if on_gpu else "attention by pieces")
    chosen.append(f"logits up to {ranks.logits_bytes_max} bytes")
    return [*chosen, "compiled layers"] if ranks.compile else chosen


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
