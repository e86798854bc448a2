"""What every fuzzed parser must keep: typed errors alone, and memory in proportion to its input."""

import resource

from penstock.messages.errors import PenstockError

MEMORY_SLACK_BYTES, MEMORY_RATIO_MAX = 64 << 20, 8


class MemoryBombError(Exception):
    """An input took far more memory than it has bytes."""


def attempt(run, data: bytes) -> None:
    """Run a target on an input.

    A `PenstockError` is the answer to bad input; anything else is a finding, and so is a peak of
    the process's memory that rises by more than 64 MiB and 8 times the input.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        run(data)
    except PenstockError as error:
        str(error).encode()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY_SLACK_BYTES + MEMORY_RATIO_MAX * len(data):
        raise MemoryBombError(f"{grown >> 20} MiB for {len(data)} bytes")
