"""Whether the run's services scale: `python -m tests.lab scale`.

Each measurement is a module beside this one, `scale_<what>.py`, and returns figures of its own.
"""

import argparse
from typing import Any

from tests.lab.bench.scale_payload import measure_payload
from tests.lab.bench.scale_replicas import measure_prefix_reuse


async def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; each figure says what it is a share of.

    Returns:
        `event_share`: bytes of events over bytes of turns and files; `stored_copies`: bytes of
        events and objects over the same; `prefix_reuse_4_replicas`: prompt tokens that four
        replicas had cached, over those that one replica has in the same sessions.

    """
    return await measure_payload() | await measure_prefix_reuse()
