"""The command line of `penstock weights`; heavy modules are imported when a command runs."""

import argparse
import os
import resource
from pathlib import Path
from typing import Any

Subparsers = Any
"""The result of `add_subparsers`, whose class is private to argparse."""
_THREADS_MAX = 256


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `penstock weights` to its parser."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    diff = _add(actions, "diff", "write the delta between two checkpoints")
    diff.add_argument("base", type=Path, metavar="BASE", help="safetensors file, or a folder")
    diff.add_argument("next", type=Path, metavar="NEXT", help="safetensors file, or a folder")
    _add_output(diff, "DELTA", "the delta file")
    apply = _add(actions, "apply", "apply a delta to its base and write the result")
    apply.add_argument("base", type=Path, metavar="BASE")
    apply.add_argument("delta", type=Path, metavar="DELTA")
    _add_output(apply, "OUT", "a file, or a new folder")
    merge = _add(actions, "merge", "merge consecutive deltas into one")
    merge.add_argument("base", type=Path, metavar="BASE", help="base of the first delta")
    merge.add_argument("deltas", type=Path, metavar="DELTA", nargs="+")
    _add_output(merge, "DELTA", "the delta file")
    verify = _add(actions, "verify", "report whether a checkpoint is a delta's base or its target")
    verify.add_argument("checkpoint", type=Path, metavar="BASE|OUT")
    verify.add_argument("delta", type=Path, metavar="DELTA")
    inspect = _add(actions, "inspect", "summarize the changes of a delta")
    inspect.add_argument("delta", type=Path, metavar="DELTA")
    inspect.add_argument(
        "--base", type=Path, help="the delta's base; adds shares per exponent and expert"
    )
    inspect.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw the summary")
    inspect.add_argument("--all", action="store_true", help="list every tensor")


def _add(actions: Subparsers, name: str, help_text: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument(
        "--threads", type=_count, default=os.cpu_count() or 1, help="default: one per CPU"
    )
    return parser


def _add_output(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    parser.add_argument("-o", "--output", type=Path, required=True, metavar=name, help=help_text)


def _count(text: str) -> int:
    if text not in map(str, range(1, _THREADS_MAX + 1)):
        raise argparse.ArgumentTypeError(f"expected 1 to {_THREADS_MAX}, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run one action; return the exit code."""
    from penstock.infra.weights import actions

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # All files of a checkpoint stay open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return actions.ACTIONS[arguments.action](arguments)
