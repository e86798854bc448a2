"""Container images that machines boot, and their files in the store of layers.

```
 <layers>/<digest>.erofs   a layer; several images may refer to it
 <layers>/<digest>.image   a `MachineImage`: layers and settings, named by its content
 <layers>/<name>.json      the entry of a name, as for every layer (`images/layers.py`)
 <layers>/<key>.chain      the erofs file of a chain of layers, so that it is converted once
```
Readers of tasks call `prepare.prepare_image` and put the digest into `Task.image`.
"""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import digest_bytes, digest_file, vm_cache_dir
from penstock.envs.microvm.images.layers import (
    IMAGE_SUFFIX,
    ImageLayer,
    ImageSettings,
    MachineImage,
    entry_path,
    layer_folder,
    layer_path,
    load_image,
    load_layer,
)
from penstock.envs.microvm.oci.erofs import ErofsWriter, read_erofs
from penstock.envs.microvm.oci.layer_tar import ConvertReport, ConvertRequest, convert
from penstock.envs.microvm.oci.tree import ImageError, Node, find
from penstock.envs.microvm.recipe.steps import Say, build_lock, install
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

LAYERS_MAX = 5
"""Layers of an image that machines mount apart, besides the one of its settings: QEMU's machines
have slots for six. What lies above the fourth becomes one."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")
ENV_MAX, ENV_BYTES_MAX = 500, 64 << 10
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CHAIN_SUFFIX = ".chain"
RECIPE = "1"
"""Counts changes of what is made of equal layers."""


class ContainerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image, in OCI's names."""

    Env: list[str] | None = None
    WorkingDir: str = ""
    User: str = ""
    Entrypoint: list[str] | None = None
    Cmd: list[str] | None = None
    Shell: list[str] | None = None
    Labels: dict[str, str] | None = None
    ExposedPorts: dict[str, msgspec.Raw] | None = None
    OnBuild: list[str] | None = None


class ImageStore:
    """Converts layers and keeps images, under the build lock of the folder.

    Args:
        say: Function that shows one line of progress.
        cache: Cache of VM files; defaults to `vm_cache_dir()`.

    """

    def __init__(self, say: Say, cache: Path | None = None) -> None:
        self.folder = layer_folder(cache or vm_cache_dir())
        self.say = say

    def locked(self) -> "_StoreLock":
        """Return a context manager that locks the store and yields a scratch folder."""
        return _StoreLock(self)

    def layer(self, key: str, request: Callable[[Path], ConvertRequest], scratch: Path) -> str:
        """Return the digest of the erofs file of a chain's uppermost layer.

        Args:
            key: Digest of the layer's inputs, including lower layers.
            request: Function of the target that returns the conversion; called if needed.
            scratch: Folder for the file until it is complete.

        Raises:
            ImageError: The layer is damaged, hostile, or beyond a bound.

        """
        if known := self.known(key):
            return known
        target = scratch / f"{key}.new"
        found = convert(request(target))
        self._tell(found)
        digest = digest_file(target)
        install(target, layer_path(self.folder, digest), 0o644)
        fresh = scratch / "chain"
        fresh.write_text(digest)
        install(fresh, self.folder / f"{key}{CHAIN_SUFFIX}", 0o644)
        return digest

    def known(self, key: str) -> str:
        """Return the digest of a converted layer; empty if it was not converted."""
        chain = self.folder / f"{key}{CHAIN_SUFFIX}"
        digest = chain.read_text() if chain.is_file() else ""
        return digest if digest and layer_path(self.folder, digest).is_file() else ""

    def _tell(self, found: ConvertReport) -> None:
        if found.num_dropped:
            self.say(f"image: {found.num_dropped} devices or sockets left out")
        if found.num_attributes:
            self.say(f"image: extended attributes of {found.num_attributes} files left out")
        if found.foreign:
            names = ", ".join(found.foreign)
            self.say(f"image: programs not for x86-64, which no machine here runs: {names}")

    def paths(self, digests: Sequence[str]) -> list[Path]:
        """Return the files of layers."""
        return [layer_path(self.folder, digest) for digest in digests]

    def merged(self, layers: Sequence[str], scratch: Path) -> list[str]:
        """Return a stack that machines can mount: at most `LAYERS_MAX` layers, uppermost first."""
        if len(layers) <= LAYERS_MAX:
            return list(layers)
        above, below = list(layers[: 1 - LAYERS_MAX]), list(layers[1 - LAYERS_MAX :])
        key = digest_bytes(b"merged", RECIPE.encode(), *(one.encode() for one in layers))
        one = self.layer(
            key,
            lambda target: ConvertRequest(
                merged=[str(path) for path in self.paths(above)],
                lowers=[str(path) for path in self.paths(below)],
                target=str(target),
            ),
            scratch,
        )
        return [one, *below]

    def publish(
        self, name: str, layers: Sequence[str], config: ContainerConfig, scratch: Path, source: str
    ) -> ImageLayer:
        """Give a name to an image.

        Args:
            name: Its name.
            layers: Digests of its layers, the uppermost first.
            config: Its settings.
            scratch: Folder on the file system of the store.
            source: Where it comes from, for people.

        Raises:
            ImageError: Its settings exceed a bound, or name a user that it does not have.

        """
        if NAME.fullmatch(name) is None:
            raise ImageError(f"image name {name!r}: expected {NAME.pattern}")
        stack = self.merged(layers, scratch)
        trees = [read_erofs(path) for path in self.paths(stack)]
        settings = read_settings(config, trees)
        top = scratch / "top"
        with top.open("wb+") as file:
            ErofsWriter(file, bytes_max=0).finish(top_layer(settings, trees))
        digest = digest_file(top)
        install(top, layer_path(self.folder, digest), 0o644)
        image = MachineImage(layers=[digest, *stack], settings=settings)
        fresh = scratch / "image"
        fresh.write_bytes(msgspec.json.encode(image))
        image_digest = digest_file(fresh)
        # Layers before the image and the image before its name, so that none refers to a missing
        # file.
        install(fresh, self.folder / f"{image_digest}{IMAGE_SUFFIX}", 0o644)
        entry = ImageLayer(
            name=name,
            digest=image_digest,
            inputs=image_digest,
            num_bytes=sum(path.stat().st_blocks * 512 for path in self.paths(image.layers)),
            folder=source,
            config=msgspec.json.encode(config).decode(),
        )
        fresh.write_bytes(msgspec.json.encode(entry))
        install(fresh, entry_path(self.folder, name), 0o644)
        return entry

    def load(self, name: str) -> tuple[list[str], ContainerConfig] | None:
        """Return an image's layers, uppermost first, and its settings; None if it is no image."""
        try:
            path, entry = load_layer(name, self.folder.parent)
            config = parse_json(entry.config.encode(), ContainerConfig, name)
        except (LookupError, CodecError):
            return None
        return load_image(path).layers[1:], config


