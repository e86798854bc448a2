"""Format of a saved machine on disk, from which any number of copies can resume.

```
 <folder>/state             processors and devices
 <folder>/memory            content of the guest's memory, a sparse file
 <folder>/checkpoint.json   manifest; written last, so a checkpoint that has one is complete
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
    """Manifest of a checkpoint."""

    backend: str
    machine_digest: str
    """Digest of kernel, image, memory size and machine type, which a copy must share."""
    line: LineState
    num_bytes: int
    pause_ms: float
    """Milliseconds that the machine was paused while it was saved."""
    token: str = ""
    """Unique name under which the backend caches the memory of this checkpoint."""


def save_manifest(folder: Path, checkpoint: MachineCheckpoint) -> None:
    """Write the manifest of a complete checkpoint durably and atomically."""
    fresh = folder / f"{MANIFEST}.new"
    fresh.write_bytes(msgspec.json.encode(checkpoint))
    install(fresh, folder / MANIFEST, 0o600)


def load_checkpoint(folder: Path, *, backend: str, machine_digest: str) -> MachineCheckpoint:
    """Return the manifest of a complete checkpoint that `backend` can resume from.

    Raises:
        SandboxFileError: The checkpoint is absent, incomplete or damaged, or belongs to another
            kind of machine.

    """
    try:
        found = parse_json((folder / MANIFEST).read_bytes(), MachineCheckpoint, MANIFEST)
        num_bytes = (folder / STATE).stat().st_size
    except (OSError, CodecError) as error:
        raise SandboxFileError(f"checkpoint {folder}: {error}") from error
    if num_bytes != found.num_bytes:
        problem = f"found {num_bytes} bytes of state, expected {found.num_bytes}"
        raise SandboxFileError(f"checkpoint {folder}: {problem}")
    # Devices and memory layout must match exactly: a mismatch would crash the copy much later.
    if (found.backend, found.machine_digest) != (backend, machine_digest):
        problem = (
            f"saved by {found.backend} {found.machine_digest[:16]}, "
            f"expected {backend} {machine_digest[:16]}"
        )
        raise SandboxFileError(f"checkpoint {folder}: {problem}")
    return found
