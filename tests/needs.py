"""What a test asks of the machine that it runs on."""

import shutil

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable


def need_layers() -> None:
    """Skip the test where no user-mode machine starts, or no image layer can be built."""
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    if shutil.which("mkfs.erofs") is None:
        pytest.skip("mkfs.erofs is missing: apt-get install erofs-utils")
