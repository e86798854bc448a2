"""Builds an image layer from Debian packages, Python requirements and a folder.

A layer is one read-only file. The same inputs give the same bytes: files have one owner and time 0,
and Python packages come without bytecode.
"""

import re
import shutil
import tempfile
from pathlib import Path, PurePosixPath

import msgspec

from penstock.envs.microvm.images.assets import digest_bytes, digest_file
from penstock.envs.microvm.images.layers import ImageLayer, entry_path, layer_folder, layer_path
from penstock.envs.microvm.recipe.apt import MIRROR
from penstock.envs.microvm.recipe.image import LEFT_OUT, SUITE, UUID
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Say,
    Steps,
    build_lock,
    install,
    require_programs,
)
from penstock.envs.sandbox import WORK_DIR, WORK_NAMES
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

NAME = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,79}")
"""Valid names, which include container image names, so that a layer can replace such an image."""
FILES_MAX = 200_000
HISTORY = ".git"
AGENT_UID = 1000
"""User id that owns all files of a layer with a folder, in which the agent works; without a folder
root owns them."""
PYTHON_PACKAGES = "usr/local/lib/python3.11/dist-packages"


class LayerSources(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of a layer: packages, requirements or a folder, at least one of them."""

    packages: list[str] = []
    """Debian packages, which are installed with their dependencies."""
    requirements: list[str] = []
    """Requirements for pip; only wheels, so that no code of packages runs on this host."""
    folder: Path | None = None
    """Folder to copy, without `.git`: from the history an agent could look up the solution."""
    target: str = "/work"
    """Path of the folder's content in the machine."""


def build_layer(name: str, sources: LayerSources, cache: Path, say: Say) -> ImageLayer:
    """Return a layer, building it if its inputs have changed.

    Args:
        name: Name of the layer: lower-case letters, digits, `.`, `_`, `-`, `:`, `/`.
        sources: Content of the layer.
        cache: Cache of VM files.
        say: Function that shows one line of progress.

    Raises:
        BuildError: The name or target is invalid, there are no sources, a program is missing, or a
            step failed.

    """
    _place(sources.target)
    if NAME.fullmatch(name) is None:
        raise BuildError(f"image name {name!r}: expected {NAME.pattern}")
    if not (sources.packages or sources.requirements or sources.folder):
        raise BuildError(f"image {name}: expected packages, requirements or a folder")
    folder = layer_folder(cache)
    with build_lock(folder, say), tempfile.TemporaryDirectory(dir=folder) as scratch:
        inputs = _inputs(sources)
        entry = entry_path(folder, name)
        old = _current(entry)
        if old and old.inputs == inputs and layer_path(folder, old.digest).is_file():
            say(f"image {name} is up to date: {old.digest[:16]}")
            return old
        built = _build(Steps(Path(scratch), say), sources)
        layer = ImageLayer(
            name=name,
            digest=digest_file(built),
            inputs=inputs,
            num_bytes=built.stat().st_size,
            packages=sources.packages,
            requirements=sources.requirements,
            folder=str(sources.folder or ""),
            target=sources.target if sources.folder else "",
        )
        # The file before its entry: a name must never refer to a missing file.
        install(built, layer_path(folder, layer.digest), 0o644)
        fresh = Path(scratch) / "entry"
        fresh.write_bytes(msgspec.json.encode(layer))
        install(fresh, entry, 0o644)
        return layer


def _current(entry: Path) -> ImageLayer | None:
    try:
        return parse_json(entry.read_bytes(), ImageLayer, entry.name)
    except (OSError, CodecError):
        return None


def _inputs(sources: LayerSources) -> str:
    """Return the digest of the inputs, except for the versions of the packages."""
    # Includes this module's source: a changed recipe builds the layer again.
    parts = [Path(__file__).read_bytes(), sources.target.encode(), SUITE.encode()]
    parts += [text.encode() for text in (*sorted(sources.packages), "", *sources.requirements)]
    if sources.folder is not None:
        paths = sorted(path for path in sources.folder.rglob("*") if _counts(path, sources.folder))
        if len(paths) > FILES_MAX:
            raise BuildError(f"{sources.folder}: more than {FILES_MAX} files")
        for path in paths:
            parts += [str(path.relative_to(sources.folder)).encode(), _content(path)]
    return digest_bytes(*parts)


def _counts(path: Path, folder: Path) -> bool:
    is_folder = path.is_dir() and not path.is_symlink()
    return not is_folder and HISTORY not in path.relative_to(folder).parts


def _content(path: Path) -> bytes:
    if path.is_symlink():
        return b"link " + str(path.readlink()).encode()
    if not path.is_file():
        raise BuildError(f"{path}: expected a file, a folder or a link")
    mode = path.stat().st_mode & 0o777
    return b"%o " % mode + digest_file(path).encode()


def _build(steps: Steps, sources: LayerSources) -> Path:
    require_programs("mkfs.erofs")
    root = steps.scratch / "root"
    root.mkdir()
    if sources.packages:
        _add_packages(steps, root, sources.packages)
    if sources.requirements:
        _add_requirements(steps, root, sources.requirements)
    if sources.folder is not None:
        target = root / _place(sources.target)
        no_history = shutil.ignore_patterns(HISTORY)
        shutil.copytree(
            sources.folder, target, symlinks=True, dirs_exist_ok=True, ignore=no_history
        )
    built = steps.scratch / "layer"
    uid = AGENT_UID if sources.folder is not None else 0
    owner = [f"--force-uid={uid}", f"--force-gid={uid}"]
    make = ["mkfs.erofs", "--quiet", "-T0", f"-U{UUID}", *owner, str(built), str(root)]
    steps.run("image: writing erofs", make, timeout_s=600)
    return built


def _place(target: str) -> PurePosixPath:
    """Return the path of a layer's content, relative to its root.

    Raises:
        BuildError: The target is relative, or contains "..".

    """
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts:
        raise BuildError(f"image target {target!r}: expected an absolute path without '..'")
    place = path.relative_to(path.anchor)
    # A folder /app in the layer would hide the link of the base image from /app to /work.
    if place.parts and f"/{place.parts[0]}" in WORK_NAMES:
        return PurePosixPath(WORK_DIR.lstrip("/"), *place.parts[1:])
    return place


def _add_packages(steps: Steps, root: Path, packages: list[str]) -> None:
    require_programs("mmdebstrap", "tar")
    archive = steps.scratch / "packages.tar"
    hook = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done'
    command = [
        *("mmdebstrap", "--variant=extract", f"--include={','.join(packages)}"),
        *("--aptopt=Acquire::Languages none", f"--setup-hook={hook}"),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT if "perl" not in name),
        *(SUITE, str(archive), f"deb {MIRROR} {SUITE} main"),
    ]
    steps.run("image: fetching Debian packages", command, timeout_s=900)
    left_out = ("./dev/*", "./etc/*", "./var/lib/*", "./var/cache/*", "./var/log/*", "./run/*")
    excludes = [f"--exclude={pattern}" for pattern in left_out]
    unpack = ["tar", "xf", str(archive), "--no-same-owner", *excludes]
    steps.run("image: unpacking them", unpack, timeout_s=120, cwd=root)
    archive.unlink()


def _add_requirements(steps: Steps, root: Path, requirements: list[str]) -> None:
    require_programs("python3")
    target = root / PYTHON_PACKAGES
    command = [
        *("python3", "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"),
        *("--python-version=3.11", "--implementation=cp", "--disable-pip-version-check"),
        *("--target", str(target), *requirements),
    ]
    steps.run("image: fetching Python packages", command, timeout_s=900)
