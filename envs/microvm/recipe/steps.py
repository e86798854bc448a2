"""Running build steps: a lock against a second builder, logs, progress, atomic products."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.envs.sandbox import BackendUnavailable

Say = Callable[[str], None]
"""Shows one line of progress."""

LOG_TAIL_BYTES = 1500


class BuildError(BackendUnavailable):
    """A build step failed; the text has the end of its output and where the rest is."""


@contextlib.contextmanager
def build_lock(folder: Path, say: Say) -> Iterator[None]:
    """Hold the cache's build lock; the kernel drops it when its holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds the VM files; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def need_programs(*programs: str) -> None:
    """Raise `BuildError` naming every program that is not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise BuildError(
            f"missing programs: {', '.join(missing)}; as root: "
            "sh infra/install-apt.sh infra/apt-packages.txt"
        )


class Steps:
    """Runs programs in a scratch folder, each with its output in a log there."""

    def __init__(self, scratch: Path, say: Say) -> None:
        self.scratch = scratch
        self.say = say

    def run(
        self, what: str, argv: Sequence[str], *, timeout_s: float, cwd: Path | None = None
    ) -> None:
        """Run one program at low priority.

        Raises:
            BuildError: It failed or took longer than `timeout_s`.

        """
        started = time.monotonic()
        self.say(f"{what} ...")
        log = self.scratch / "build.log"
        with log.open("ab") as out:
            code = self._wait(argv, out.fileno(), timeout_s, cwd)
        if code != 0:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace")
            raise BuildError(f"{what}: {argv[0]} ended with {code}; {log} ends with:\n{tail}")
        self.say(f"{what}: {time.monotonic() - started:.0f} s")

    def _wait(
        self, argv: Sequence[str], out: int, timeout_s: float, cwd: Path | None
    ) -> int | None:
        process = subprocess.Popen(
            ["nice", "-n", "10", *argv],
            cwd=cwd or self.scratch,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"},
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except BaseException as error:
            os.killpg(process.pid, 9)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def output_of(argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
    """Return what a program prints.

    Raises:
        BuildError: It failed.

    """
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise BuildError(f"{argv[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def install(source: Path, target: Path, mode: int) -> None:
    """Move a finished file to its name, durably and at once."""
    source.chmod(mode)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
