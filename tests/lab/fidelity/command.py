"""`python -m tests.lab fidelity probe|diff|fingerprints`: how a machine differs from production."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
from tests.lab.fidelity.compare import (
    ALLOWED_FILE,
    Values,
    compare,
    find_fingerprints,
    read_allowed,
    read_probe,
    run_probe,
)

from penstock.actors.runtime.files import write_atomic
from penstock.envs.backends import open_backend
from penstock.infra.output import print_result, write_to

BOOT_S_MAX = 60.0
VALUE_CHARACTERS_MAX = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    probe = actions.add_parser("probe", help="run the probe in a machine and write its findings")
    probe.add_argument("--backend", default="uml", help="sandbox backend (default: %(default)s)")
    probe.add_argument("-o", "--output", type=Path, required=True, help="the JSON file")
    diff = actions.add_parser("diff", help="compare two probes; exit 1 on unexplained differences")
    diff.add_argument("a", type=Path, help="a probe's file")
    diff.add_argument("b", type=Path, help="another one's")
    diff.add_argument(
        "--allow", type=Path, help="allow-list of differences (default: the reviewed one)"
    )
    fingerprints = actions.add_parser(
        "fingerprints", help="list what a model could notice in one machine"
    )
    fingerprints.add_argument("probe", type=Path, help="a probe's file")
    for action in (probe, diff, fingerprints):
        action.add_argument("--json", action="store_true", help="the last line is one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run one action; `diff` exits with 1 if a difference is unexplained."""
    if arguments.action == "probe":
        return _probe(arguments)
    if arguments.action == "diff":
        return _diff(arguments)
    found = find_fingerprints(read_probe(arguments.probe))
    print_result({"num_fingerprints": len(found), "fingerprints": found}, as_json=arguments.json)
    return 0


def _probe(arguments: argparse.Namespace) -> int:
    values = asyncio.run(probe_backend(arguments.backend))
    output: Path = arguments.output
    write_atomic(output, msgspec.json.format(msgspec.json.encode(values), indent=1))
    print_result({"backend": arguments.backend, "num_checks": len(values)}, as_json=arguments.json)
    return 0


async def probe_backend(name: str) -> Values:
    """Boot one machine of a backend and probe it.

    Raises:
        BackendUnavailable: The backend does not exist here.
        ProbeError: The probe did not run.

    """
    machine = await open_backend(name, allow_process=True).start(timeout_s=BOOT_S_MAX)
    try:
        return await run_probe(machine, *(["--anywhere"] if name == "process" else []))
    finally:
        await machine.close()


def _diff(arguments: argparse.Namespace) -> int:
    a, b = read_probe(arguments.a), read_probe(arguments.b)
    found = compare(a, b, read_allowed(arguments.allow or ALLOWED_FILE))
    unexplained = [one for one in found if not one.reason]
    if not arguments.json:
        for one in found:
            mark = f"allowed: {one.reason}" if one.reason else "UNEXPLAINED"
            write_to(sys.stdout, f"{one.check}: {_short(one.a)} | {_short(one.b)} ({mark})\n")
    result = {
        "num_checks": len(a.keys() | b.keys()),
        "num_different": len(found),
        "num_unexplained": len(unexplained),
        "unexplained": [one.check for one in unexplained],
    }
    print_result(result, as_json=arguments.json)
    return 1 if unexplained else 0


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[:VALUE_CHARACTERS_MAX] + "..."
