"""The disk that a run takes: what must be free, and what is removed at its end."""

import shutil
from pathlib import Path

from penstock.infra.run.runs import RunDir
from penstock.messages.errors import PenstockError

DISK_FREE_MIB_MIN = 32
"""Below this a run stops in order, before a write fails halfway."""


class DiskFullError(PenstockError, OSError):
    """The run's file system has no room left; the text names the folder."""


def remove_needless(run_dir: RunDir, elsewhere: str) -> None:
    """Remove what a complete run no longer needs: saved machines and handed-over weights.

    Args:
        run_dir: the run's.
        elsewhere: `sandbox.checkpoints`, where hosts save if it is given.

    """
    machines = Path(elsewhere) / run_dir.run_id if elsewhere else run_dir.machines
    for folder in (machines, run_dir.handover):
        shutil.rmtree(folder, ignore_errors=True)


def check_space(folder: Path) -> None:
    """Check the free space of a run's file system.

    Raises:
        DiskFullError: Too little is left.

    """
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < DISK_FREE_MIB_MIN:
        text = f"{folder}: {free_mib} MiB free of the {DISK_FREE_MIB_MIN} MiB that a run keeps free"
        raise DiskFullError(f"{text}; free space, then: penstock run --resume {folder.name}")
