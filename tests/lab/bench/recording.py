"""What recording routes costs a sampler: many more pairs than `penstock mismatch` takes."""

import argparse
from typing import Any

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.infra.mismatch.recording import measure_recording

_NUM_PAIRS = {1: 1500, 16: 400, 64: 150}
"""By batch size."""


def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure it for the quickstart's policy.

    Raises:
        NotFoundError: The compiled step cannot be built here.

    """
    return measure_recording(Policy(PolicyConfig(mtp_num_heads=0), seed=0), _NUM_PAIRS)
