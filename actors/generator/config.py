"""Settings of a generator.

Must not import torch: the launcher and every command read these settings when they start.
"""

from typing import Annotated

import msgspec

from penstock.actors.policy.config import DEVICES, PolicyConfig
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NumThreads, PositiveFloat, PositiveInt, one_of

ENGINES = ("native", "vllm")


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that only apply to vLLM."""

    dtype: Annotated[str, one_of(("float32", "bfloat16"))] = "float32"
    """Number format in which vLLM computes."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of vLLM's KV cache in GiB."""
    cache_block: PositiveInt = 32
    """Tokens per block of vLLM's prefix cache."""


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine of every replica, and its capacity."""

    engine: Annotated[str, one_of(ENGINES)] = "native"
    """Inference engine: the built-in one, or vLLM in a separate environment (`make vllm-env`)."""
    environment: str = ""
    """Virtual environment of the generator processes. If empty, `native` uses the environment of
    the run and `vllm` uses the folder `.venv-vllm`."""
    num_running_max: PositiveInt = 48
    """Maximum requests decoded together."""
    num_waiting_max: PositiveInt = 256
    """Maximum requests in the queue; further requests are refused as busy."""
    num_tokens_max: PositiveInt = 1024
    """Longest context in tokens, prompt and sampled tokens together."""
    num_threads: NumThreads = 1
    """Number of torch threads; trainer and generators share the machine's cores."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Device of the engine; cuda is the first GPU that the process sees. vLLM runs on the device it
    was built for and refuses to start if this setting differs."""
    probe_tolerance: PositiveFloat = 1e-3
    """Largest difference in nats between replica and trainer on the probe prompts; above it, the
    replica does not serve the version."""
    vllm: VllmConfig = VllmConfig()
    lag_s_max: PositiveFloat = 60.0
    """Seconds that a replica's weights may be older than `trainer.staleness_max` allows. After that
    it stops serving training, which continues without it until it has caught up."""

    def check_policy(self, policy: PolicyConfig) -> None:
        """Check that the engine can compute this policy.

        Raises:
            ConfigError: The engine cannot; the text names the setting.

        """
        if self.engine != "vllm":
            return
        numerics = policy.numerics
        number_format = numerics.expert_format
        checks = (
            ("policy.numerics.mode", "fast or off", numerics.mode, not numerics.is_exact),
            ("policy.numerics.expert_format", "bf16", number_format, number_format == "bf16"),
        )
        for name, expected, found, is_good in checks:
            if not is_good:
                text = f"expected {expected} with generator.engine vllm, got {found!r}"
                raise ConfigError(f"{name}: {text}")
