"""`penstock channel RUN NAME [--version N]`: show where channels point, or move one."""

import argparse

from penstock.actors.relay.core.catalog import NOTHING, Catalog
from penstock.infra.output import print_line
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import NotFoundError, PublishConflictError
from penstock.messages.generation import NEWEST, ChannelMoved


async def channel_command(arguments: argparse.Namespace) -> int:
    """Show one channel, after moving it if a version is given."""
    found = await reached_run(arguments)
    async with open_log(found, "channel") as bus:
        if arguments.version is not None:
            await move_channel(bus, found.store(), arguments.channel, arguments.version)
        moved = await last_move(bus)
    version = moved.channels.get(arguments.channel) if moved else None
    print_line(f"{arguments.channel}: {NEWEST if version is None else f'version {version}'}")
    return 0


async def move_channel(bus: Bus, store: ObjectStore, channel: str, policy_version: int) -> None:
    """Point a channel to a version, which its replicas then load.

    Raises:
        NotFoundError: The run's store does not have the version.
        PublishConflictError: Another move came first.

    """
    catalog = await Catalog.of_origin(store)
    # From nothing: a replica that starts now has to be able to load it.
    if not catalog.plan(NOTHING, policy_version):
        versions = sorted({manifest.policy_version for manifest in catalog.manifests})
        held = f"{versions[0]}..{versions[-1]}" if versions else "none"
        text = f"expected a version that the run's store holds ({held}), got {policy_version}"
        raise NotFoundError(f"--version: {text}")
    # The number makes two simultaneous moves collide: the log keeps one event per number.
    last = await last_move(bus)
    event = ChannelMoved(
        number=last.number + 1 if last else 0,
        channel=channel,
        policy_version=policy_version,
        channels={**(last.channels if last else {}), channel: policy_version},
    )
    [receipt] = await bus.publish([event])
    if receipt.is_duplicate:
        raise PublishConflictError(f"channel {channel}: another one moved at the same time; retry")


async def last_move(bus: Bus) -> ChannelMoved | None:
    """Return the newest move of any channel, which has the versions of all channels."""
    delivery = await bus.last(ChannelMoved)
    if delivery is None:
        return None
    assert isinstance(delivery.event, ChannelMoved)
    return delivery.event
