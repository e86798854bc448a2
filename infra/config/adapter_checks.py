"""Checks of `[trainer.adapter]` against its base and the engines that compute both."""

from penstock.actors.policy.config import ADAPTER_TARGETS
from penstock.infra.config.settings import RunConfig
from penstock.messages.errors import ConfigError

_WITH = "with trainer.adapter"


def check_adapter(config: RunConfig) -> None:
    """Check that a run with adapters has a base, and engines that compute both.

    Raises:
        ConfigError: It has not; the text names the setting.

    """
    adapter, ranks = config.trainer.adapter, config.trainer.ranks
    if config.policy.adapter != adapter:
        raise ConfigError("policy.adapter: expected none, got one: set trainer.adapter instead")
    if adapter is None:
        return
    if not config.model.checkpoint:
        raise ConfigError(f"model.checkpoint: expected the folder of a base {_WITH}, got none")
    if config.generator.engine != "native":
        text = f"expected 'native' {_WITH}, got {config.generator.engine!r}"
        raise ConfigError(f"generator.engine: {text}")
    if config.trainer.engine == "ranks":
        if ranks.model != "transformers":
            text = f"expected 'transformers' {_WITH} on ranks, got {ranks.model!r}"
            raise ConfigError(f"trainer.ranks.model: {text}")
        if ranks.offload_optimizer:
            text = f"expected false {_WITH}, whose moments are small, got true"
            raise ConfigError(f"trainer.ranks.offload_optimizer: {text}")
    _check_targets(config, adapter.targets)


def _check_targets(config: RunConfig, targets: tuple[str, ...]) -> None:
    """Check that the built-in policy, which at least samples, has these matrices."""
    policy = config.policy
    known = ADAPTER_TARGETS if policy.is_dense else ADAPTER_TARGETS[:4]
    for name in targets:
        if name not in known:
            text = f"expected some of {', '.join(known)}, got {name!r}"
            why = "" if policy.is_dense else ": matrices of experts have no adapters"
            raise ConfigError(f"trainer.adapter.targets: {text}{why}")
    is_wide = set(targets) & set(ADAPTER_TARGETS[4:])
    if is_wide and policy.numerics.expert_format != "bf16":
        text = f"expected 'bf16' with trainer.adapter.targets {min(is_wide)!r}"
        raise ConfigError(
            f"policy.numerics.expert_format: {text}, got {policy.numerics.expert_format!r}"
        )
