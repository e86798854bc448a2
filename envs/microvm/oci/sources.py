"""Images as files: OCI layouts, `docker save` archives and skopeo folders.

An archive's members are stored in a scratch folder by number, so that no member's name becomes a
path of this host.
"""

import hashlib
import os
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock.envs.microvm.oci.image import ContainerConfig
from penstock.envs.microvm.oci.layer_tar import opened_stream
from penstock.envs.microvm.oci.tree import ImageError
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

MANIFEST_BYTES_MAX = 4 << 20
ARCHIVE_FILES_MAX = 4_000
ARCHIVE_BYTES_MAX = 64 << 30
LAYERS_IN_IMAGE_MAX = 127
INDEX_DEPTH_MAX = 3
ARCHITECTURE, SYSTEM = "amd64", "linux"
_PIECE = 1 << 20
_DIGEST_LENGTH = len("sha256:") + 64
S = TypeVar("S")


class Platform(msgspec.Struct, frozen=True):
    """Operating system and processor of an image."""

    architecture: str = ""
    os: str = ""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A blob, by its digest."""

    digest: str
    size: int = 0
    mediaType: str = ""
    platform: Platform | None = None

    @property
    def hex(self) -> str:
        """Return the hex SHA-256.

        Raises:
            ImageError: The digest is of another kind.

        """
        algorithm, _, value = self.digest.partition(":")
        is_hex = set(value) <= set("0123456789abcdef")
        if algorithm != "sha256" or len(self.digest) != _DIGEST_LENGTH or not is_hex:
            raise ImageError(f"digest {self.digest[:100]!r}: expected sha256: and 64 digits")
        return value


class ImageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest, or an index of several."""

    schemaVersion: int = 2
    mediaType: str = ""
    config: Descriptor | None = None
    layers: list[Descriptor] = []
    manifests: list[Descriptor] = []


class RootFs(msgspec.Struct, frozen=True, kw_only=True):
    """The unpacked layers of an image."""

    diff_ids: list[str] = []


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an image."""

    architecture: str = ""
    os: str = ""
    config: ContainerConfig | None = None
    rootfs: RootFs = RootFs()


class SavedImage(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """An entry of `docker save`."""

    config: str
    layers: list[str]


class ImageSource(Protocol):
    """Source of the blobs of one image."""

    async def config(self) -> tuple[ImageConfig, list[Descriptor]]:
        """Return the image's configuration and its layers, lowest first."""
        ...

    async def layer(self, layer: Descriptor) -> Path:
        """Return the file of a layer."""
        ...


