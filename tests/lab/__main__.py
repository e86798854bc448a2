"""The entry of the laboratory: `python -m tests.lab NAME ...`; without a name, the list."""

import argparse
import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock.infra.output import print_result, printable
from penstock.messages.errors import PenstockError


class Program(NamedTuple):
    """One program of the laboratory."""

    module: str
    """Below `tests.lab`."""
    text: str
    has_json: bool = True
    """Whether it takes `--json`."""


PROGRAMS = {
    "age": Program("age.command", "how long a service of any age takes to catch up, and its size"),
    "bus": Program("bench.bus", "rates and latencies of events and objects over nats-server"),
    "engine": Program("bench.engine", "generation and training against transformers, and vLLM"),
    "fidelity": Program(
        "fidelity.command", "compare machines by a probe that runs in them", has_json=False
    ),
    "kernels": Program("bench.kernels", "each CUDA kernel against its roofline and against torch"),
    "learning": Program("bench.learning.command", "what training gains, over whole runs (hours)"),
    "mismatch": Program("mismatch.command", "trainer against sampler: fresh weights, formats"),
    "ranks": Program("bench.ranks", "whether several trainer processes train to the bits of one"),
    "real-size": Program(
        "bench.real_size", "training and decoding against transformers and vLLM, on a GPU or tiny"
    ),
    "recording": Program("bench.recording", "what recording routes costs a decoding step"),
    "regions": Program(
        "regions.command", "a run whose regions are behind emulated links", has_json=False
    ),
    "sandbox": Program("bench.sandbox", "start, calls and agent steps of each sandbox backend"),
    "scale": Program("bench.scale", "bytes of the log, and prefix reuse over several replicas"),
    "search": Program("bench.search", "code search: docstring in, function out"),
    "simulate-sandboxes": Program(
        "simulate.sandboxes.command", "a burst of sandboxes over many hosts"
    ),
    "simulate-users": Program(
        "simulate.users.command", "users who rate replies, and a service that learns from them"
    ),
    "simulate-weights": Program(
        "simulate.weights.command", "weight versions to replicas in many regions, on virtual time"
    ),
    "weights": Program("bench.codecs.command", "the delta codecs and their public peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one program; a `PenstockError` becomes one clear line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description="Programs that measure or simulate Penstock."
    )
    text = "folder of all runs (default: runs)"
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help=text)
    text = "the program, then its options (default: list all programs)"
    parser.add_argument("name", nargs="?", choices=PROGRAMS, metavar="NAME", help=text)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.name is None:
        sys.stdout.write("".join(f"{name:20}{each.text}\n" for name, each in PROGRAMS.items()))
        return 0
    try:
        module = load_program(chosen.name)
        arguments = make_parser(chosen.name, module).parse_args(chosen.rest)
        arguments.runs_dir = chosen.runs_dir
        return _run(module, arguments)
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"lab: {type(error).__name__}: {printable(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def load_program(name: str) -> ModuleType:
    """Import a program's module."""
    return importlib.import_module(f"tests.lab.{PROGRAMS[name].module}")


def make_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a program's own options."""
    text = PROGRAMS[name].text
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.lab {name}", description=f"{text[0].upper()}{text[1:]}."
    )
    if PROGRAMS[name].has_json:
        parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    if add_arguments := getattr(module, "add_arguments", None):
        add_arguments(parser)
    return parser


def _run(module: ModuleType, arguments: argparse.Namespace) -> int:
    result: Any = module.run(arguments)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, int):
        return result
    print_result(result, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
