"""Bounds of the torch engine."""

import msgspec

from penstock.actors.policy.probe import PROBE_TOLERANCE


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the torch engine."""

    num_running_max: int = 64
    num_parked_max: int = 64
    """Further rows that keep the prefixes of sessions between turns."""
    num_waiting_max: int = 1024
    num_tokens_max: int = 1024
    """Longest context."""
    prefill_tokens_max: int = 512
    """Prompt tokens computed in one step."""
    chunk_tokens: int = 16
    """Sampled tokens a chunk carries, but the first, which has one."""
    num_threads: int = 1
    """Threads that torch uses in the worker."""
    device: str = "cpu"
    """One of `DEVICES`: of the weights, the cache and the step."""
    probe_tolerance: float = PROBE_TOLERANCE
    """Largest difference of a probe value from the trainer's, in nats."""
