"""Bounds of the torch engine."""

import msgspec

from penstock.actors.policy.probe import PROBE_TOLERANCE


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and tolerance of the torch engine."""

    num_running_max: int = 64
    """Maximum requests computed together, one cache row each."""
    num_parked_max: int = 64
    """Additional cache rows that keep the prefixes of sessions between turns."""
    num_waiting_max: int = 1024
    """Maximum requests in the queue."""
    num_tokens_max: int = 1024
    """Longest context in tokens."""
    prefill_tokens_max: int = 512
    """Maximum prompt tokens computed in one step."""
    num_drafts_max: int = 8
    """Maximum tokens of a draft (`drafts.py`); 0 decodes one token a step."""
    chunk_tokens: int = 16
    """Sampled tokens per chunk, up to a draft more; the first chunk has only one, to keep its
    latency low."""
    num_threads: int = 1
    """Number of torch threads in the worker."""
    probe_tolerance: float = PROBE_TOLERANCE
    """Largest difference in nats between engine and publisher on the probe prompts."""