class _StoreLock:
    """Context manager that holds the build lock and owns a scratch folder."""

    def __init__(self, store: ImageStore) -> None:
        self._lock = build_lock(store.folder, store.say)
        self._folder = store.folder

    def __enter__(self) -> Path:
        self._lock.__enter__()
        self._scratch = tempfile.TemporaryDirectory(dir=self._folder)
        return Path(self._scratch.name)

    def __exit__(self, *error: object) -> None:
        self._scratch.cleanup()
        self._lock.__exit__(None, None, None)


def read_settings(config: ContainerConfig, layers: Sequence[Node]) -> ImageSettings:
    """Return the settings of an image that a machine needs.

    Args:
        config: The image's own settings.
        layers: Trees of its layers, the uppermost first.

    Raises:
        ImageError: They exceed a bound, or name a user that the image does not have.

    """
    env = config.Env or []
    if len(env) > ENV_MAX or sum(map(len, env)) > ENV_BYTES_MAX or any("\0" in one for one in env):
        raise ImageError(f"Env: expected at most {ENV_MAX} variables, {ENV_BYTES_MAX} bytes")
    workdir = os.path.normpath("/" + config.WorkingDir.lstrip("/"))
    if len(workdir) > 1_000 or "\0" in workdir:
        raise ImageError("WorkingDir: expected at most 1,000 characters")
    uid, gid, home = find_user(config.User, layers)
    found = {one.partition("=")[0]: one.partition("=")[2] for one in env if "=" in one}
    return ImageSettings(
        env={"PATH": DEFAULT_PATH, "HOME": home, "TERM": "dumb"} | found,
        workdir=workdir,
        uid=uid,
        gid=gid,
        entrypoint=config.Entrypoint or [],
        cmd=config.Cmd or [],
    )


def find_user(user: str, layers: Sequence[Node]) -> tuple[int, int, str]:
    """Return the user id, group id and home of a `USER`: a name or number, optionally with a group.

    Raises:
        ImageError: The image has no such user or group.

    """
    name, _, group = user.partition(":")
    accounts = [line.split(":") for line in read_small(layers, b"/etc/passwd").splitlines()]
    found = next((one for one in accounts if len(one) > 5 and name in one[:3:2]), None)
    name = name or "0"
    if found is None and (not name.isdecimal() or int(name) >= 1 << 31):
        raise ImageError(f"User: the image has no user {user!r}")
    uid, gid, home = (int(found[2]), int(found[3]), found[5]) if found else (int(name), 0, "/")
    if name == "0" and not found:
        home = "/root"
    if group:
        groups = [line.split(":") for line in read_small(layers, b"/etc/group").splitlines()]
        row = next((one for one in groups if len(one) > 2 and group in one[:3:2]), None)
        if row is None and not group.isdecimal():
            raise ImageError(f"User: the image has no group {group!r}")
        gid = int(row[2]) if row else int(group)
    return uid, gid, home


def read_small(layers: Sequence[Node], path: bytes) -> str:
    """Return a small text file of an image, or an empty text if it does not exist."""
    found = find(layers, path)
    return found[1].data.decode(errors="replace") if found and not found[1].is_folder else ""


def top_layer(settings: ImageSettings, layers: Sequence[Node]) -> Node:
    """Return the uppermost layer: mount points, and `/work` as a link to the working directory."""
    root = layers[0] if layers else Node()
    top = Node(root.mode, root.uid, root.gid)
    for name in ("dev", "proc", "sys"):
        top.children[name.encode()] = Node()
    for name in ("tmp", "tests", "logs", "solution"):
        if find(layers, f"/{name}".encode()) is None:
            top.children[name.encode()] = Node(0o041777)
    home = find(layers, b"/home")
    if (home is None or home[0] == b"/home") and find(layers, b"/home/agent") is None:
        # Directories of an episode's files outside the working directory.
        own = Node(0o040755, settings.uid, settings.gid)
        top.children[b"home"] = Node(children={b"agent": own})
    if settings.workdir in {"/", "/work"}:
        if find(layers, b"/work") is None:
            top.children[b"work"] = Node(0o040755, settings.uid, settings.gid)
        return top
    if find(layers, settings.workdir.encode()) is None:
        node = top
        for part in settings.workdir.strip("/").split("/"):
            node = node.children.setdefault(part.encode(), Node())
    target = os.fsencode(settings.workdir.lstrip("/"))
    top.children[b"work"] = Node(0o120777, size=len(target), data=target)
    return top
