"""A checkout on this host as a `Sandbox`: the folder at `/work`, everything else read-only.

The agent's programs run under bubblewrap with the guest agent of the microVMs as their first
process, so paths, environment, limits and wording are the ones of training. There is no network.
The isolation class is `process`: this is for a user's own code, not for hostile code.
"""

from pathlib import Path

from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.process import ProcessBackend
from penstock.envs.sandbox import WORK_DIR
from penstock.messages.errors import NotFoundError


class CheckoutBackend(ProcessBackend):
    """Starts sandboxes over one folder.

    Args:
        folder: Becomes the working directory, writable.
        cache: Folder with the guest agent.

    Raises:
        NotFoundError: It is no folder.
        BackendUnavailable: The guest agent or bubblewrap is missing.

    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        if not folder.is_dir():
            raise NotFoundError(f"{folder}: expected a folder")
        super().__init__(cache)
        at = self._command_prefix.index("--")
        self._command_prefix[at:at] = ["--bind", str(folder.resolve()), WORK_DIR]


async def open_checkout(folder: Path) -> GuestSandbox:
    """Start a sandbox over a folder; close it after use."""
    return await CheckoutBackend(folder).start(timeout_s=30.0)
