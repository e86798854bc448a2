"""`penstock tasks images`: builds and pulls the images that tasks need.

A stranger's Dockerfile runs in machines; its `RUN` can reach the hosts that tasks may reach. The
image that a task names comes from a registry, never from a path of this host.
"""

import argparse
import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from penstock.envs.microvm.oci.build import BuildOptions
from penstock.envs.microvm.oci.prepare import prepare_image
from penstock.envs.microvm.oci.registry import RegistryError
from penstock.envs.microvm.oci.tree import ImageError
from penstock.envs.tasks.harbor.folder import MalformedTaskError, TaskImage
from penstock.envs.tasks.harbor.read import ReadOptions
from penstock.envs.tasks.readers.opening import open_sources
from penstock.infra.images import progress
from penstock.infra.output import print_result


def make_task_images(arguments: argparse.Namespace, options: ReadOptions) -> int:
    """Build or pull missing images; a failing one does not stop the others."""
    build = BuildOptions(
        egress=[] if options.is_offline else list(options.internet),
        offline=options.is_offline,
        memory_mib=arguments.memory_mib,
        step_s=arguments.step_s,
        credentials=arguments.credentials,
    )
    made: dict[str, str] = {}
    failed: dict[str, str] = {}
    for image, task in missing_images(arguments.folder, options).items():
        try:
            made[task] = asyncio.run(_make(image, build))
        except (ImageError, RegistryError) as error:
            failed[task] = str(error)
    print_result({"made": made, "failed": failed}, as_json=arguments.json)
    return 1 if failed else 0


def missing_images(path: Path, options: ReadOptions) -> dict[TaskImage, str]:
    """Return the missing images of a path's tasks, each with the name of one task.

    Raises:
        MalformedTaskError: The path has no tasks.

    """
    num_tasks = 0
    found: dict[TaskImage, str] = {}
    names: set[str] = set()
    for source in open_sources(path, options):
        for entry in source.entries():
            num_tasks += 1
            try:
                entry.read()
            except MalformedTaskError as error:
                image = error.image
                if image and (name := image.reference or image.name) not in names:
                    names.add(name)
                    found[image] = entry.name
    if not num_tasks:
        raise MalformedTaskError(f"{path}: expected tasks, found none")
    return found


async def _make(image: TaskImage, options: BuildOptions) -> str:
    """Build or pull an image and return its digest."""
    if image.reference:
        return (await prepare_image(image.reference, options=options, say=progress())).digest
    with visible(image) as folder:
        done = await prepare_image(folder, name=image.name, options=options, say=progress())
        return done.digest


@contextlib.contextmanager
def visible(image: TaskImage) -> Generator[Path]:
    """Yield a Dockerfile's folder without the files that agents must not see."""
    if not image.hidden:
        yield image.folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-image-") as scratch:
        folder = Path(scratch, "files")
        hidden, top = image.hidden, image.folder
        shutil.copytree(
            top, folder, symlinks=True, ignore=lambda at, _: hidden if Path(at) == top else ()
        )
        yield folder
