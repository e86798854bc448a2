"""The model that a command talks to: an endpoint, or a run's gateway, served first if need be."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from penstock.actors.pacer.config import PacerConfig
from penstock.actors.runtime.files import open_private
from penstock.infra.agent.model import Model
from penstock.infra.orphans import die_with_parent
from penstock.infra.run.runs import RunDir, find_run
from penstock.infra.stores.open import read_file, read_section
from penstock.messages.errors import BusError, ConfigError, DeadlineError

KEY_VARIABLE = "PENSTOCK_AGENT_KEY"
READY_S_MAX = 600.0
"""Longest wait until a service that was started here answers."""
STOP_S_MAX = 60.0
_POLL_S = 0.2
_WORDS_MAX = 2000
_RUN_ID = "chat"


def model_of_url(arguments: argparse.Namespace, *, stores: bool = True) -> Model:
    """Return the endpoint of `--url`.

    Raises:
        ConfigError: `--url` without `--harness`.

    """
    if not arguments.harness:
        raise ConfigError("--harness: expected 1 or 2 with --url: the tools that it is offered")
    key = arguments.key_file.read_text().strip() if arguments.key_file else ""
    key = key or os.environ.get(KEY_VARIABLE, "")
    return Model(
        arguments.url,
        key,
        arguments.model,
        arguments.harness,
        stores=stores,
        allowed=arguments.allow_plain_text,
    )


def model_of_run(run: RunDir, arguments: argparse.Namespace, *, stores: bool = True) -> Model:
    """Return the gateway of a run that is up, with the tools that its policy knows."""
    key = run.gateway_key.read_text().strip()
    url = f"{run.gateway_url.read_text().strip()}/v1"
    return Model(url, key, arguments.model, arguments.harness or harness_of(run), stores=stores)


def harness_of(run: RunDir) -> str:
    """Return the version of the harness that a run's policy learns with."""
    section = read_section(read_file(run.config), str(run.config), "pacer", PacerConfig)
    return section.harness


@contextlib.contextmanager
def served(target: str, runs: Path, say: Callable[[str], None]) -> Generator[RunDir]:
    """Yield a run whose gateway answers: one that is up, else `penstock serve` until the end.

    Args:
        target: Id or path of a run, or a folder in Hugging Face's layout.
        runs: Folder of all runs.
        say: Hears what is waited for.

    Raises:
        NotFoundError: No such run.
        BusError: The service did not start; the text has its words.
        DeadlineError: It did not answer in time.

    """
    folder = Path(target).expanduser()
    with tempfile.TemporaryDirectory(prefix="penstock-chat-") as scratch:
        if (folder / "config.json").is_file() and not (folder / "config.toml").exists():
            run = RunDir(Path(scratch) / "runs" / _RUN_ID)
            command = ["serve", str(folder.resolve()), "--run-id", _RUN_ID]
        else:
            run = find_run(target, runs)
            if run.read_state() is not None:
                yield run
                return
            command = ["serve", str(run.path)]
        say(f"starting: penstock {' '.join(command)}")
        words = Path(scratch) / "serve.log"
        with _service(["--runs-dir", str(run.path.parent), *command], words) as process:
            _await_ready(run, process, words)
            yield run


@contextlib.contextmanager
def _service(arguments: Sequence[str], words: Path) -> Generator["subprocess.Popen[bytes]"]:
    """Run a command in a session of its own, which Ctrl-C does not reach, and stop it in order."""
    with open_private(words, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.infra.cli", *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=die_with_parent, start_new_session=True,  # noqa: PLW1509 - no threads yet
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(run: RunDir, process: "subprocess.Popen[bytes]", words: Path) -> None:
    end = time.monotonic() + READY_S_MAX
    while not _is_ready(run, process.pid):
        if process.poll() is not None:
            text = words.read_bytes()[-_WORDS_MAX:].decode("utf-8", "replace").strip()
            raise BusError(f"the service ended with exit code {process.returncode}: {text}")
        if time.monotonic() > end:
            raise DeadlineError(f"the service did not answer within {READY_S_MAX:g} s: {run.logs}")
        time.sleep(_POLL_S)


def _is_ready(run: RunDir, pid: int) -> bool:
    """Return whether the gateway that this launcher started can answer requests."""
    state = run.read_state()
    if state is None or state.pid != pid or not run.gateway_url.exists():
        return False
    try:
        url = f"{run.gateway_url.read_text().strip()}/readyz"
        with urllib.request.urlopen(url, timeout=5.0) as response:  # noqa: S310 - our own file
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ValueError):
        return False
