"""`penstock backup|restore|move`."""

import argparse

from penstock.infra.backup.folder import back_up, move_to_servers, restore
from penstock.infra.output import print_line
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import find_run, open_log


async def backup_command(arguments: argparse.Namespace) -> int:
    """Back up a run, even while it is up, to a folder."""
    run = await reached_run(arguments)
    async with open_log(run, "backup") as bus:
        head = await back_up(run, bus, arguments.output)
    size = sum((arguments.output / name).stat().st_size for name in head.digests) / 1e6
    print_line(
        f"run {head.run_id} -> {arguments.output} ({len(head.digests)} files, {size:.1f} MB)"
    )
    print_line("it holds the run's secrets and its users' keys: keep it as you keep those")
    return 0


async def restore_command(arguments: argparse.Namespace) -> int:
    """Restore a run from a backup."""
    arguments.runs_dir.mkdir(parents=True, exist_ok=True)
    run = await restore(arguments.folder, arguments.runs_dir)
    print_line(
        f"{arguments.folder} -> {run.path}; users who were erased since the backup are back:"
    )
    print_line("erase them again before it serves")
    return 0


async def move_command(arguments: argparse.Namespace) -> int:
    """Move the log of a stopped run to other servers."""
    run = find_run(arguments.run, arguments.runs_dir)
    await move_to_servers(run, arguments.to_servers)
    print_line(f"run {run.run_id}: its log is now on {arguments.to_servers}; start it again")
    return 0
