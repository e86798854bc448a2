"""Log lines of a process: format, level, and the actor they come from."""

import asyncio
import json
import logging

import pytest

from penstock.actors.runtime.log_context import enter_actor
from penstock.infra.logs import configure_logs, launcher_log

log = logging.getLogger("penstock.test")


@pytest.fixture(autouse=True)
def _root_logger():
    """Give the root logger back what pytest had installed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def written(capsys):
    def read() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return read


async def test_each_actor_of_a_process_signs_its_lines(written):
    configure_logs("info", "text")

    async def run(actor: str) -> None:
        enter_actor(actor)
        await asyncio.create_task(speak())

    async def speak() -> None:
        await asyncio.sleep(0)
        log.info("ready")

    await asyncio.gather(run("trainer"), run("pacer"))
    log.info("outside")
    lines = [line.split(maxsplit=3)[1:] for line in written()]
    assert lines == [
        ["INFO", "trainer", "penstock.test: ready"],
        ["INFO", "pacer", "penstock.test: ready"],
        ["INFO", "-", "penstock.test: outside"],
    ]


def test_json_has_one_object_per_line_with_the_traceback_inside(written):
    configure_logs("info", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("step %d failed", 3)
    [line] = map(json.loads, written())
    assert (line["level"], line["actor"], line["message"]) == ("error", "-", "step 3 failed")
    assert line["traceback"].endswith("ValueError: two\nlines")


def test_what_is_below_the_level_is_not_written(written):
    configure_logs("warning", "text")
    log.info("no")
    log.warning("yes")
    [line] = written()
    assert line.endswith("penstock.test: yes")


def test_the_launchers_file_has_every_line_and_the_terminal_warnings_alone(tmp_path, written):
    path, root = tmp_path / "logs" / "launcher.log", logging.getLogger()
    before = (root.level, root.handlers[:])
    with launcher_log(path, "info", "text"):
        log.info("process trainer started")
        log.warning("process trainer died")
    log.error("after")
    assert (root.level, root.handlers[:]) == before
    texts = [line.split(maxsplit=3)[3] for line in path.read_text().splitlines()]
    said = [f"penstock.test: process trainer {what}" for what in ("started", "died")]
    assert texts == said
    terminal = [line for line in written() if "process trainer" in line]
    assert len(terminal) == 1 and terminal[0].endswith(said[1])
