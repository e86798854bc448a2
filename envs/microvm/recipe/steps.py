"""Building blocks of recipes: the build lock, logged commands, and atomic installation of files."""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.images.assets import (
    BUILD_LOCK,
    MANIFEST,
    AssetSet,
    S,
    digest_file,
    load_set,
)
from penstock.envs.sandbox import BackendUnavailable

Say = Callable[[str], None]
"""Function that shows one line of progress."""

LOG_TAIL_BYTES = 1500
"""Bytes of a failed program's log that its error shows."""
_UNREACHED = re.compile(
    "Temporary failure|Could not (resolve|connect)|Unable to connect|NewConnectionError"
    "|Connection (failed|refused|timed out)|Network is unreachable"
)
"""Messages of apt, curl and pip without a network."""
_NEEDS_NETWORK = (
    "it needs the network: connect this machine, or set http_proxy to a proxy, "
    "and run the command again"
)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class BuildError(BackendUnavailable):
    """A build step failed; the error has the end of its log and the path of the whole log."""


@contextlib.contextmanager
def build_lock(folder: Path, say: Say) -> Iterator[None]:
    """Hold the build lock of a cache folder during the block, waiting for it if necessary."""
    # flock: the kernel releases it when its holder dies, so a killed build blocks nobody.
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / BUILD_LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds the VM files; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_programs(*programs: str) -> None:
    """Raise `BuildError` with the names of all programs that are not installed, if any."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise BuildError(
            f"missing programs: {', '.join(missing)}; as root: "
            "sh infra/install-apt.sh infra/apt-packages.txt"
        )


def find_first(folder: Path, pattern: str) -> Path:
    """Return the first file below a folder that matches a pattern.

    Raises:
        BuildError: There is none, so the unpacked package has another layout than expected.

    """
    found = next(folder.glob(pattern), None)
    if found is None:
        raise BuildError(f"{folder.name}: expected a file {pattern}, found none")
    return found


class Steps:
    """Runs programs in a scratch folder and appends their output to a log there.

    Args:
        scratch: Scratch folder.
        say: Function that shows one line of progress.
        is_awaited: Whether somebody waits for the build; otherwise programs run at low priority.

    """

    def __init__(self, scratch: Path, say: Say, *, is_awaited: bool = False) -> None:
        self.scratch = scratch
        self.say = say
        self._is_awaited = is_awaited

    def run(
        self, what: str, argv: Sequence[str], *, timeout_s: float, cwd: Path | None = None
    ) -> None:
        """Run one program.

        Args:
            what: Description of the step, for progress messages and errors.
            argv: Program and arguments.
            timeout_s: Maximum seconds.
            cwd: Working directory; defaults to the scratch folder.

        Raises:
            BuildError: The program failed or took longer than `timeout_s`.

        """
        started = time.monotonic()
        self.say(f"{what} ...")
        log = self.scratch / "build.log"
        with log.open("ab") as out:
            code = self._wait(argv, out.fileno(), timeout_s, cwd)
        if code != 0:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace").strip()
            status = "took too long" if code is None else f"exited with {code}"
            lines = [f"{what}: {argv[0]} {status}; {log} ends with:", tail]
            lines += [_NEEDS_NETWORK] if _UNREACHED.search(tail) else []
            raise BuildError("\n".join(lines))
        self.say(f"{what}: {time.monotonic() - started:.0f} s")

    def _wait(
        self, argv: Sequence[str], out: int, timeout_s: float, cwd: Path | None
    ) -> int | None:
        process = subprocess.Popen(
            ["nice", "-n", "0" if self._is_awaited else "10", *argv],
            cwd=cwd or self.scratch,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"},
            start_new_session=True,
            preexec_fn=_end_with_builder,  # noqa: PLW1509 - the builder has no other thread
        )
        if not self._is_awaited:
            # Where the kernel schedules by session (autogroup), `nice` has no effect on other
            # sessions; the priority of the group does. Fails without such groups, or if the program
            # has ended already.
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/autogroup").write_text("19")
        try:
            return process.wait(timeout_s)
        except BaseException as error:
            os.killpg(process.pid, 9)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def _end_with_builder() -> None:
    """Make the kernel end this program when its builder dies."""
    # The next builder removes the scratch folder, in which an orphan would keep writing.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run_for_output(argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
    """Return the output of a program.

    Raises:
        BuildError: The program failed.

    """
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise BuildError(f"{argv[0]} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def install(source: Path, target: Path, mode: int) -> None:
    """Move a finished file to its final name, durably and atomically."""
    # Content first, then the name, then its folder: after a crash the name never refers to a file
    # with missing content.
    source.chmod(mode)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def current_set(kind: type[S], cache: Path) -> S | None:
    """Return the current set of one kind of assets, or None."""
    try:
        return load_set(kind, cache)[1]
    except BackendUnavailable:
        return None


def kept_fields(assets: AssetSet, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a set whose names begin with given prefixes, for parts to keep."""
    return {k: v for k, v in msgspec.structs.asdict(assets).items() if k.startswith(prefixes)}


def install_by_digest(folder: Path, kind: str, path: Path, mode: int) -> dict[str, Any]:
    """Move a finished file to a name that contains its digest; return its fields of the set."""
    digest = digest_file(path)
    name = f"{kind}-{digest[:16]}"
    install(path, folder / name, mode)
    return {kind: name, f"{kind}_digest": digest}


def publish(folder: Path, assets: AssetSet, old: AssetSet | None) -> None:
    """Make a new set the current one atomically; remove the files of sets before the last one."""
    fresh = folder / f"{MANIFEST}.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(assets), indent=2))
    install(fresh, folder / MANIFEST, 0o644)
    keep = {MANIFEST, "build.lock"}
    # The old set stays: runs that started earlier still boot from it.
    for kept_set in (assets, old or assets):
        keep |= set(kept_set.files().values())
    for path in folder.iterdir():
        if path.is_file() and path.name not in keep:
            path.unlink()
