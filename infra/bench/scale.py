"""Whether the run's services scale: `penstock bench scale`.

Each measurement is a module beside this one, `scale_<what>.py`, and returns figures of its own.
"""

from typing import Any

from penstock.infra.bench.scale_replicas import measure_prefix_reuse


async def bench_scale() -> dict[str, Any]:
    """Measure everything; each figure says what it is a share of.

    Returns:
        `prefix_reuse_4_replicas`: prompt tokens that four replicas had cached, over those that one
        replica has in the same sessions.

    """
    return await measure_prefix_reuse()
