"""`penstock log collect` on a run that is down: what events name stays, the rest goes."""

import asyncio
from pathlib import Path

from tests.contract.bus.test_bus_objects import sampled, turn

from penstock.infra.cli import main
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.rollout import TurnSampled

COMMAND = ["log", "collect", "r1"]


async def fill(run: RunDir) -> None:
    async with open_log(run, "test") as bus:
        await bus.publish(sampled([turn(0, 200_000)]))
        await run.store().put("claims/1-orphan", b"of a writer that died")
        await run.store().put("tasks/train", b"another owner's")


async def held(run: RunDir) -> tuple[list[str], list[str]]:
    async with open_log(run, "test") as bus:
        event = (await bus.last(TurnSampled)).event
    return event.object_keys(), await run.store().keys("")


def test_it_deletes_what_no_event_names(tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path / "runs" / "r1")
    run.path.mkdir(parents=True)
    run.config.write_text("")
    asyncio.run(fill(run))
    assert main(["--runs-dir", str(run.path.parent), *COMMAND, "--grace-s", "0"]) == 0
    assert "1 objects that no event names deleted, 1 kept" in capsys.readouterr().out
    named, keys = asyncio.run(held(run))
    assert keys == [*named, "tasks/train"]
