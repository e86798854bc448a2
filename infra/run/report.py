"""`report.html`: the live page with the run's state inside, readable without a server."""

from penstock.actors.monitor.fold import Fold
from penstock.actors.monitor.state import MonitorState, encode_state
from penstock.actors.runtime.files import write_atomic
from penstock.gateway.page.live_page import render_page
from penstock.infra.run.runs import RunDir
from penstock.messages.bus import Bus


async def write_report(run: RunDir, bus: Bus) -> None:
    """Write the run's `report.html` from its log, atomically.

    Raises:
        OSError: e.g. no space; an older report is untouched.

    """
    state = await fold_log(bus)
    write_atomic(run.report, render_page(encode_state(state)).encode())


async def fold_log(bus: Bus) -> MonitorState:
    """Return the state at the end of a run's log, as of its last event."""
    fold = Fold()
    async for delivery in bus.follow(fold.types, stop_at_end=True):
        fold.apply(delivery.event, delivery.stored_at)
    return fold.state(fold.last_at)
