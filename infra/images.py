"""`penstock images base|pull|build|ls|gc`: what machines boot, and layers above it.

`base` is idempotent and safe to run twice at once; only what changed is built. It takes two to
three minutes on two cores the first time, mostly the kernel's compilation; with `--at-once`, where
none was compiled yet, half a minute: machines then boot Debian's own kernel. With `--qemu` also
what QEMU boots, Debian's cloud kernel (a download of 27 MB), and QEMU itself (24 MB of source, five
more minutes).
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

from penstock.envs.microvm.images.assets import is_build_running, load_assets, vm_cache_dir
from penstock.envs.microvm.images.layers import (
    ImageLayer,
    layer_folder,
    list_layers,
    remove_unnamed,
)
from penstock.envs.microvm.oci.build import MEMORY_MIB, STEP_S, BuildOptions, build_dockerfile
from penstock.envs.microvm.oci.prepare import default_name, pull_image
from penstock.envs.microvm.recipe.assets import build_assets
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.microvm.recipe.qemu import build_qemu_assets
from penstock.envs.microvm.recipe.steps import build_lock
from penstock.infra.orphans import die_with_parent
from penstock.infra.output import print_result, write_to
from penstock.messages.errors import DeadlineError

BEGIN_S_MAX = 60.0
END_S_MAX = 10.0
_POLL_S = 0.05


def add_images(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    base = actions.add_parser("base", help="build kernel, base image and guest agent")
    base.add_argument("--qemu", action="store_true", help="also build QEMU and its kernel")
    base.add_argument("--at-once", action="store_true",
                      help="take Debian's own kernel where none was compiled yet")  # fmt: skip
    pull = actions.add_parser("pull", help="take a container image, without a daemon")
    pull.add_argument(
        "source",
        metavar="REF|ARCHIVE|FOLDER",
        help="a reference, a docker save or OCI archive, an OCI or skopeo folder",
    )
    pull.add_argument("-o", "--name", default="", help="its name (default: the reference)")
    pull.add_argument("--credentials", type=Path, metavar="FILE",
                      help="registry credentials (default: ~/.docker/config.json)")  # fmt: skip
    build = actions.add_parser("build", help="build a Dockerfile's image, or a layer")
    build.add_argument(
        "name",
        metavar="FOLDER|NAME",
        help="a folder with a Dockerfile; or the name of a layer to build",
    )
    build.add_argument(
        "-o", "--output", default="", metavar="NAME", help="the name of the image of a Dockerfile"
    )
    build.add_argument("-f", "--dockerfile", default="Dockerfile", help="its path in the folder")
    build.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value for ARG; may be repeated",
    )
    build.add_argument("--stage", default="", help="the stage to build (default: the last)")
    build.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="what RUN may reach; may be repeated (default: nothing)",
    )
    build.add_argument("--step-s", type=float, default=STEP_S, help="seconds that a RUN may take")
    build.add_argument(
        "--memory-mib",
        type=int,
        default=MEMORY_MIB,
        help="memory of the building machine, its files included",
    )
    build.add_argument("--offline", action="store_true", help="pull no image, allow no host")
    build.add_argument("--credentials", type=Path, metavar="FILE", help="as for pull")  # fmt: skip
    build.add_argument("--package", action="append", default=[], metavar="DEB",
                       help="a Debian package; may be repeated")  # fmt: skip
    build.add_argument("--pip", action="append", default=[], metavar="REQUIREMENT",
                       help="a Python package; may be repeated")  # fmt: skip
    build.add_argument("--folder", type=Path, help="a folder whose content is copied to --target")
    build.add_argument("--target", default="/work", help="folder in the machine (default: /work)")
    actions.add_parser("ls", help="list the base image and all layers")
    actions.add_parser("gc", help="remove image files that no layer names")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="the last line is one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run one action."""
    actions = {"base": _base, "pull": _pull, "build": _build, "ls": _ls, "gc": _gc}
    found, lines = actions[arguments.action](arguments)
    for line in lines:
        write_to(sys.stdout, line + "\n")
    if arguments.json:
        print_result(found, as_json=True)
    return 0


