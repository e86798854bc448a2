"""Checks of the processes of training ranks, and of what they compute."""

from penstock.infra.config.settings import RunConfig
from penstock.messages.errors import ConfigError

_WITH = 'with trainer.ranks.model = "transformers"'
_BF16_NATS = 0.01
"""Least tolerance of a probe that the trainer computes in bfloat16."""


def check_ranks(config: RunConfig) -> None:
    """Check that each training rank has exactly one process, which it shares with nobody.

    Raises:
        ConfigError: They have not, or another setting contradicts them.

    """
    num_ranks = config.trainer.ranks.num_ranks if config.trainer.engine == "ranks" else 0
    found: list[str] = []
    for process, specs in config.processes.items():
        ranks = [spec for spec in specs if spec.partition(":")[0] == "rank"]
        if ranks and len(specs) > 1:
            text = f"expected {ranks[0]!r} alone, got {specs}: a process group has one rank in each"
            raise ConfigError(f"processes.{process}: {text}")
        found += ranks
    if sorted(found) != sorted(f"rank:{rank}" for rank in range(num_ranks)):
        expected = f"a process rank-N for each of trainer.ranks.num_ranks = {num_ranks}"
        text = expected if num_ranks else 'no role rank without trainer.engine = "ranks"'
        raise ConfigError(f"processes: expected {text}, got {found}")


def check_environment(config: RunConfig, role_rank: str, rank: int, num_ranks: int) -> None:
    """Check that a rank's process was started as the run's settings say.

    Args:
        config: Of the run.
        role_rank: What follows the colon of the role: a number, or nothing where several processes
            are started alike and RANK alone tells them apart.
        rank: RANK.
        num_ranks: WORLD_SIZE.

    Raises:
        ConfigError: It was not.

    """
    expected = config.trainer.ranks.num_ranks
    if config.trainer.engine != "ranks":
        engine = config.trainer.engine
        raise ConfigError(f'role rank: expected trainer.engine = "ranks", got {engine!r}')
    if num_ranks != expected:
        text = f"expected trainer.ranks.num_ranks = {expected}, got {num_ranks}"
        raise ConfigError(f"environment variable WORLD_SIZE: {text}")
    if role_rank and role_rank != str(rank):
        text = f"expected that of the role, {role_rank}, got {rank}"
        raise ConfigError(f"environment variable RANK: {text}")


def check_model(config: RunConfig) -> None:
    """Check that the engines of training and sampling can compute the model.

    Raises:
        ConfigError: One of them cannot; the text names the setting.

    """
    policy, ranks = config.policy, config.trainer.ranks
    uses_transformers = config.trainer.engine == "ranks" and ranks.model == "transformers"
    if policy.is_foreign:
        text = f"model.checkpoint is of the architecture {policy.architecture!r}"
        if not uses_transformers:
            expected = 'expected trainer.engine = "ranks" and trainer.ranks.model = "transformers"'
            raise ConfigError(f"trainer.engine: {expected}, since {text}")
        if config.generator.engine != "vllm":
            expected = "expected 'vllm'"
            raise ConfigError(
                f"generator.engine: {expected}, since {text}, got {config.generator.engine!r}"
            )
    if uses_transformers:
        _check_transformers(config)


def _check_transformers(config: RunConfig) -> None:
    """Check what a model of transformers is computed with."""
    if not config.model.checkpoint:
        raise ConfigError(f"model.checkpoint: expected a folder {_WITH}")
    numerics = config.policy.numerics
    computed = {"plausible": 0.0, "expert_format": "bf16"}
    for name, value in computed.items():
        if (got := getattr(numerics, name)) != value:
            text = f"expected {value!r} {_WITH}, got {got!r}"
            raise ConfigError(f"policy.numerics.{name}: {text}")
    if numerics.is_exact:
        text = f"expected 'fast' or 'off' {_WITH}, got 'exact'"
        raise ConfigError(f"policy.numerics.mode: {text}")
    tolerance = config.generator.probe_tolerance
    if config.trainer.ranks.dtype == "bfloat16" and tolerance < _BF16_NATS:
        text = f'expected at least {_BF16_NATS} with trainer.ranks.dtype = "bfloat16"'
        raise ConfigError(f"generator.probe_tolerance: {text}, got {tolerance:g}")
    divided, experts = config.trainer.ranks.num_expert_ranks, config.policy.num_experts
    if divided > 1 and (not experts or experts % divided):
        text = f"expected a divisor of the model's {experts} experts, got {divided}"
        raise ConfigError(f"trainer.ranks.num_expert_ranks: {text}")
