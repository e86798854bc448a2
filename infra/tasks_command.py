"""The arguments of `penstock tasks`; what they do is imported when it runs."""

import argparse
import os
from pathlib import Path
from typing import Any


def add_sandbox_commands(commands: Any) -> None:
    """Register the commands of tasks and of the agent harness."""
    _add_tasks(commands)


def _add_tasks(commands: Any) -> None:
    tasks = commands.add_parser("tasks", help="make coding tasks from local repositories")
    tasks.set_defaults(command=_tasks)
    actions = tasks.add_subparsers(required=True, metavar="ACTION", dest="action")
    make = actions.add_parser("make", help="make tasks, gate them in machines, write them")
    make.add_argument("sources", nargs="+", metavar="SOURCE",
                      help="stdlib, ladder, a folder, or an installed package")  # fmt: skip
    make.add_argument("-o", "--output", type=Path, required=True, help="a new or empty folder")
    make.add_argument("-n", "--num", type=int, default=300, help="stop after so many tasks")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--concurrent", type=int, default=os.cpu_count() or 1)
    make.add_argument("--commits", action="store_true", help="folders: from the git history")
    make.add_argument("--split-by", choices=["function", "repository"], default="repository")
    make.add_argument("--heldout", type=float, default=0.2, metavar="SHARE")
    check = actions.add_parser("check", help="pass Harbor tasks through the gates")
    check.add_argument("folder", type=Path)
    stats = actions.add_parser("stats", help="count Harbor tasks; write their page")
    stats.add_argument("folder", type=Path)
    for action in (make, check, stats):
        action.add_argument("--json", action="store_true", help="the last line is one JSON object")


def _tasks(arguments: argparse.Namespace) -> int:
    from penstock.infra.tasks import run

    return run(arguments)
