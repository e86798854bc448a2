"""`penstock images build|ls|gc`: what machines hold above the base image."""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import load_assets, vm_cache_dir
from penstock.envs.microvm.images.layers import layer_folder, list_layers, remove_unnamed
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.microvm.recipe.steps import build_lock


def add_images(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    build = actions.add_parser("build", help="build a layer, if its inputs changed")
    build.add_argument("name")
    build.add_argument("--package", action="append", default=[], metavar="DEB")
    build.add_argument("--pip", action="append", default=[], metavar="REQUIREMENT")
    build.add_argument("--folder", type=Path, help="its content goes to --target")
    build.add_argument("--target", default="/work")
    for name, text in (("ls", "the base image and all layers"), ("gc", "remove unnamed files")):
        actions.add_parser(name, help=text)
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Run one action."""
    actions = {"build": _build, "ls": _ls, "gc": _gc}
    found, lines = actions[arguments.action](arguments)
    for line in lines:
        sys.stdout.write(line + "\n")
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


def _build(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    began_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[image {time.monotonic() - began_s:4.0f} s] {line}\n")

    sources = LayerSources(
        packages=arguments.package,
        requirements=arguments.pip,
        folder=arguments.folder,
        target=arguments.target,
    )
    layer = build_layer(arguments.name, sources, vm_cache_dir(), say)
    return layer, [f"{layer.name}  {layer.digest[:16]}  {layer.num_bytes / 1e6:.1f} MB"]


def _ls(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    _, base = load_assets()
    layers = list_layers()
    lines = [f"base  {base.image_digest[:16]}"]
    for layer in layers:
        made_of = ", ".join((*layer.packages, *layer.requirements, *filter(None, [layer.folder])))
        size = f"{layer.num_bytes / 1e6:.1f} MB"
        lines.append(f"{layer.name}  {layer.digest[:16]}  {size}  {made_of}")
    return {"base": base.image_digest, "layers": layers}, lines


def _tell(line: str) -> None:
    sys.stderr.write(f"[image] {line}\n")


def _gc(arguments: argparse.Namespace) -> tuple[object, list[str]]:
    folder = layer_folder()
    with build_lock(folder, _tell):
        removed = remove_unnamed()
    words = f"{len(removed)} files removed from {folder}"
    return {"removed": [path.name for path in removed]}, [words]
