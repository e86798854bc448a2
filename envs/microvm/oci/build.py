"""Stub."""

from pathlib import Path
import msgspec

STEP_S, MEMORY_MIB = 600.0, 4096


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to build a Dockerfile."""

    dockerfile: str = ""
    arguments: dict[str, str] = {}
    stage: str = ""
    egress: list[str] = []
    step_s: float = STEP_S
    memory_mib: int = MEMORY_MIB
    offline: bool = False
    credentials: Path | None = None
    cache: Path | None = None


async def build_dockerfile(folder, name, options, say):
    raise NotImplementedError
