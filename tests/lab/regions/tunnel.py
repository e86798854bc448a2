"""A link as a process: `python -m tests.lab.regions.tunnel SPEC`, SPEC a `Tunnel` in JSON.

```
 hub's namespace: device NAME ── HUB peer REGION        region's namespace: wan0 ── REGION peer HUB
                       └────────── this process: reads, shapes, writes ──────────┘
```
It makes the first device, leaves for a namespace of its own, makes the second one there and says
`ready`. Both devices and the namespace are the process's: nothing outlives it.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from tests.lab.regions.settings import LinkSection
from tests.lab.regions.shaping import InFlight, Shaper

from penstock.messages.reading.parsing import parse_json

READY = "ready"
REGION_DEVICE = "wan0"
MTU_BYTES = 1500
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_NUM_READS_MAX = 64
"""Packets taken from one device before the other has its turn."""
_COMMAND_S_MAX = 10.0
_IDLE_S_MAX = 1.0


class Tunnel(msgspec.Struct, frozen=True, kw_only=True):
    """One region's tunnel."""

    device: Annotated[str, msgspec.Meta(max_length=15)]
    """Name of the device in the hub's namespace."""
    hub: str
    """IPv4 address of the hub, as the region sees it."""
    region: str
    """IPv4 address of the region."""
    link: LinkSection
    seed: int = 0


class Direction:
    """Packets from one device to the other."""

    def __init__(self, source: int, sink: int, shaper: Shaper) -> None:
        """Args: `source` and `sink` are the devices' file descriptors, not blocking."""
        self.source = source
        self._sink = sink
        self._shaper = shaper
        self._in_flight = InFlight()

    def take(self) -> None:
        """Let the packets that wait at the source enter the link."""
        for _ in range(_NUM_READS_MAX):
            try:
                packet = os.read(self.source, MTU_BYTES + 64)
            except BlockingIOError:
                return
            arrival_s = self._shaper.arrival_s(time.monotonic(), len(packet))
            if arrival_s is not None:
                self._in_flight.add(arrival_s, packet)

    def deliver(self) -> float:
        """Deliver the packets that have arrived; return the seconds to the next arrival."""
        now_s = time.monotonic()
        while (packet := self._in_flight.pop_arrived(now_s)) is not None:
            try:
                os.write(self._sink, packet)
            except OSError:  # The device is full or down: on a network, that is a loss.
                continue
        wait_s = self._in_flight.wait_s(now_s)
        return _IDLE_S_MAX if wait_s is None else min(wait_s, _IDLE_S_MAX)


def open_device(name: str, own: str, peer: str) -> int:
    """Make a TUN device in this process's namespace and bring it up; it ends with its descriptor.

    Raises:
        OSError: not allowed, or the name is taken.
        subprocess.SubprocessError: `ip` refused.

    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    _ip("address", "add", own, "peer", peer, "dev", name)
    _ip("link", "set", name, "mtu", str(MTU_BYTES), "up")
    return device


def main(argv: Sequence[str]) -> int:
    """Make the link and carry packets until killed."""
    tunnel = parse_json(argv[1], Tunnel, "argument")
    hub_end = open_device(tunnel.device, tunnel.hub, tunnel.region)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    _ip("link", "set", "lo", "up")
    region_end = open_device(REGION_DEVICE, tunnel.region, tunnel.hub)
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    carry(
        Direction(hub_end, region_end, Shaper(tunnel.link, tunnel.seed)),
        Direction(region_end, hub_end, Shaper(tunnel.link, tunnel.seed + 1)),
    )
    return 0


def carry(*directions: Direction) -> None:
    """Carry packets for ever."""
    sources = [direction.source for direction in directions]
    while True:
        wait_s = min(direction.deliver() for direction in directions)
        ready, _, _ = select.select(sources, [], [], wait_s)
        for direction in directions:
            if direction.source in ready:
                direction.take()


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(
            ["ip", *arguments], check=True, capture_output=True, text=True, timeout=_COMMAND_S_MAX
        )
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv))
