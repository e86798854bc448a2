"""Conformance of buses: what `Bus` promises, as checks that every bus must pass."""

from tests.contract.bus import (
    check_bus_outages,
    check_bus_requests,
    check_bus_streams,
    check_bus_work,
)

CHECKS = [
    *check_bus_streams.CHECKS,
    *check_bus_work.CHECKS,
    *check_bus_requests.CHECKS,
    *check_bus_outages.CHECKS,
]
