"""The command line. Each command is imported when it runs, so that `--help` is quick.

To add a command: a function of the parsed arguments that returns the exit code; its parser here.
"""

import argparse
import asyncio
import importlib
import inspect
import os
import sys
from pathlib import Path

from penstock.infra.commands.episode_arguments import add_label, add_show
from penstock.infra.commands.parsers import (
    Commands,
    add_command,
    add_host_file,
    add_init,
    add_run_name,
)
from penstock.infra.deploy.arguments import add_deploy
from penstock.infra.images import add_images
from penstock.infra.models.arguments import add_models
from penstock.infra.output import printable, write_to
from penstock.infra.sinks.arguments import add_sink
from penstock.infra.tasks.command import add_sandbox_commands
from penstock.infra.weights.command import add_actions
from penstock.messages.errors import PenstockError
from penstock.messages.generation import MOVED_CHANNELS


def main(argv: list[str] | None = None) -> int:
    """Run one command; a `PenstockError` becomes one clear line and exit code 2."""
    arguments = make_parser().parse_args(argv)
    module, _, name = arguments.command.partition(":")
    try:
        code = getattr(importlib.import_module(f"penstock.infra.{module}"), name)(arguments)
        return asyncio.run(code) if inspect.iscoroutine(code) else code
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PenstockError, OSError) as error:
        write_to(sys.stderr, f"penstock: {type(error).__name__}: {printable(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="penstock", description="Trains coding agents by reinforcement learning as they work."
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="folder of all runs (default: runs)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_serve(commands)
    _add_tinker(commands)
    actor = add_command(commands, "actor", "run.process:actor_command", "run actors of a run")
    actor.add_argument("roles", nargs="+", metavar="ROLE[:REGION]", help="actors of this process")
    actor.add_argument("--run", required=True, help="id or path of the run")
    add_host_file(actor)
    text = "where it notes what it works on, for the launcher that finds it dead"
    actor.add_argument("--in-progress", metavar="FILE", default="", help=text)
    text = "answer /healthz and /readyz on this port (default: 0, none)"
    actor.add_argument("--health-port", type=_port, metavar="N", default=0, help=text)
    _add_replay(commands)
    text = "show the state of a run, and what it waits for"
    status = "commands.status:status_command"
    add_host_file(add_command(commands, "status", status, text, of_run=True, has_json=True))
    text = "show the state of a run, updated every second"
    add_host_file(add_command(commands, "top", "commands.status:top_command", text, of_run=True))
    add_show(commands)
    add_label(commands)
    _add_channel(commands)
    _add_experiment(commands)
    _add_evals(commands)
    _add_log(commands)
    text = "check this machine: what is installed, what is missing, how to get it"
    add_command(commands, "doctor", "commands.doctor:doctor", text, has_json=True)
    text = "make and apply lossless deltas between checkpoint files"
    add_actions(add_command(commands, "weights", "weights.command:run", text))
    add_sandbox_commands(commands)
    _add_quarantine(commands)
    _add_mismatch(commands)
    text = "copy a run's metrics and traces to another program, live or afterwards"
    sink = add_command(commands, "sink", "sinks.command:sink_command", text)
    add_sink(sink)
    add_run_name(sink)
    add_host_file(sink)
    _add_export(commands)
    add_init(commands)
    _add_privacy(commands)
    _add_judge(commands)
    _add_backup(commands)
    text = "write manifests of a run for Kubernetes"
    add_deploy(add_command(commands, "deploy", "deploy.command:run", text))
    text = "build and list image layers of sandboxes"
    add_images(add_command(commands, "images", "images:run", text))
    text = "fetch a published model from a Python package"
    add_models(add_command(commands, "models", "models.command:run", text))
    return parser


def _add_run(commands: Commands) -> None:
    add_run_options(add_command(commands, "run", "run.command:run", "start a run, or resume one"))


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Declare the options of `penstock run`, for it and for programs that start runs as it does."""
    run.add_argument("--config", type=Path, help="TOML of a new run; with --resume: of this host")
    run.add_argument("--resume", metavar="RUN", help="id or path of the run to resume")
    run.add_argument("--processes", metavar="NAMES", help="those to start here (default: all)")
    run.add_argument("--seed", type=int, help="replaces the configuration's seed")
    run.add_argument("--run-id", help="id of the new run (default: time and seed)")
    run.add_argument("--or-resume", action="store_true", help="resume --run-id if it exists")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                     help="override one key, e.g. trainer.steps_max=10")  # fmt: skip
    run.add_argument("--images", action="store_true", help="build what machines boot meanwhile")
    run.add_argument("--after", type=int, metavar="PID", help="process that still installs torch")
    run.add_argument("--since", type=float, metavar="S", help="unix time that times count from")
    run.add_argument("--fresh", action="store_true", help="mid-train again, whatever is cached")
    run.add_argument("--no-replay", action="store_true", help="skip the replay at the end")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")
    return int(text)


def _add_replay(commands: Commands) -> None:
    text = "retrain every step from a run's log and compare every weight digest, or ask what if"
    replay = add_command(
        commands, "replay", "commands.replay:replay_command", text, of_run=True, has_json=True
    )
    text = "train with this instead, e.g. trainer.estimator=rloo or judge.length_penalty.scale=0"
    replay.add_argument("--what-if", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "of a what-if: new folder for report and weights (default: what-if/TIME of the run's)"
    replay.add_argument("-o", "--output", type=Path, metavar="FOLDER", help=text)
    text = "of a what-if: do not evaluate its weights on held-out tasks"
    replay.add_argument("--no-evaluation", action="store_true", help=text)
    text = "processes that retrain the run together, each with a part of the weights (1)"
    replay.add_argument("--ranks", type=int, default=1, metavar="N", help=text)
    replay.add_argument("--rank-log", default=None, help=argparse.SUPPRESS)
    add_host_file(replay)


def _add_serve(commands: Commands) -> None:
    text = "serve a run's policy, or a model's folder, to users, without end"
    serve = add_command(commands, "serve", "serve.command:serve", text)
    text = "id or path of a run (default: the newest), or a folder in Hugging Face's layout"
    serve.add_argument("target", nargs="?", default="latest", metavar="RUN|CHECKPOINT", help=text)
    text = "train on what users say: feedback join and trainer run as well"
    serve.add_argument("--learn", action="store_true", help=text)
    text = "serve each version to all users at once, before it passed the gates (serve.gated=false)"
    serve.add_argument("--ungated", action="store_true", help=text)
    text = "of a checkpoint: TOML file of the new run (default: infra/configs/serve.toml)"
    serve.add_argument("--config", type=Path, help=text)
    serve.add_argument("--run-id", help="of a checkpoint: id of the new run")
    serve.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                       help="override one key, e.g. serve.epoch_samples=64")  # fmt: skip


def _add_tinker(commands: Commands) -> None:
    text = "serve the API of the tinker SDK: adapters in training over one base"
    tinker = add_command(commands, "tinker", "tinker.command:tinker_command", text)
    text = "folder of a model in Hugging Face's layout, or id or path of an earlier server's run"
    tinker.add_argument("target", metavar="CHECKPOINT|RUN", help=text)
    text = "of a checkpoint: TOML file of the new run (default: infra/configs/tinker.toml)"
    tinker.add_argument("--config", type=Path, help=text)
    tinker.add_argument("--run-id", help="of a checkpoint: id of the new run")
    tinker.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key, e.g. gateway.port=8123")  # fmt: skip


def _add_channel(commands: Commands) -> None:
    text = "show or move a channel: which version its replicas serve"
    channel = add_command(commands, "channel", "commands.channel:channel_command", text)
    channel.add_argument("run", help="id or path of the run")
    channel.add_argument("channel", choices=MOVED_CHANNELS, help="the channel")
    text = "version that it points to from now on; until the first move it is the newest"
    channel.add_argument("--version", type=int, metavar="N", help=text)
    add_host_file(channel)


def _add_experiment(commands: Commands) -> None:
    text = "show the candidate, its gates, and what users' arms say of it"
    name = "commands.experiment:experiment_command"
    experiment = add_command(commands, "experiment", name, text, of_run=True, has_json=True)
    text = "difference in reward for which missing sessions are computed"
    experiment.add_argument("--effect", type=_effect, metavar="X", help=text)
    add_host_file(experiment)


def _effect(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text}")
    return value


def _add_evals(commands: Commands) -> None:
    text = "show pass@k of each evaluated version with intervals, and compare two task by task"
    command = "commands.evals:evals_command"
    evals = add_command(commands, "evals", command, text, of_run=True, has_json=True)
    text = "versions to compare (default: the first and the last of each set)"
    evals.add_argument("--versions", type=int, nargs=2, metavar="N", help=text)
    add_host_file(evals)


def _add_quarantine(commands: Commands) -> None:
    text = "show bursts of feedback that are held, or let one count"
    command = "commands.quarantine:quarantine_command"
    quarantine = add_command(commands, "quarantine", command, text, of_run=True, has_json=True)
    text = "name of the quarantine whose feedback counts from now on"
    quarantine.add_argument("--release", metavar="NAME", help=text)
    add_host_file(quarantine)


def _add_mismatch(commands: Commands) -> None:
    text = "measure how the trainer's logprobs differ from the sampler's, by remedy"
    name = "mismatch.command:mismatch_command"
    mismatch = add_command(commands, "mismatch", name, text, of_run=True)
    text = "tokens to sample, approximately (default: 10000)"
    mismatch.add_argument("--tokens", type=int, default=10_000, help=text)
    text = "the last lines are JSON objects: everything, then four figures per mode"
    mismatch.add_argument("--json", action="store_true", help=text)


def _add_log(commands: Commands) -> None:
    log = add_command(
        commands, "log", "commands.log:run", "export, import, print or clean up event logs"
    )
    actions = log.add_subparsers(required=True, dest="action", metavar="ACTION")
    export = actions.add_parser("export", help="write a run's log and objects to one file")
    add_run_name(export)
    add_host_file(export)
    export.add_argument("-o", "--output", type=Path, required=True, help="the file")
    text = "also write users' content keys: without them a replay skips steps with users' samples"
    export.add_argument("--with-keys", action="store_true", help=text)
    load = actions.add_parser("import", help="create a run from an exported file")
    load.add_argument("file", type=Path, help="the file")
    cat = actions.add_parser("cat", help="print one JSON line per event")
    add_run_name(cat)
    add_host_file(cat)
    unnamed = actions.add_parser("collect", help="delete objects that no event names any more")
    add_run_name(unnamed)
    add_host_file(unnamed)
    text = "seconds for which an unnamed object is kept (default: 3600; 0 for a run that is down)"
    unnamed.add_argument("--grace-s", type=float, metavar="S", help=text)
    cat.add_argument("--type", action="append", default=[], help="print only events of this type")


def _add_export(commands: Commands) -> None:
    text = "write a version of a run's policy as a folder for transformers and vLLM, or its traces"
    out = add_command(commands, "export", "export.command:export", text, of_run=True, has_json=True)
    out.add_argument("--version", type=int, metavar="N", help="policy version (default: newest)")
    text = (
        "hf: a folder, adapters merged (default); peft: the adapter alone; solved rollouts as JSON "
        "lines (traces) or trajectories (atif)"
    )
    formats = ("hf", "peft", "traces", "atif", "preferences")
    out.add_argument("--format", choices=formats, default="hf", help=text)
    text = "the folder, or the file"
    out.add_argument("-o", "--output", type=Path, required=True, metavar="PATH", help=text)
    add_host_file(out)


def _add_backup(commands: Commands) -> None:
    text = "copy a run, also one that is up, into a folder"
    backup = add_command(commands, "backup", "backup.command:backup_command", text, of_run=True)
    backup.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="new")
    add_host_file(backup)
    text = "make the run of a backup again"
    restore = add_command(commands, "restore", "backup.command:restore_command", text)
    restore.add_argument("folder", type=Path, metavar="FOLDER", help="the backup")
    text = "move the log of a run that is down to other servers"
    move = add_command(commands, "move", "backup.command:move_command", text, of_run=True)
    text = "TOML file with their table [bus]"
    move.add_argument("--to-servers", type=Path, required=True, metavar="FILE", help=text)


def _add_privacy(commands: Commands) -> None:
    text = "show what trained a version, or which versions contain a user, request or feedback"
    lineage = add_command(
        commands, "lineage", "privacy.command:lineage_command", text, has_json=True
    )
    text = "number of a version, pseudonym of a user, id of a request, id or key of feedback"
    lineage.add_argument("what", help=text)
    add_run_name(lineage)
    lineage.add_argument("--tenant", default="", help="only of this tenant")
    add_host_file(lineage)
    text = "erase a user's content for good; the log stays, but cannot be read there any more"
    erase = add_command(
        commands, "erase", "privacy.command:erase_command", text, of_run=True, has_json=True
    )
    text = "the user, as requests name them or by pseudonym; k-<key id>: who named nobody"
    erase.add_argument("--user", required=True, help=text)
    erase.add_argument("--tenant", default="", help="whose user it is")
    text = "write the newest version as a model folder, trained again without anyone erased so far"
    erase.add_argument("--retrain", type=Path, metavar="FOLDER", help=text)
    add_host_file(erase)


def _add_judge(commands: Commands) -> None:
    text = "measure a configuration's rubric judges: attacks, agreement with people, cheats found"
    judge = add_command(commands, "judge", "judge.command:judge_command", text)
    actions = judge.add_subparsers(required=True, dest="action", metavar="ACTION")
    attack = actions.add_parser("attack", help="wrong work that speaks to the judge")
    text = "share of attacks that may succeed before the exit code is 1 (default: 0)"
    attack.add_argument("--max-rate", type=float, default=0.0, metavar="X", help=text)
    calibrate = actions.add_parser("calibrate", help="compare with labels of people")
    sources = calibrate.add_mutually_exclusive_group(required=True)
    sources.add_argument("--labels", type=Path, metavar="FILE", help="labels, a line of JSON each")
    text = "run whose users' labels are taken; their texts go to the judge's endpoint"
    sources.add_argument("--run", metavar="RUN", help=text)
    text = "with --run: the criterion that its labels are of"
    calibrate.add_argument("--criterion", default="", metavar="NAME", help=text)
    text = "file for judge.judges.calibration"
    calibrate.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    audit = actions.add_parser("audit", help="look for cheats in groups, attempts side by side")
    sources = audit.add_mutually_exclusive_group(required=True)
    text = "run whose groups are audited; their texts go to the judge's endpoint"
    sources.add_argument("--run", metavar="RUN", help=text)
    text = "planted cheats: how many the judge finds alone, and beside honest attempts"
    sources.add_argument("--planted", action="store_true", help=text)
    text = "with --run: how many of the newest groups (default: 32)"
    audit.add_argument("--groups", type=int, default=32, metavar="N", help=text)
    for action in (attack, calibrate, audit):
        action.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of a run")
        text = "only this one of judge.judges"
        action.add_argument("--judge", default="", metavar="NAME", help=text)
        action.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                            dest="overrides", help="override one key")  # fmt: skip
        text = "the last line is one JSON object"
        action.add_argument("--json", action="store_true", help=text)


if __name__ == "__main__":
    sys.exit(main())
