"""`penstock judge attack|calibrate|audit CONFIG`: measures a configuration's rubric judges."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.actors.judge.rubric.config import RubricConfig
from penstock.actors.runtime.files import write_atomic
from penstock.infra.config.file import load_config
from penstock.infra.judge.asking import JudgeSilentError, open_judge
from penstock.infra.judge.attack import attack_judge
from penstock.infra.judge.audit import audit_planted, open_auditor, read_groups, report, write_audit
from penstock.infra.judge.calibrate import HumanLabel, calibrate, logged_labels, read_labels
from penstock.infra.output import print_result
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError

FOOLED = 1
"""Exit code if more attacks succeeded than allowed, or a judge is blind to right work."""


async def judge_command(arguments: argparse.Namespace) -> int:
    """Run one of the actions."""
    judges = chosen(arguments)
    if arguments.action == "attack":
        return await _attack(judges, arguments)
    if len(judges) != 1:
        names = ", ".join(one.name for one in judges)
        raise ConfigError(f"--judge: expected one of {names}: {arguments.action} needs one judge")
    if arguments.action == "audit":
        return await _audit(judges[0], arguments)
    return await _calibrate(judges[0], arguments)


def chosen(arguments: argparse.Namespace) -> list[RubricConfig]:
    """Return the selected judges of a configuration.

    Raises:
        ConfigError: No judge has that name, or a judge has no endpoint.

    """
    judges = load_config(arguments.config, arguments.overrides).judge.judges
    named = [one for one in judges if arguments.judge in {"", one.name}]
    if not named:
        names = ", ".join(one.name for one in judges) or "none"
        raise ConfigError(f"--judge: expected one of judge.judges ({names})")
    for one in named:
        if one.endpoint is None:
            text = "expected an endpoint; the gateway of a run is one"
            raise ConfigError(f"judge.judges.{one.name}: {text}")
    return named


async def _attack(judges: Sequence[RubricConfig], arguments: argparse.Namespace) -> int:
    reports = [one for config in judges for one in await attack_judge(open_judge(config))]
    print_result(msgspec.to_builtins(reports), as_json=arguments.json)
    is_fooled = any(one.is_blind or one.rate.value > arguments.max_rate for one in reports)
    return FOOLED if is_fooled else 0


async def _audit(config: RubricConfig, arguments: argparse.Namespace) -> int:
    auditor = open_auditor(config)
    if arguments.planted:
        planted = await audit_planted(config, auditor)
        print_result(msgspec.to_builtins(planted), as_json=arguments.json)
        return 0
    if arguments.groups < 1:
        raise ConfigError(f"--groups: expected at least 1, got {arguments.groups}")
    run = find_run(arguments.run, arguments.runs_dir)
    groups = await read_groups(run, arguments.groups)
    if not groups:
        text = "its log has no group of two graded attempts that can be read"
        raise ConfigError(f"--run: {run.run_id}: {text}")
    found = report(config.name, groups, await auditor.audit_all(groups))
    # Not written, or an audit that saw nothing would look like a clean one.
    if not found.num_groups:
        raise JudgeSilentError(f"judge {config.name}: {found.failure}")
    write_audit(run, found)
    print_result(msgspec.to_builtins(found), as_json=arguments.json)
    return 0


async def _calibrate(config: RubricConfig, arguments: argparse.Namespace) -> int:
    found = await calibrate(open_judge(config), await _labels(config, arguments))
    if arguments.output is not None:
        write_atomic(arguments.output, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print_result(msgspec.to_builtins(found), as_json=arguments.json)
    return 0


async def _labels(config: RubricConfig, arguments: argparse.Namespace) -> list[HumanLabel]:
    if arguments.labels is not None:
        return read_labels(Path(arguments.labels), config)
    named = [one for one in config.criteria if one.name == arguments.criterion]
    if not named:
        names = ", ".join(one.name for one in config.criteria)
        raise ConfigError(f"--criterion: expected one of {names}, as a log's labels name none")
    return await logged_labels(find_run(arguments.run, arguments.runs_dir), named[0])
