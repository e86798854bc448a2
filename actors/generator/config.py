"""Settings of a generator. Imports no torch."""

from typing import Annotated

import msgspec

from penstock.actors.policy.config import DEVICES, PolicyConfig
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NumThreads, PositiveFloat, PositiveInt, one_of

ENGINES = ("native", "vllm")


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM alone has to know."""

    dtype: Annotated[str, one_of(("float32", "bfloat16"))] = "float32"
    """What it computes in."""
    kv_cache_gib: PositiveFloat = 1.0
    """Memory of its keys and values."""
    cache_block: PositiveInt = 32
    """Tokens of a block of its prefix cache."""


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine of every replica, and its capacity."""

    engine: Annotated[str, one_of(ENGINES)] = "native"
    """The project's own, or vLLM, in an environment of its own (`make vllm-env`)."""
    environment: str = ""
    """Virtual environment of the generators' processes; empty: for `native` the run's own, for
    `vllm` the folder `.venv-vllm`."""
    num_running_max: PositiveInt = 48
    """Maximum requests decoded together."""
    num_waiting_max: PositiveInt = 256
    """Maximum requests in the queue; further ones are refused as busy."""
    num_tokens_max: PositiveInt = 1024
    """Longest context, prompt and sampled tokens together."""
    num_threads: NumThreads = 1
    """Threads of torch; trainer and generators share the machine's cores."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Where it computes; cuda is the first GPU that the process sees. vLLM computes where it was
    built for, and is refused at its start if that is elsewhere."""
    probe_tolerance: PositiveFloat = 1e-3
    """Largest difference between what a replica and the trainer compute for the probe's prompts, in
    nats, at which the replica serves a version."""
    vllm: VllmConfig = VllmConfig()
    lag_s_max: PositiveFloat = 60.0
    """A replica whose weights are older than `trainer.staleness_max` allows for so long no longer
    serves training, which goes on without it until it has caught up."""

    def check_policy(self, policy: PolicyConfig) -> None:
        """Check that the engine computes what this policy is.

        Raises:
            ConfigError: It does not; the text names the setting.

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
