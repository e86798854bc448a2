"""The state on a page, in a report and on a terminal."""

import io
import json
import re

from rich.console import Console
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.monitor.log_folds import fold_log
from penstock.actors.runtime.clock import SystemClock
from penstock.gateway.page.live_page import render_page
from penstock.infra.commands.status import read_state, render
from penstock.infra.run.closing import write_report
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.control import ActorFailed
from penstock.messages.telemetry import Wait

from .story import finished, report, story


def embedded(page: str) -> dict:
    line = re.search(r"^const EMBEDDED = (.*);$", page, re.MULTILINE)
    assert line is not None
    return json.loads(line.group(1))


async def logged(tmp_path, events) -> MemoryBus:
    server = MemoryServer(seed=1, clock=SystemClock())
    bus = MemoryBus(server, run_id="r1", store=DirectoryStore(tmp_path / "objects"), name="test")
    await bus.publish(events)
    return bus


def shown(state) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(render(state))
    return console.file.getvalue()


async def test_a_report_is_one_page_with_the_state_of_the_log(tmp_path):
    nasty = "</script><script>alert('x')</script>\u2028"
    failed = ActorFailed(actor="trainer", incarnation="9", error=nasty, num_restarts=1)
    bus = await logged(tmp_path, [*story(), failed, finished()])
    run = RunDir(tmp_path / "r1")
    write_report(run, await fold_log(bus), (b"[]", b"{}"))
    page = run.report.read_text()
    assert page.count("</script>") == 3
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    state = embedded(page)
    assert state["run"]["phase"] == "finished"
    assert state["ledger"]["balanced"]
    assert any(nasty in line["text"] for line in state["log"])
    await bus.close()


def test_a_page_without_a_state_yet_has_what_its_sections_need():
    page = render_page()
    needed = re.findall(r"\w+", " ".join(re.findall(r"\[(\[[^\]]*\]), draw", page)))
    blank = re.search(r"^const BLANK = \{\n(.*?)\n\};", page, re.MULTILINE | re.DOTALL)
    assert "steps" in needed
    assert set(needed) <= set(re.findall(r"(\w+):", blank[1]))


def test_the_live_page_has_no_state_and_no_loose_ends():
    page = render_page()
    assert "const EMBEDDED = null;" in page
    assert "/*" not in re.sub(r"image/svg.*?\"", "", page).replace("*/*", "")
    shown_ids = set(re.findall(r'id="([a-z-]+)"', page))
    used_ids = set(re.findall(r'getElementById\("([a-z-]+)"\)|fill\("([a-z-]+)"', page))
    assert {a or b for a, b in used_ids} <= shown_ids


async def test_status_reads_the_log_of_a_run_that_is_down(tmp_path):
    wait = Wait(target="sandbox", reason="a machine", since=0.0, deadline_s=30.0)
    bus = await logged(tmp_path, [*story(), report("judge-0", "judge", 9e9, 1.0, wait)])
    state = await read_state(bus, is_up=False)
    assert state == await fold_log(bus)
    text = shown(state)
    for words in (
        "r1 · reinforcement learning · step 2",
        "25% → 75% (version 2)",
        "balanced, 53 tokens, 15 in flight",
        "1 of 2",
        "west-0 v2, west-1 v2",
        "2 wrong",
        "judge-0",
    ):
        assert words in text
    await bus.close()


async def test_a_finished_run_says_so_and_an_empty_one_does_not_fail(tmp_path):
    bus = await logged(tmp_path, [*story(), finished()])
    assert "finished: step limit" in shown(await fold_log(bus))
    await bus.close()
    empty = await logged(tmp_path, [])
    assert "no run yet" in shown(await fold_log(empty))
    await empty.close()
