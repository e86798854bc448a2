"""The arguments of `penstock deploy`; imports nothing heavy."""

import argparse
from pathlib import Path


def add_deploy(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    manifests = actions.add_parser("render", help="write plain YAML with a kustomization")
    text = "image of all pods; those of generators, ranks and machines have its name with -vllm, "
    text += "-ranks or -sandbox"
    manifests.add_argument("--image", required=True, metavar="NAME:TAG", help=text)
    manifests.add_argument("-o", "--output", type=Path, required=True, metavar="DIR",
                           help="folder of the manifests")  # fmt: skip
    manifests.add_argument("--run-id", default="run", help="id of the run (default: run)")
    text = "namespace of all objects (default: penstock)"
    manifests.add_argument("--namespace", default="penstock", help=text)
    text = "account of the NATS servers, from which KEDA reads the lag (default: $G)"
    manifests.add_argument("--nats-account", default="$G", metavar="NAME", help=text)
    size = actions.add_parser("size", help="print what the pods of a run need")
    size.add_argument("--json", action="store_true", help="the last line is one JSON object")
    text = "the launcher does not replay the run at its end, which takes the memory of a trainer"
    for action in (manifests, size):
        action.add_argument("--no-replay", action="store_true", help=text)
        action.add_argument("--config", type=Path, required=True, help="TOML file of a run")
        action.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                            dest="overrides", help="override one key")  # fmt: skip
