"""Options, environment variables and arguments with which vLLM is started."""

import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.generator.config import LORA_RANKS
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.probe import PROBE_TOLERANCE
from penstock.messages.task import TOP_LOGPROBS_MAX

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # The worker's extension is written for the first one.
}
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries to preload; without tcmalloc, allocation takes a large part of a step on the CPU."""
_FOLDERS = (Path(sys.prefix) / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))
_WORKER = ("penstock.actors.generator.vllm.worker", "PenstockWorker")
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Full name of vLLM's single-process executor. With the short name "uni", vLLM uses two processes
on the CPU, which are pinned to cores and spin while they wait for each other."""
LORA = ("policy", 1)
"""Name and number by which vLLM knows the policy's adapter, in every version."""
_BATCHED_TOKENS_MIN = 4096
_GIB = 1 << 30


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the engine; the names are those of `GeneratorConfig`."""

    num_running_max: int = 64
    num_waiting_max: int = 1024
    num_tokens_max: int = 1024
    chunk_tokens: int = 16
    """Sampled tokens per chunk; the first chunk has only one."""
    num_threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_gib: float = 1.0
    cache_block: int = 32
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    observes_routes: bool = False
    """Whether the model has routers, whose choice a recorded CUDA graph would hide."""
    probe_tolerance: float = PROBE_TOLERANCE


def set_environment(options: VllmOptions, environment: MutableMapping[str, str]) -> None:
    """Set the variables that vLLM reads when it is imported, and the libraries to preload."""
    # Defaults only: an operator may override each of them.
    for name, value in _ENVIRONMENT.items():
        environment.setdefault(name, value)
    if options.batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    environment["OMP_NUM_THREADS"] = str(options.num_threads)
    found = [folder / name for name in _PRELOADED for folder in _FOLDERS]
    preloaded = [environment.get("LD_PRELOAD", ""), *(str(f) for f in found if f.exists())]
    environment["LD_PRELOAD"] = ":".join(filter(None, preloaded))


def engine_arguments(
    options: VllmOptions, folder: Path, adapter: AdapterConfig | None = None
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` for a model folder without weights."""
    lora: dict[str, Any] = {}
    if adapter is not None:
        lora = {
            "enable_lora": True,
            "max_loras": 1,
            "lora_target_modules": list(adapter.targets),
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= adapter.rank),
        }
    is_cpu = options.device == "cpu"
    gpu_only: dict[str, Any] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "quantization": options.quantization or None,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    cpu_only: dict[str, Any] = {"kv_cache_memory_bytes": int(options.kv_cache_gib * _GIB)}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "enforce_eager": is_cpu or options.observes_routes,
        "max_model_len": options.max_model_len or options.num_tokens_max,
        "max_num_seqs": options.num_running_max,
        "max_num_batched_tokens": max(_BATCHED_TOKENS_MIN, options.num_tokens_max),
        "max_logprobs": TOP_LOGPROBS_MAX + 1,
        "stream_interval": options.chunk_tokens,
        "enable_prefix_caching": True,
        "block_size": options.cache_block,
        "async_scheduling": False,
        "disable_log_stats": True,
        "distributed_executor_backend": _EXECUTOR if options.tensor_parallel_size == 1 else "mp",
        "worker_extension_cls": ".".join(_WORKER),
        **lora,
        **(cpu_only if is_cpu else gpu_only),
    }
