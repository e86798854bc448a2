"""What a log file may hold."""

from penstock.infra.commands.log_file import log_types
from penstock.messages.streams import STREAMS


def test_no_stream_that_is_only_in_memory_is_exported():
    """Gateways share replies there for minutes."""
    assert not [kind for kind in log_types() if STREAMS[kind.stream].in_memory]
