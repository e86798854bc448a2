"""A machine's state on disk, from which any number of copies can resume.

```
 <folder>/state             processors and devices
 <folder>/memory            what the guest's memory held, with holes where it is empty
 <folder>/checkpoint.json   what it is; written last, so that its presence means completeness
```
"""

from pathlib import Path

import msgspec

from penstock.envs.microvm.protocol import LineState
from penstock.envs.microvm.recipe.steps import install
from penstock.envs.sandbox import SandboxFileError
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

STATE = "state"
MEMORY = "memory"
MANIFEST = "checkpoint.json"


class MachineCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved machine needs to resume."""

    backend: str
    machine_digest: str
    """Digest of kernel, image, memory size and machine type: a copy needs the same."""
    line: LineState
    num_bytes: int
    pause_ms: float
    """How long the machine was paused."""
    token: str = ""
    """Unique; the backend keeps its memory at hand under this name."""


def save_manifest(folder: Path, checkpoint: MachineCheckpoint) -> None:
    """Write the manifest of a complete state file, durably and at once."""
    fresh = folder / f"{MANIFEST}.new"
    fresh.write_bytes(msgspec.json.encode(checkpoint))
    install(fresh, folder / MANIFEST, 0o600)


def load_checkpoint(folder: Path, *, backend: str, machine_digest: str) -> MachineCheckpoint:
    """Return a complete checkpoint that `backend` can resume from.

    Raises:
        SandboxFileError: It is absent, incomplete or damaged, or another machine's.

    """
    try:
        found = parse_json((folder / MANIFEST).read_bytes(), MachineCheckpoint, MANIFEST)
        num_bytes = (folder / STATE).stat().st_size
    except (OSError, CodecError) as error:
        raise SandboxFileError(f"checkpoint {folder}: {error}") from error
    if num_bytes != found.num_bytes:
        words = f"{num_bytes} bytes of state, expected {found.num_bytes}"
        raise SandboxFileError(f"checkpoint {folder}: {words}")
    if (found.backend, found.machine_digest) != (backend, machine_digest):
        words = f"of {found.backend} {found.machine_digest[:16]}, not {backend} "
        raise SandboxFileError(f"checkpoint {folder}: {words}{machine_digest[:16]}")
    return found
