"""`penstock chat [RUN|CHECKPOINT]`: talk to a policy, and see it use its tools on a folder.

The folder that a chat works on, and what became of its files.

A user's folder is copied unless `--in-place` says otherwise. Nothing is read through a link, before
or afterwards: a model may have put it there.
"""

import argparse
import asyncio
import contextlib
import os
import readline
import shutil
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from penstock.actors.monitor.episodes.reading import unified_diff
from penstock.envs.harness.session import ToolSession
from penstock.envs.tasks.storage import load_tasks
from penstock.infra.agent.checkout import open_checkout
from penstock.infra.agent.display import Display
from penstock.infra.agent.endpoint import model_of_run, model_of_url, served
from penstock.infra.agent.loop import Dialogue, End
from penstock.infra.agent.model import Model
from penstock.infra.agent.states import changed_states, folder_states
from penstock.infra.output import printable
from penstock.infra.run.runs import RunDir
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.task import Limits, Split, Task

NUM_FILES_MAX = 20_000
BYTES_MAX = 256 << 20
FILE_BYTES_MAX = 4 << 20
"""Longest file whose text is compared."""


@contextlib.contextmanager
def opened(folder: Path | None, files: Mapping[str, bytes], *, in_place: bool) -> Generator[Path]:
    """Yield a folder to work on: a user's own, a copy of it, or a new one with some files.

    Raises:
        NotFoundError: It is no folder.
        ConfigError: It is too large to copy.

    """
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"--workspace: {folder}: expected a folder")
    if folder is not None and in_place:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-chat-", ignore_cleanup_errors=True) as parent:
        place = Path(parent) / "work"
        if folder is not None:
            _copy(folder, place)
        else:
            _write(files, place)
        yield place


class Comparison:
    """A folder's files as they are now, to say later what changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before, self._states = _contents(folder), folder_states(folder)

    def diff(self) -> str:
        """Return what changed since, as `diff -u` shows it; modes, links, folders by line."""
        after = _contents(self._folder)
        changed = {path: data for path, data in after.items() if self._before.get(path) != data}
        gone = sorted(self._before.keys() - after.keys())
        unread = [path for path in gone if os.path.lexists(self._folder / path)]
        deleted = [path for path in gone if path not in unread]
        notes = [f"{path}: not compared: too large, too many, or no file" for path in unread]
        states = changed_states(self._states, folder_states(self._folder))
        diff = unified_diff(self._before, changed, deleted, states)
        return "\n".join(filter(None, [diff, *notes]))


def _copy(folder: Path, place: Path) -> None:
    num_bytes = 0
    for number, path in enumerate(_files(folder), 1):
        num_bytes += path.lstat().st_size
        if number > NUM_FILES_MAX or num_bytes > BYTES_MAX:
            limits = f"{NUM_FILES_MAX} files of {BYTES_MAX >> 20} MiB"
            text = f"{folder}: expected at most {limits} to copy; --in-place works on it itself"
            raise ConfigError(f"--workspace: {text}")
    shutil.copytree(folder, place, symlinks=True, ignore=_left_out)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: `.git`, which has no bound, sockets, pipes and devices."""
    kinds = {name: stat.S_IFMT(os.lstat(Path(folder) / name).st_mode) for name in names}
    return [
        n
        for n, kind in kinds.items()
        if n == ".git" or kind not in {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
    ]


def _write(files: Mapping[str, bytes], place: Path) -> None:
    place.mkdir()
    for name, data in files.items():
        path = place / name
        if not path.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"{name}: expected a path within the task's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return files of at most `FILE_BYTES_MAX` by path, up to the bounds of a copy."""
    found: dict[str, bytes] = {}
    num_bytes = 0
    for path in _files(folder):
        if len(found) >= NUM_FILES_MAX or num_bytes > BYTES_MAX:
            break
        if path.lstat().st_size <= FILE_BYTES_MAX:
            with contextlib.suppress(OSError):  # It may be closed to us.
                data = path.read_bytes()
                found[str(path.relative_to(folder))] = data
                num_bytes += len(data)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """Yield regular files, sorted by folder, but for those of git."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(root) / name
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


FAILED = 4
"""Exit code where the endpoint refused or did not answer."""
SHOWN_CHARACTERS_MAX = 20_000
INSTRUCTION_CHARACTERS_MAX = 200_000
PROMPT = "you> "


def chat_command(arguments: argparse.Namespace) -> int:
    """Talk until the input ends (Ctrl-D); Ctrl-C ends a turn. The change comes at the end."""
    readline.set_auto_history(sys.stdin.isatty())  # Lines can be edited, and called up again.
    display = Display(_chat_write, SHOWN_CHARACTERS_MAX)
    with contextlib.ExitStack() as stack:
        model, task = _open(arguments, display, stack)
        files = task.contents if task is not None else {}
        place = opened(arguments.workspace, files, in_place=arguments.in_place)
        folder = stack.enter_context(place)
        comparison = Comparison(folder)
        code = _talk(model, folder, task, arguments, display)
        diff = comparison.diff()
    display.say("changes:" if diff else "no file changed")
    _chat_write(printable(diff) + "\n" if diff else "")
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
            session = ToolSession(model.harness, sandbox, limits, pages=task.pages if task else {})
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


def _chat_write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