@contextlib.contextmanager
def images_beside() -> Generator[None]:
    """Run `penstock images base --at-once` meanwhile.

    It is entered once that holds the build lock, or has ended.

    Its output goes where ours goes. A sandbox host waits as long as the lock is held; if the build
    fails, the host refuses to start and says what is missing.

    Raises:
        DeadlineError: It did not begin.

    """
    command = [sys.executable, "-m", "penstock.infra.cli", "images", "base", "--at-once"]
    with subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no other thread runs yet
    ) as build:
        try:
            begun_by = time.monotonic() + BEGIN_S_MAX
            while build.poll() is None and not is_build_running():
                if time.monotonic() > begun_by:
                    raise DeadlineError(f"penstock images base: not begun in {BEGIN_S_MAX:g} s")
                time.sleep(_POLL_S)
            yield
        finally:
            build.terminate()
            try:
                build.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                build.kill()


def _base(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    folder, say = vm_cache_dir(), progress()
    assets = build_assets(folder, say, at_once=arguments.at_once)
    if arguments.qemu:
        build_qemu_assets(folder, say)
    kernel, image = assets.kernel_version, assets.image_digest
    whose = ", Debian's own (`make setup` compiles a faster one)" if assets.is_debian else ""
    lines = [f"ready in {folder}: kernel {kernel}{whose}, image {image[:16]}"]
    return {"kernel": kernel, "base": image}, lines


def progress() -> Callable[[str], None]:
    """Return what prints a line of progress, with the time since now."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        write_to(sys.stderr, f"[image {time.monotonic() - began_s:4.0f} s] {line}\n")

    return say


def _pull(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    options = BuildOptions(credentials=arguments.credentials)
    path = Path(arguments.source)
    source = path if path.exists() else arguments.source
    image = asyncio.run(pull_image(source, name=arguments.name, options=options, say=progress()))
    return image, [_described(image)]


def _described(layer: ImageLayer) -> str:
    return f"{layer.name}  {layer.digest[:16]}  {layer.num_bytes / 1e6:.1f} MB"


def _build_dockerfile(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    folder = Path(arguments.name)
    options = BuildOptions(
        dockerfile=arguments.dockerfile,
        arguments={k: v for k, _, v in (one.partition("=") for one in arguments.build_arg)},
        stage=arguments.stage,
        egress=arguments.allow_host,
        step_s=arguments.step_s,
        memory_mib=arguments.memory_mib,
        offline=arguments.offline,
        credentials=arguments.credentials,
    )
    name = arguments.output or default_name(folder)
    image = asyncio.run(build_dockerfile(folder, name, options, progress()))
    return image, [_described(image)]


def _build(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    if Path(arguments.name).is_dir() and not (
        arguments.package or arguments.pip or arguments.folder
    ):
        return _build_dockerfile(arguments)
    sources = LayerSources(
        packages=arguments.package,
        requirements=arguments.pip,
        folder=arguments.folder,
        target=arguments.target,
    )
    layer = build_layer(arguments.name, sources, vm_cache_dir(), progress())
    return layer, [_described(layer)]


def _ls(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    _, base = load_assets()
    layers = list_layers()
    lines = [f"base  {base.image_digest[:16]}"]
    for layer in layers:
        made_of = ", ".join((*layer.packages, *layer.requirements, *filter(None, [layer.folder])))
        size = f"{layer.num_bytes / 1e6:.1f} MB"
        lines.append(f"{layer.name}  {layer.digest[:16]}  {size}  {made_of}")
    return {"base": base.image_digest, "layers": layers}, lines


def _gc(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    folder = layer_folder()
    with build_lock(folder, progress()):
        removed = remove_unnamed()
    words = f"{len(removed)} files removed from {folder}"
    return {"removed": [path.name for path in removed]}, [words]