def decoded(data: bytes, kind: type[S], name: str) -> S:
    """Decode a JSON document of an image.

    Raises:
        ImageError: They do not decode to the type.

    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ImageError(f"{name}: {len(data)} bytes; {MANIFEST_BYTES_MAX} at most")
    try:
        return parse_json(data, kind, name)
    except CodecError as error:
        raise ImageError(f"{name}: {error}") from error


def checked(config: ImageConfig, layers: Sequence[Descriptor]) -> list[Descriptor]:
    """Check an image's layers and return them.

    Raises:
        ImageError: It is for another platform, has too many layers, or its layers do not match its
        configuration.

    """
    found = (config.os or SYSTEM, config.architecture or ARCHITECTURE)
    if found != (SYSTEM, ARCHITECTURE):
        raise ImageError(f"expected an image for {SYSTEM}/{ARCHITECTURE}, got {'/'.join(found)}")
    num = len(config.rootfs.diff_ids)
    if num != len(layers) or not 0 < num <= LAYERS_IN_IMAGE_MAX:
        raise ImageError(
            f"expected 1 to {LAYERS_IN_IMAGE_MAX} layers, each with its rootfs.diff_ids; "
            f"got {len(layers)} and {num}"
        )
    return list(layers)


def chosen(index: ImageManifest, name: str) -> Descriptor:
    """Return the manifest for this platform from an index.

    Raises:
        ImageError: None is.

    """
    ours = Platform(ARCHITECTURE, SYSTEM)
    fitting = [one for one in index.manifests if one.platform in (ours, None)]
    exact = [one for one in fitting if one.platform == ours]
    if not fitting:
        there = {f"{p.os}/{p.architecture}" for one in index.manifests if (p := one.platform)}
        raise ImageError(f"{name}: none for {SYSTEM}/{ARCHITECTURE}, only {sorted(there)}")
    return (exact or fitting)[0]


def check_digest(path: Path, digest: Descriptor) -> Path:
    """Return a blob's path.

    Raises:
        ImageError: Its content has another digest.

    """
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest.hex:
            raise ImageError(f"the content of {digest.digest} does not match its digest")
    return path


class FileSource:
    """An image whose files are all local.

    Args:
        files: Path of each file, by its name in the layout.
        name: Name of the archive or folder, for errors.

    Raises:
        ImageError: It is not an image.

    """

    def __init__(self, files: Mapping[str, Path], name: str) -> None:
        self._files, self._name = files, name
        self._saved: dict[str, Path] = {}

    async def config(self) -> tuple[ImageConfig, list[Descriptor]]:
        """See `ImageSource.config`."""
        if "index.json" in self._files:
            found = self._manifest(self._json("index.json", ImageManifest))
        elif "manifest.json" in self._files:
            raw = bytes(self._json("manifest.json", msgspec.Raw))
            if raw.lstrip().startswith(b"["):
                return self._docker(raw)
            found = self._json("manifest.json", ImageManifest)
        else:
            raise ImageError(f"{self._name}: expected index.json or manifest.json: "
                             "an OCI layout, a docker save archive or a skopeo folder")  # fmt: skip
        if found.config is None:
            raise ImageError(f"{self._name}: expected a manifest of an image, with its config")
        config = decoded(self._blob(found.config).read_bytes(), ImageConfig, "config")
        return config, checked(config, found.layers)

    async def layer(self, layer: Descriptor) -> Path:
        """See `ImageSource.layer`."""
        return self._saved.get(layer.digest) or self._blob(layer)

    def _manifest(self, index: ImageManifest) -> ImageManifest:
        for _ in range(INDEX_DEPTH_MAX):
            if not index.manifests:
                return index
            path = self._blob(chosen(index, self._name))
            index = decoded(_read_small(path), ImageManifest, "manifest")
        raise ImageError(f"{self._name}: an index of indexes, deeper than {INDEX_DEPTH_MAX}")

    def _docker(self, raw: bytes) -> tuple[ImageConfig, list[Descriptor]]:
        saved = decoded(raw, list[SavedImage], "manifest.json")
        if len(saved) != 1:
            raise ImageError(f"{self._name}: expected one image, got {len(saved)}: save one")
        config = self._json(saved[0].config, ImageConfig)
        diff_ids = config.rootfs.diff_ids
        # The conversion verifies the digest of the unpacked layer.
        layers = [Descriptor(digest=one) for one in diff_ids[: len(saved[0].layers)]]
        for layer, name in zip(layers, saved[0].layers, strict=False):
            self._saved[layer.digest] = self._file(name)
        return config, checked(config, layers)

    def _json(self, name: str, kind: type[S]) -> S:
        return decoded(_read_small(self._file(name)), kind, name)

    def _blob(self, blob: Descriptor) -> Path:
        names = (f"blobs/sha256/{blob.hex}", blob.hex)
        name = next((name for name in names if name in self._files), names[0])
        return check_digest(self._file(name), blob)

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise ImageError(f"{self._name}: no file {name[:200]!r}")
        return self._files[name]


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MANIFEST_BYTES_MAX + 1)


def open_files(path: Path, scratch: Path) -> FileSource:
    """Return the image in an archive or a folder.

    Args:
        path: Of the archive, plain or compressed, or of the folder.
        scratch: Folder for an archive's members.

    Raises:
        ImageError: It is damaged or hostile, exceeds a bound, or is not an image.

    """
    if path.is_dir():
        files: dict[str, Path] = {}
        for at, folders, names in os.walk(path):
            folders[:] = [] if len(Path(at).relative_to(path).parts) >= INDEX_DEPTH_MAX else folders
            # Links could point to any file of this host.
            inside = [one for name in names if not (one := Path(at, name)).is_symlink()]
            files |= {str(one.relative_to(path)): one for one in inside if one.is_file()}
            if len(files) > ARCHIVE_FILES_MAX:
                raise ImageError(f"{path}: more than {ARCHIVE_FILES_MAX} files")
        return FileSource(files, str(path))
    try:
        return FileSource(_unpacked(path, scratch), path.name)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{path}: expected an image archive ({error})") from error


def _unpacked(path: Path, scratch: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    links: dict[str, str] = {}
    left = ARCHIVE_BYTES_MAX
    with opened_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for number, member in enumerate(archive):
            left -= member.size
            if number > ARCHIVE_FILES_MAX or left < 0:
                raise ImageError(f"{path}: more than {ARCHIVE_FILES_MAX} files or "
                                 f"{ARCHIVE_BYTES_MAX} bytes")  # fmt: skip
            name = posixpath.normpath(member.name)
            if member.issym() or member.islnk():
                at = posixpath.dirname(name) if member.issym() else ""
                links[name] = posixpath.normpath(posixpath.join(at, member.linkname))
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                files[name] = scratch / f"member-{number}"
                with files[name].open("wb") as out:
                    while piece := content.read(_PIECE):
                        out.write(piece)
    # Older versions of `docker save` linked equal layers.
    return files | {name: files[to] for name, to in links.items() if to in files}
