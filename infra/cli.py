"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.infra.commands.images_command import add_images
from penstock.infra.simulate.arguments import add_simulation
from penstock.infra.tasks.command import add_sandbox_commands
from penstock.infra.weights.command import add_actions
from penstock.messages.errors import ConfigError, PenstockError

Command = Callable[[argparse.Namespace], int]
Commands = Any
"""What `add_subparsers` returns: argparse keeps the class to itself."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; a `PenstockError` becomes one clear line and exit code 2."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"penstock: {type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from penstock.infra.run.command import run

    return run(arguments)


def _actor(arguments: argparse.Namespace) -> int:
    from penstock.infra.run import process
    from penstock.infra.run.config_file import load_config
    from penstock.infra.run.runs import find_run

    run = find_run(arguments.run, arguments.runs_dir)
    config = load_config(run.config)
    state = run.read_state()
    url = arguments.nats or config.bus.url or (state.place(arguments.roles).url if state else "")
    if not url:
        raise PenstockError(f"run {run.run_id} is not up; name its server with --nats URL")
    return process.main(run, config, arguments.roles, url)


def _replay(arguments: argparse.Namespace) -> int:
    from penstock.infra.run.replay import replay_command

    return asyncio.run(replay_command(arguments.run, arguments.runs_dir, as_json=arguments.json))


def _log(arguments: argparse.Namespace) -> int:
    from penstock.infra.commands import log_command

    return asyncio.run(log_command.run(arguments))


def _status(arguments: argparse.Namespace) -> int:
    from penstock.infra.commands.status import status_command

    return asyncio.run(status_command(arguments.run, arguments.runs_dir, as_json=arguments.json))


def _top(arguments: argparse.Namespace) -> int:
    from penstock.infra.commands.status import top_command

    return asyncio.run(top_command(arguments.run, arguments.runs_dir))


def _doctor(arguments: argparse.Namespace) -> int:
    from penstock.infra.commands.doctor import doctor

    return asyncio.run(doctor(as_json=arguments.json))


def _weights(arguments: argparse.Namespace) -> int:
    from penstock.infra.weights.command import run

    return run(arguments)


def _images(arguments: argparse.Namespace) -> int:
    from penstock.infra.commands.images_command import run

    return run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from penstock.infra.bench.command import bench

    given = [path for path in (arguments.base, arguments.next) if path is not None]
    if given and (arguments.what != "weights" or len(given) != 2):
        raise ConfigError("bench: --base and --next go together, and only with weights")
    if arguments.run is not None:
        if arguments.what != "search":
            raise ConfigError("bench: --run goes with search alone")
        given.append(arguments.run)
    return bench(arguments.what, *given, as_json=arguments.json)


def _simulate(arguments: argparse.Namespace) -> int:
    if arguments.what == "sandboxes":
        from penstock.infra.simulate.sandboxes.command import run as run_fleet

        return run_fleet(arguments)
    from penstock.infra.simulate.weights.command import run

    return run(arguments)


def _mismatch(arguments: argparse.Namespace) -> int:
    from penstock.infra.mismatch.command import mismatch_command

    return mismatch_command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock", description="Trains coding agents by reinforcement learning as they work."
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs live")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    actor = _add(commands, "actor", _actor, "run one or several actors of a run in this process")
    actor.add_argument("roles", nargs="+", metavar="ROLE[:REGION]")
    actor.add_argument("--run", required=True, help="run id or path")
    actor.add_argument("--nats", help="server address; default: the run's own")
    for name, command, help_text in (
        ("replay", _replay, "retrain every step from the log and compare every weight digest"),
        ("status", _status, "what a run has done, what it does, and why it is stalled"),
    ):
        add = _add(commands, name, command, help_text)
        add.add_argument("run", nargs="?", default="latest")
        add.add_argument("--json", action="store_true")
    top = _add(commands, "top", _top, "the status, live")
    top.add_argument("run", nargs="?", default="latest")
    _add_log(commands)
    doctor = _add(commands, "doctor", _doctor, "what is there, what is missing, how to get it")
    doctor.add_argument("--json", action="store_true")
    add_actions(_add(commands, "weights", _weights, "lossless deltas between checkpoint files"))
    add_sandbox_commands(commands)
    _add_mismatch(commands)
    bench = _add(commands, "bench", _bench, "measure, as ratios in one run")
    benches = ["engine", "bus", "weights", "sandbox", "search", "kernels", "recording"]
    bench.add_argument("what", choices=benches)
    bench.add_argument("--base", type=Path, help="weights: a checkpoint, instead of training one")
    bench.add_argument("--next", type=Path, help="weights: the checkpoint after it")
    bench.add_argument("--run", type=Path, help="search: the run whose policy embeds")
    bench.add_argument("--json", action="store_true", help="the last line is one JSON object")
    add_images(_add(commands, "images", _images, "layers above the base image of machines"))
    add_simulation(_add(commands, "simulate", _simulate, "a system too large for one machine"))
    return parser


def _add_run(commands: Commands) -> None:
    run = _add(commands, "run", _run, "a real run, end to end")
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="TOML file of a new run")
    source.add_argument("--resume", metavar="RUN", help="go on with a run where it stopped")
    run.add_argument("--seed", type=int, help="instead of the configuration's")
    run.add_argument("--run-id", help="default: time and seed")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                     help="override one key, e.g. trainer.steps_max=10")  # fmt: skip
    run.add_argument("--no-replay", action="store_true", help="leave out the closing replay")


def _add_mismatch(commands: Commands) -> None:
    text = "how far the trainer's logprobs are from the sampler's, by remedy"
    mismatch = _add(commands, "mismatch", _mismatch, text)
    mismatch.add_argument("run", nargs="?", default="latest")
    mismatch.add_argument("--config", type=Path, help="fresh weights instead of a run's")
    mismatch.add_argument("--tokens", type=int, default=10_000, help="to sample, about")
    help_text = "also train the run's corpus for so many tokens in each format of the experts"
    mismatch.add_argument("--format-tokens", type=int, default=0, help=help_text)
    json_help = "the last line: four figures a mode; the line before: everything"
    mismatch.add_argument("--json", action="store_true", help=json_help)


def _add_log(commands: Commands) -> None:
    log = _add(commands, "log", _log, "export, import or print a run's event log")
    actions = log.add_subparsers(required=True, dest="action")
    export = actions.add_parser("export", help="write the log and its objects to one file")
    export.add_argument("run", nargs="?", default="latest")
    export.add_argument("-o", "--output", type=Path, required=True)
    load = actions.add_parser("import", help="make a run of a file")
    load.add_argument("file", type=Path)
    cat = actions.add_parser("cat", help="print one JSON line an event")
    cat.add_argument("run", nargs="?", default="latest")
    cat.add_argument("--type", action="append", default=[], help="only events of this type")


def _add(commands: Commands, name: str,
         command: Command, help_text: str) -> argparse.ArgumentParser:  # fmt: skip
    parser = commands.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
    parser.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
