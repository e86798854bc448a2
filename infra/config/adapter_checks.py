"""Checks of `[trainer.adapter]` against its base and the engines that compute both."""

from penstock.actors.generator.config import LORA_RANKS
from penstock.actors.policy.config import ADAPTER_TARGETS, PolicyConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.infra.config.settings import RunConfig
from penstock.messages.errors import ConfigError

_WITH = "with trainer.adapter"


def check_adapter(config: RunConfig) -> None:
    """Check that a run with adapters has a base, and engines that compute both.

    Raises:
        ConfigError: It does not; the error names the setting.

    """
    adapter, policy, generator = config.trainer.adapter, config.policy, config.generator
    if policy.adapter != adapter:
        raise ConfigError("policy.adapter: expected none, got one: set trainer.adapter instead")
    if adapter is None:
        return
    if not config.model.checkpoint:
        raise ConfigError(f"model.checkpoint: expected the folder of a base {_WITH}, got none")
    if generator.engine == "vllm" and adapter.rank > max(LORA_RANKS):
        text = f"expected at most {max(LORA_RANKS)} with generator.engine 'vllm'"
        raise ConfigError(f"trainer.adapter.rank: {text}, got {adapter.rank}")
    if generator.engine == "vllm" and generator.device == "cpu" and policy.num_experts:
        text = f"expected 'native' {_WITH} and experts on a CPU, got 'vllm'"
        raise ConfigError(f"generator.engine: {text}")
    if config.trainer.engine == "ranks":
        _check_ranks(config.trainer.ranks)
    if not policy.is_foreign:  # What others have transformers knows, and vLLM.
        _check_targets(policy, adapter.targets)


def _check_ranks(ranks: RanksConfig) -> None:
    if ranks.model != "transformers":
        text = f"expected 'transformers' {_WITH} on ranks, got {ranks.model!r}"
        raise ConfigError(f"trainer.ranks.model: {text}")
    if ranks.num_expert_ranks > 1:
        text = f"expected 1 {_WITH}, got {ranks.num_expert_ranks}"
        raise ConfigError(f"trainer.ranks.num_expert_ranks: {text}")
    if ranks.offload_optimizer:
        text = f"expected false {_WITH}, whose moments are small, got true"
        raise ConfigError(f"trainer.ranks.offload_optimizer: {text}")


def _check_targets(policy: PolicyConfig, targets: tuple[str, ...]) -> None:
    """Check that the built-in policy has these matrices."""
    known = ADAPTER_TARGETS if policy.is_dense else ADAPTER_TARGETS[:4]
    for name in targets:
        if name not in known:
            text = f"expected some of {', '.join(known)}, got {name!r}"
            why = "" if policy.is_dense else ": matrices of experts have no adapters"
            raise ConfigError(f"trainer.adapter.targets: {text}{why}")
    rounded = policy.numerics.expert_format
    if set(targets) & set(ADAPTER_TARGETS[4:]) and rounded != "bf16":
        text = "expected 'bf16' with adapters of feed-forward matrices"
        raise ConfigError(f"policy.numerics.expert_format: {text}, got {rounded!r}")
