"""The arguments of `penstock tasks`; what they do is imported when it runs."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from penstock.infra.agent.arguments import add_agent, add_chat


def add_sandbox_commands(commands: Any) -> None:
    """Register the commands of tasks and of the agent harness."""
    _add_tasks(commands)
    add_agent(commands)
    add_chat(commands)


def _add_tasks(commands: Any) -> None:
    tasks = commands.add_parser(
        "tasks", help="make coding tasks from local code, check and count them"
    )
    tasks.set_defaults(command="tasks.actions:run")
    actions = tasks.add_subparsers(required=True, metavar="ACTION", dest="action")
    make = actions.add_parser("make", help="make tasks, and keep those that pass the gates")
    make.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="stdlib, a folder, the name of an installed package, or own code, module:name",
    )
    make.add_argument("-o", "--output", type=Path, required=True, help="a new or empty folder")
    make.add_argument(
        "-n", "--num", type=_count, default=300, help="number of tasks (default: %(default)s)"
    )
    make.add_argument(
        "--wall-s",
        type=_seconds,
        default=7200.0,
        help="seconds after which no further task is started (default: %(default)s)",
    )
    make.add_argument(
        "--seed", type=int, default=0, help="seed of all choices (default: %(default)s)"
    )
    make.add_argument(
        "--concurrent",
        type=_count,
        default=os.cpu_count() or 1,
        help="tasks checked at once (default: %(default)s)",
    )
    make.add_argument(
        "--commits", action="store_true", help="of folders: use the commits of their git history"
    )
    make.add_argument(
        "--split-by",
        choices=["function", "repository"],
        default="repository",
        help="unit that is never in both splits (default: %(default)s)",
    )
    make.add_argument(
        "--heldout",
        type=_share,
        default=0.2,
        metavar="SHARE",
        help="held-out share (default: %(default)s)",
    )
    make.add_argument("--json", action="store_true", help="the last line is one JSON object")
    _add_collections(actions)


def _add_collections(actions: Any) -> None:
    check = actions.add_parser("check", help="run the gates on a folder of Harbor tasks")
    check.add_argument("folder", type=Path, help="folder of Harbor tasks")
    stats = actions.add_parser(
        "stats", help="count the tasks of a folder and write its browsable page"
    )
    stats.add_argument("folder", type=Path, help="folder of Harbor tasks")
    survey = actions.add_parser(
        "import", help="say of each task of a collection whether it can be read, and why not"
    )
    survey.add_argument("folder", type=Path, help="folder of tasks, or a .jsonl or .parquet file")
    survey.add_argument(
        "-o", "--output", type=Path, help="folder for the readable tasks and import.json"
    )
    images = actions.add_parser(
        "images", help="build Dockerfiles and pull images that tasks need and that are not here"
    )
    images.add_argument("folder", type=Path, help="one task, or a collection as for import")
    images.add_argument(
        "--memory-mib",
        type=_count,
        default=3_072,
        help="memory of a building machine, its files included (default: %(default)s)",
    )
    images.add_argument(
        "--step-s",
        type=_seconds,
        default=600.0,
        help="seconds that a RUN may take (default: %(default)s)",
    )
    images.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="registry credentials (default: ~/.docker/config.json)",
    )
    get = actions.add_parser("get", help="get a data set of a Harbor registry as task folders")
    get.add_argument("dataset", metavar="NAME@VERSION", help="name and version of the data set")
    get.add_argument(
        "--registry",
        required=True,
        metavar="FOLDER|REPOSITORY",
        help="folder or git repository with the registry.json",
    )
    get.add_argument("-o", "--output", type=Path, required=True, help="folder for the tasks")
    check.add_argument(
        "--memory-mib",
        type=_count,
        default=_free_mib(),
        help="memory of all machines together (default: what is free, %(default)s)",
    )
    for action in (check, stats, survey, images):
        action.add_argument(
            "--offline", action="store_true", help="refuse tasks that ask for a network"
        )
        action.add_argument(
            "--internet",
            action="append",
            metavar="HOST:PORT",
            help="rule for tasks that ask for the internet, repeatable (default: package "
            "registries)",
        )
        action.add_argument(
            "--egress-addresses",
            action="store_true",
            help="accept addresses in egress rules, private ones included (name:port@address)",
        )
    for action in (check, stats, survey, images, get):
        action.add_argument("--json", action="store_true", help="the last line is one JSON object")


def _free_mib() -> int:
    """Return the memory that could be had now, in MiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(one.split()[1]) >> 10 for one in lines if one.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1024


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    if not 0.0 < (seconds := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


def _share(text: str) -> float:
    if not 0.0 <= (share := _number(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a share of 0 to 1, got {text!r}")
    return share


def _number(text: str) -> float:
    """Return a number; NaN, which is in no range, where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
