"""Builds what machines boot beside a run that does not need it yet."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Generator

from penstock.envs.microvm.images.assets import is_being_built
from penstock.infra.run.orphans import die_with_parent
from penstock.messages.errors import DeadlineError

BEGIN_S_MAX = 60.0
END_S_MAX = 10.0
_POLL_S = 0.05


@contextlib.contextmanager
def images_beside() -> Generator[None]:
    """Run `penstock images base` meanwhile; entered once it holds the build lock, or has ended.

    Its output goes where ours goes. A sandbox host waits as long as the lock is held; if the build
    fails, the host refuses to start and says what is missing.

    Raises:
        DeadlineError: It did not begin.

    """
    command = [sys.executable, "-m", "penstock.infra.cli", "images", "base"]
    with subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no other thread runs yet
    ) as build:
        try:
            begun_by = time.monotonic() + BEGIN_S_MAX
            while build.poll() is None and not is_being_built():
                if time.monotonic() > begun_by:
                    raise DeadlineError(f"penstock images base: not begun in {BEGIN_S_MAX:g} s")
                time.sleep(_POLL_S)
            yield
        finally:
            build.terminate()
            try:
                build.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                build.kill()
