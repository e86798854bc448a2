"""`penstock chat [RUN|CHECKPOINT]`: talk to a policy, and see it use its tools on a folder."""

import argparse
import asyncio
import contextlib
import os
import readline
import sys
from pathlib import Path

from penstock.envs.harness.session import Session
from penstock.envs.tasks.storage import load_tasks
from penstock.infra.agent.checkout import open_checkout
from penstock.infra.agent.display import Display
from penstock.infra.agent.endpoint import model_of_run, model_of_url, served
from penstock.infra.agent.loop import Dialogue, End
from penstock.infra.agent.model import Model
from penstock.infra.agent.workspace import Comparison, opened
from penstock.infra.commands.output import printable
from penstock.infra.run.runs import RunDir
from penstock.messages.errors import NotFoundError
from penstock.messages.task import Limits, Split, Task

FAILED = 4
"""Exit code where the endpoint refused or did not answer."""
SHOWN_CHARACTERS_MAX = 20_000
INSTRUCTION_CHARACTERS_MAX = 200_000
PROMPT = "you> "


def chat_command(arguments: argparse.Namespace) -> int:
    """Talk until the input ends (Ctrl-D); Ctrl-C ends a turn. The change comes at the end."""
    readline.set_auto_history(sys.stdin.isatty())  # Lines can be edited, and called up again.
    display = Display(_write, SHOWN_CHARACTERS_MAX)
    with contextlib.ExitStack() as stack:
        model, task = _open(arguments, display, stack)
        files = task.contents if task is not None else {}
        place = opened(arguments.workspace, files, in_place=arguments.in_place)
        folder = stack.enter_context(place)
        comparison = Comparison(folder)
        code = _talk(model, folder, task, arguments, display)
        diff = comparison.diff()
    display.say("changes:" if diff else "no file changed")
    _write(printable(diff) + "\n" if diff else "")
    return code


def _open(
    arguments: argparse.Namespace, display: Display, stack: contextlib.ExitStack
) -> tuple[Model, Task | None]:
    """Return the model, and a task of its run to work on where no folder is named."""
    if arguments.url:
        return model_of_url(arguments, stores=False), None
    run = stack.enter_context(served(arguments.target, arguments.runs_dir, display.say))
    model = model_of_run(run, arguments, stores=False)
    task = None if arguments.workspace else asyncio.run(_sample_task(run))
    return model, task


async def _sample_task(run: RunDir) -> Task | None:
    """Return a held-out task of a run; None where it has none."""
    try:
        tasks = await load_tasks(run.store(), Split.HELDOUT)
    except NotFoundError:
        return None
    finally:
        await run.close_store()
    return tasks[0] if tasks else None


def _talk(
    model: Model,
    folder: Path,
    task: Task | None,
    arguments: argparse.Namespace,
    display: Display,
) -> int:
    limits = task.limits if task is not None else Limits(tool_s_max=60.0, output_bytes_max=16_384)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        sandbox = runner.run(stack.enter_async_context(open_checkout(folder, display.say)))
        try:
            session = Session(model.harness, sandbox, limits, pages=task.pages if task else {})
            _introduce(folder, task, display)
            return _converse(
                Dialogue(model, session, display), runner, task, arguments.turns, display
            )
        finally:
            runner.run(stack.aclose())


def _introduce(folder: Path, task: Task | None, display: Display) -> None:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(folder))
    display.say(f"files: {', '.join(names[:20]) or 'none'}{', ...' if len(names) > 20 else ''}")
    if task is not None:
        display.say(f"an empty line asks for task {task.task_id}, which it never trained on:")
        display.hear(task.instruction)
        display.end_message()
    display.say("Ctrl-C ends a turn, Ctrl-D the session")


def _converse(
    conversation: Dialogue,
    runner: asyncio.Runner,
    task: Task | None,
    num_turns_max: int,
    display: Display,
) -> int:
    code = 0
    while (text := _read_line(display)) is not None:
        text = text.strip() or (task.instruction if task and not code else "")
        if not text:
            continue
        if len(text) > INSTRUCTION_CHARACTERS_MAX:
            display.say(f"expected at most {INSTRUCTION_CHARACTERS_MAX} characters")
            continue
        try:
            report = runner.run(conversation.ask(text, num_turns_max))
        except KeyboardInterrupt:
            display.say("interrupted")
            continue
        if report.end is End.ANSWERED and not report.answer.strip():
            display.say("(an empty answer)")
        if report.end is End.FAILED:
            display.say(f"failed: {report.error}")
            code = FAILED
        elif report.end is not End.ANSWERED:
            display.say(f"{report.end}: {report.num_turns} turns, {report.num_calls} calls so far")
    return code


def _read_line(display: Display) -> str | None:
    """Return a line of input, or None at its end."""
    while True:
        try:
            return input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            display.say("")
        except UnicodeDecodeError as error:
            display.say(f"expected text in UTF-8: {error.reason}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
