"""Makes container images of every kind from a few files."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import zstandard

COMPRESSIONS = {
    "plain": lambda data: data,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": lambda data: zstandard.compress(data, 1),
}


def tar_of(*members, **files):
    """Return a tar stream of members, each (name, options) or (name, options, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, options, *content in members:
            info = tarfile.TarInfo(name)
            for key, value in options.items():
                setattr(info, key, value)
            data = content[0] if content else b""
            info.size = options.get("size", len(data))
            # A size that is a lie has no content.
            tar.addfile(info, None if "size" in options else io.BytesIO(data))
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def sha(data):
    """Return the hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


class Image:
    """An image in memory: its blobs, by digest, and its manifest."""

    def __init__(self, layers, *, config=None, compression="gzip", **root):
        self.blobs = {}
        self.tars = layers
        pack = COMPRESSIONS[compression]
        described = {
            "architecture": "amd64",
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(one)}" for one in layers]},
        } | root
        self.config_data = json.dumps(described).encode()
        self.config = self.add(self.config_data, "application/vnd.oci.image.config.v1+json")
        self.layers = [
            self.add(pack(one), "application/vnd.oci.image.layer.v1.tar") for one in layers
        ]
        manifest = {"schemaVersion": 2, "config": self.config, "layers": self.layers}
        self.manifest_data = json.dumps(manifest).encode()
        self.manifest = self.add(
            self.manifest_data, "application/vnd.oci.image.manifest.v1+json"
        ) | {"platform": {"architecture": "amd64", "os": "linux"}}

    def add(self, data, kind=""):
        """Keep a blob, and return its descriptor."""
        digest = f"sha256:{sha(data)}"
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    @property
    def index(self):
        """Return an index that also has an image for other machines."""
        other = self.manifest | {"digest": "sha256:" + "0" * 64}
        other |= {"platform": {"architecture": "arm64", "os": "linux"}}
        return json.dumps({"schemaVersion": 2, "manifests": [other, self.manifest]}).encode()

    def layout(self, folder: Path):
        """Write an OCI layout."""
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for digest, data in self.blobs.items():
            (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        (folder / "index.json").write_bytes(self.index)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return folder

    def archive(self, path: Path, compression="plain"):
        """Write an OCI archive."""
        members = [("index.json", {}, self.index), ("oci-layout", {}, b"{}")]
        members += [(f"blobs/sha256/{digest[7:]}", {}, data) for digest, data in self.blobs.items()]
        path.write_bytes(COMPRESSIONS[compression](tar_of(*members)))
        return path

    def docker_save(self, path: Path):
        """Write an archive as `docker save` did: layers not compressed, equal ones linked."""
        names = [f"{number}/layer.tar" for number in range(len(self.tars))]
        members = []
        for number, data in enumerate(self.tars):
            first = self.tars.index(data)
            if first == number:
                members.append((names[number], {}, data))
            else:
                link = {"type": tarfile.SYMTYPE, "linkname": f"../{names[first]}"}
                members.append((names[number], link))
        saved = [{"Config": "config.json", "RepoTags": ["a:b"], "Layers": names}]
        members += [("config.json", {}, self.config_data)]
        members += [("manifest.json", {}, json.dumps(saved).encode())]
        path.write_bytes(tar_of(*members))
        return path

    def skopeo(self, folder: Path):
        """Write a folder as skopeo's `dir:` does."""
        folder.mkdir()
        (folder / "manifest.json").write_bytes(self.manifest_data)
        (folder / "version").write_text("Directory Transport Version: 1.1\n")
        for digest, data in self.blobs.items():
            (folder / digest[7:]).write_bytes(data)
        return folder
