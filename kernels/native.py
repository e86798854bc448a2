"""Compiles C sources with the machine's own compiler, once, and loads them.

A library is keyed by its source, its flags, the compiler and the processor, so a cache folder may
be shared between machines. Where there is no compiler the caller uses its portable path.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-Wno-psabi", "-shared", "-fPIC")
_COMPILE_S = 120.0


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file if it is not cached, and load it.

    Returns:
        The library, or None if there is no compiler or it cannot compile the file.

    """
    compiler = find_compiler()
    if compiler is None:
        log.warning("%s: no C compiler; the portable path is several times slower", source.name)
        return None
    library = _cache_folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if not library.exists() and not _compile(compiler, source, library):
        return None
    return ctypes.CDLL(str(library))


def _cache_folder() -> Path:
    root = os.environ.get("PENSTOCK_CACHE")
    folder = (Path(root) if root else Path.home() / ".cache" / "penstock") / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=10, check=False)
    hasher = hashlib.sha256(source.read_bytes())
    hasher.update(" ".join(_FLAGS).encode() + version.stdout + _processor())
    return hasher.hexdigest()[:20]


def _processor() -> bytes:
    """Return what tells one processor's instruction set from another's."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return b""
    lines = info.read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(compiler: str, source: Path, library: Path) -> bool:
    """Compile to a temporary file and rename it, so that racing processes all find a whole one."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command = [compiler, *_FLAGS, str(source), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=False)
        if done.returncode:
            log.warning("%s: not compiled: %s", source.name, done.stderr.decode(errors="replace"))
            return False
        with output.open("rb") as file:
            os.fsync(file.fileno())
        output.replace(library)
    return True
