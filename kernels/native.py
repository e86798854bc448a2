"""Compilation of C and CUDA sources with the compilers on this machine, with a cache of results.

The cache key covers the source, the command, the compiler and the CPU, so machines may share a
cache folder. Callers fall back to portable code if there is no compiler.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-Wno-psabi", "-shared", "-fPIC")
# Maximum seconds for one compilation.
_COMPILE_S = 300.0


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file unless it is cached, and load the library.

    Args:
        source: C file, with its headers in the same folder.

    Returns:
        The library, or None if there is no compiler or compilation failed.

    """
    compiler = find_compiler()
    if compiler is None:
        log.warning(
            "%s: no C compiler found (gcc, clang or cc); the portable code is several times slower",
            source.name,
        )
        return None
    command = [compiler, *_FLAGS, str(source), "-lm"]
    # All headers, as the source does not list those that it includes indirectly.
    headers = sorted(source.parent.glob("*.h"))
    content = b"\0".join(path.read_bytes() for path in [source, *headers])
    library = build(command, f"{source.stem}.so", content)
    return None if library is None else ctypes.CDLL(str(library))


def build(command: Sequence[str], name: str, content: bytes, stdin: bytes = b"") -> Path | None:
    """Run a compiler unless the cache has the result.

    Args:
        command: Compiler and its arguments; `-o FILE` is added.
        name: File name of the result; the cache key is inserted before its suffix.
        content: Contents of all files that the result depends on.
        stdin: Standard input of the compiler.

    Returns:
        Path of the result, with any compiler output next to it (suffix `.log`); None if compilation
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
    # Names without folders: the same source elsewhere has the same key.
    names = "\0".join(Path(part).name for part in command)
    hasher.update(names.encode() + _version(command[0]) + processor())
    return hasher.hexdigest()[:20]


@cache
def _version(compiler: str) -> bytes:
    done = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=False)
    return done.stdout


@cache
def processor() -> bytes:
    """Return a description of the CPU's instruction set, for the cache key."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return b""
    lines = info.read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(command: Sequence[str], result: Path, stdin: bytes) -> bool:
    # Compiled to a temporary file that is renamed: processes that race see a complete file or none.
    started = time.monotonic()
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
                "%s: compilation failed with exit code %d: %s",
                _source(command),
                done.returncode,
                done.stderr.decode("utf-8", "replace"),
            )
            return False
        # Synced before the rename: after a crash, the name must not refer to an empty file.
        with output.open("rb") as file:
            os.fsync(file.fileno())
        if messages := done.stdout + done.stderr:
            notes = output.with_suffix(".log")
            notes.write_bytes(messages)
            notes.replace(result.with_suffix(".log"))
        # Last, after its log: a result in the cache counts as complete.
        output.replace(result)
        log.info("%s: compiled in %.1f s", _source(command), time.monotonic() - started)
    return True


def _source(command: Sequence[str]) -> str:
    """Return the name of the source file, or of the compiler, for logs."""
    names = [Path(part).name for part in command if Path(part).suffix in {".c", ".cu"}]
    return names[-1] if names else Path(command[0]).name
