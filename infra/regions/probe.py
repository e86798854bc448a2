"""Whether this machine lets us make namespaces with shaped links: found out by making one."""

import shutil

from penstock.infra.regions.links import LinkError, free_subnet, open_tunnel
from penstock.infra.regions.settings import LinkSection

_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux"}
_ANY = LinkSection(bandwidth_mbit_s=1000.0, rtt_ms=0.0)
_INDEX = 200
"""Of the probe's own region, beside those of a run."""
HOW_TO_GET = (
    "run as root, with /dev/net/tun (modprobe tun) and: apt-get install iproute2 util-linux"
)


async def probe_namespaces() -> str:
    """Make a link and drop it; return what prevents it, "" where nothing does."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"`{program}` is not installed (apt-get install {package})"
    try:
        async with open_tunnel(await free_subnet(), _INDEX, _ANY, hub_port=1):
            return ""
    except LinkError as error:
        return f"namespaces are refused: {error}"
