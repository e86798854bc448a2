"""Settings of a generator.

Must not import torch: the launcher and every command read these settings when they start.
"""

from typing import Annotated

import msgspec

from penstock.actors.policy.config import DEVICES, PolicyConfig
from penstock.messages.errors import ConfigError
from penstock.messages.settings import (
    NonNegativeInt,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    one_of,
)

ENGINES = ("native", "vllm")
_ON_GPUS = {
    "tensor_parallel_size": 1,
    "quantization": "",
    "kv_cache_dtype": "auto",
    "batch_invariant": False,
}
"""Settings of vLLM that a CPU does not have, and the values that they must have there."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Bounds of an adapter's rank that vLLM can be started with."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that only apply to vLLM."""

    dtype: Annotated[str, one_of(("float32", "bfloat16"))] = "float32"
    """Number format in which vLLM computes."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of vLLM's KV cache in GiB on a CPU; on a GPU see `gpu_memory_utilization`."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM takes for weights, activations and cache. Where trainer and
    generator share a GPU, leave the trainer the rest."""
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs over which each layer is divided."""
    max_model_len: NonNegativeInt = 0
    """Longest context that vLLM has room for, in tokens; 0: `generator.num_tokens_max`."""
    quantization: Annotated[str, one_of(("", "fp8"))] = ""
    """Number format of the weights in products; empty: `dtype`. fp8 quantizes each version as it is
    loaded."""
    kv_cache_dtype: Annotated[str, one_of(("auto", "fp8", "fp8_e4m3", "fp8_e5m2"))] = "auto"
    """Number format of the KV cache; auto: `dtype`."""
    batch_invariant: bool = False
    """Compute a token with the same bits in any batch (vLLM's batch-invariant mode), on GPUs.
    `policy.numerics.mode` exact asks for it as well."""
    cache_block: PositiveInt = 32
    """Tokens per block of vLLM's prefix cache."""


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine of every replica, and its capacity."""

    engine: Annotated[str, one_of(ENGINES)] = "native"
    """Inference engine: the built-in one, or vLLM in a separate environment (`make vllm-env`)."""
    environment: str = ""
    """Virtual environment of the generator processes. If empty, `native` uses the environment of
    the run and `vllm` uses the folder `.venv-vllm`, on a GPU `.venv-gpu`."""
    num_running_max: PositiveInt = 48
    """Maximum requests decoded together."""
    num_waiting_max: PositiveInt = 256
    """Maximum requests in the queue; further requests are refused as busy."""
    num_tokens_max: PositiveInt = 1024
    """Longest context in tokens, prompt and sampled tokens together."""
    num_drafts_max: NonNegativeInt = 8
    """Maximum tokens of a draft; 0 decodes one token per step. A draft is what followed the same
    tokens earlier, in any prompt or turn. One step verifies it, so no token or logprob changes.
    Only the built-in engine with its compiled step drafts, and only in regions without users."""
    num_threads: NumThreads = 1
    """Number of torch threads; trainer and generators share the machine's cores."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Device of vLLM, which runs on the one it was built for and refuses to start if this setting
    differs; cuda is the first GPU that the process sees. The built-in engine is the CPU's."""
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
        numerics, vllm = policy.numerics, self.vllm
        number_format, is_gpu = numerics.expert_format, self.device != "cpu"
        checks = (
            ("policy.numerics.mode", "fast or off", numerics.mode, is_gpu or not numerics.is_exact),
            ("policy.numerics.expert_format", "bf16", number_format, number_format == "bf16"),
            *(
                (f"generator.vllm.{name}", repr(default), value, is_gpu or value == default)
                for name, default in _ON_GPUS.items()
                for value in (getattr(vllm, name),)
            ),
        )
        for name, expected, found, is_good in checks:
            if not is_good:
                text = f"expected {expected} with generator.engine vllm on {self.device}"
                raise ConfigError(f"{name}: {text}, got {found!r}")
        if 0 < vllm.max_model_len < self.num_tokens_max:
            text = f"expected 0, or at least generator.num_tokens_max {self.num_tokens_max}"
            raise ConfigError(f"generator.vllm.max_model_len: {text}, got {vllm.max_model_len}")
        if policy.num_attention_heads % vllm.tensor_parallel_size:
            text = f"expected a divisor of the model's {policy.num_attention_heads} heads"
            found = vllm.tensor_parallel_size
            raise ConfigError(f"generator.vllm.tensor_parallel_size: {text}, got {found}")
