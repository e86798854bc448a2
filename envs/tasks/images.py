"""The image that a task's machines boot, and the files that are added to it.

```
 Dockerfile that only copies ─▶ the base image, and its files
 any other ─▶ an image named by all its inputs ─▶ its digest, once it is built
 reference ─▶ its digest, once it is pulled
```
Reading a task runs none of its code; `penstock tasks images` builds and pulls missing images.
"""

from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import digest_bytes
from penstock.envs.microvm.images.layers import (
    DIGEST,
    IMAGE_SUFFIX,
    layer_folder,
    layer_path,
    pinned,
)
from penstock.envs.tasks.dockerfile import StartFilesError, check_instructions, start_files
from penstock.envs.tasks.harbor.folder import MalformedTaskError, TaskImage, Tree, read_text

DOCKERFILE = "Dockerfile"


def named_image(reference: str, where: str) -> str:
    """Return the digest of an image that a task names.

    Args:
        reference: As `pinned` takes it.
        where: File and field that name it.

    Raises:
        MalformedTaskError: The image is missing.

    """
    digest = pinned(reference)
    if DIGEST.fullmatch(digest) is None:
        text = f"{reference!a:.200}: expected it here: `penstock images pull {reference}`"
        raise MalformedTaskError(f"{where}: image {text}", image=TaskImage(reference=reference))
    return digest


def start_of(
    task: Path, place: Path, context: Tree, *, image: str = "", hidden: tuple[str, ...] = ()
) -> tuple[str, Tree]:
    """Return the digest of a task's image (empty for the base image) and the files to add to it.

    Args:
        task: Folder of the task.
        place: Folder in it that may have a Dockerfile.
        context: The files there.
        image: Digest of the image that the task names, instead of a Dockerfile's.
        hidden: Files there that are not part of `context`.

    Raises:
        MalformedTaskError: The Dockerfile exceeds a bound, or its image is missing.

    """
    path = place / DOCKERFILE
    text = ""
    if path.exists():
        text = read_text(task, str(path.relative_to(task)))
        context = {name: one for name, one in context.items() if name != DOCKERFILE}
    try:
        if image:
            # A container image already has all its files; a layer lacks those of the Dockerfile.
            is_whole = layer_path(layer_folder(), image).suffix == IMAGE_SUFFIX
            return image, {} if is_whole else start_files(text, context)
        check_instructions(text, context)
        return "", start_files(text, context)
    except StartFilesError as error:
        if not error.needs_image:
            raise MalformedTaskError(f"{path}: {error}") from error
        parts = [msgspec.msgpack.encode(one) for _, one in sorted(context.items())]
        name = f"dockerfile-{digest_bytes(text.encode(), *parts)[:32]}"
        digest = pinned(name)
        if DIGEST.fullmatch(digest):
            return digest, {}
        missing = TaskImage(folder=place, name=name, hidden=hidden)
        reason = f"{path}: {error}; to build it: `penstock tasks images {task}`"
        raise MalformedTaskError(reason, image=missing) from error
