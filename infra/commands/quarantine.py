"""`penstock quarantine RUN [--release NAME]`: shows held bursts of feedback, or releases one."""

import argparse
import time

from penstock.infra.output import print_result
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import NotFoundError
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased


async def quarantine_command(arguments: argparse.Namespace) -> int:
    """Show held bursts, after releasing the named one.

    Raises:
        NotFoundError: No quarantine has that name.

    """
    run = await reached_run(arguments)
    async with open_log(run, "quarantine") as bus:
        if arguments.release is not None:
            await release(bus, arguments.release)
        held = await held_bursts(bus)
    rows = [
        {
            "quarantine": event.key(),
            "tenant": event.tenant,
            "user": event.user,
            "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.began_at)),
            "num_signals": event.num_signals,
            "usual": event.usual,
        }
        for event in held
    ]
    print_result(rows, as_json=arguments.json)
    return 0


async def release(bus: Bus, name: str) -> None:
    """Release a burst; releasing it again has no effect.

    Raises:
        NotFoundError: No quarantine has that name.

    """
    # With released ones, so that a repeated release is no error.
    held = await held_bursts(bus, also_released=True)
    if name not in {event.key() for event in held}:
        names = ", ".join(event.key() for event in held) or "none"
        raise NotFoundError(f"--release: expected one of the run's quarantines ({names})")
    await bus.publish([QuarantineReleased(quarantine=name)])


async def held_bursts(bus: Bus, *, also_released: bool = False) -> list[FeedbackQuarantined]:
    """Return the held bursts of a log, the oldest first."""
    held: dict[str, FeedbackQuarantined] = {}
    released: set[str] = set()
    types = (FeedbackQuarantined, QuarantineReleased)
    async for delivery in bus.follow(types, stop_at_end=True):
        match delivery.event:
            case FeedbackQuarantined() as event:
                held[event.key()] = event
            case QuarantineReleased() as event:
                released.add(event.quarantine)
            case _:
                pass
    return [event for name, event in held.items() if also_released or name not in released]
