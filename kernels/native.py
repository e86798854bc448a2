"""Compiles sources with the machine's own compilers, once, and loads C libraries.

A result is keyed by its source, the command, the compiler and the processor, so a cache folder may
be shared between machines. Where there is no compiler the caller uses its portable path.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-Wno-psabi", "-shared", "-fPIC")
_COMPILE_S = 300.0


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file if it is not cached, and load it.

    Args:
        source: one file; the headers it includes lie beside it.

    Returns:
        The library, or None if there is no compiler or it cannot compile the file.

    """
    compiler = find_compiler()
    if compiler is None:
        log.warning("%s: no C compiler; the portable path is several times slower", source.name)
        return None
    command = [compiler, *_FLAGS, str(source), "-lm"]
    headers = sorted(source.parent.glob("*.h"))
    content = b"\0".join(path.read_bytes() for path in [source, *headers])
    library = build(command, f"{source.stem}.so", content)
    return None if library is None else ctypes.CDLL(str(library))


def build(command: Sequence[str], name: str, content: bytes, stdin: bytes = b"") -> Path | None:
    """Run a compiler unless the cache has its result.

    Args:
        command: the compiler and its arguments; `-o FILE` is added.
        name: of the result, with its suffix; the key goes between.
        content: of every file that the result depends on.
        stdin: what the compiler reads there.

    Returns:
        The result, beside it what the compiler said, if anything (suffix `.log`); None if it
        failed, which is logged.

    """
    stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a name, not a path
    key = _key(command, content + stdin)
    result = _cache_folder() / f"{stem}-{key}{suffix}"
    if not result.exists() and not _compile(command, result, stdin):
        return None
    return result


def _cache_folder() -> Path:
    root = os.environ.get("PENSTOCK_CACHE")
    folder = (Path(root) if root else Path.home() / ".cache" / "penstock") / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(command: Sequence[str], content: bytes) -> str:
    hasher = hashlib.sha256(content)
    names = "\0".join(Path(part).name for part in command)
    hasher.update(names.encode() + _version(command[0]) + processor())
    return hasher.hexdigest()[:20]


@cache
def _version(compiler: str) -> bytes:
    done = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=False)
    return done.stdout


@cache
def processor() -> bytes:
    """Return what tells one processor's instruction set from another's."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return b""
    lines = info.read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(command: Sequence[str], result: Path, stdin: bytes) -> bool:
    """Compile to a temporary file and rename it, so that racing processes all find a whole one."""
    with tempfile.TemporaryDirectory(dir=result.parent) as folder:
        output = Path(folder) / result.name
        done = subprocess.run(
            [*command, "-o", str(output)],
            input=stdin,
            capture_output=True,
            timeout=_COMPILE_S,
            check=False,
        )
        if done.returncode:
            log.warning(
                "%s: not compiled: %s", _source(command), done.stderr.decode("utf-8", "replace")
            )
            return False
        with output.open("rb") as file:
            os.fsync(file.fileno())
        if said := done.stdout + done.stderr:
            notes = output.with_suffix(".log")
            notes.write_bytes(said)
            notes.replace(result.with_suffix(".log"))
        output.replace(result)
    return True


def _source(command: Sequence[str]) -> str:
    """Name what was to be compiled."""
    names = [Path(part).name for part in command if Path(part).suffix in {".c", ".cu"}]
    return names[-1] if names else Path(command[0]).name
