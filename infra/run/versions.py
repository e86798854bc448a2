"""What a run was made with, as far as its bits can depend on it."""

import platform
from importlib.metadata import version
from pathlib import Path

from penstock.envs.harness import HARNESS_VERSION

_CPU_INFO = Path("/proc/cpuinfo")


def environment_versions() -> dict[str, str]:
    """Return what a replay must match to give the same bits, and the wording of the tools."""
    return {
        "penstock": version("penstock"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "harness": HARNESS_VERSION,
    }


def _processor() -> str:
    """Return the processor's name: its vector instructions decide the order of additions."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
