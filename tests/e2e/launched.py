"""A run of the tiny configuration in a subprocess, through the command line, as a user has it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.infra.orphans import adopt_orphans

TINY = Path(__file__).with_name("tiny.toml")
PENSTOCK = (sys.executable, "-m", "penstock.infra.cli")
WAIT_S = 100.0


def penstock(
    runs: Path, *arguments: str, wait_s: float = WAIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*PENSTOCK, "--runs-dir", str(runs), *arguments],
        capture_output=True,
        text=True,
        timeout=wait_s,
        env=os.environ | environment,
        check=False,
    )


class Launched:
    """`penstock run` in the background; what it says is in `output`."""

    def __init__(
        self,
        runs: Path,
        *settings: str,
        run_id: str = "r1",
        resume: bool = False,
        config: Path = TINY,
        processes: str | None = None,
        program: Sequence[str] = (),
    ):
        """Start `penstock run`, or a program that takes its options."""
        source = ["--resume", run_id] if resume else ["--config", str(config), "--run-id", run_id]
        overrides = [word for setting in settings for word in ("--set", setting)]
        if processes is not None:
            overrides += ["--processes", processes]
        self.runs, self.folder = runs, runs / run_id
        command = program or (*PENSTOCK, "--runs-dir", str(runs), "run")
        self._log = runs / f"{run_id}.out"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *source, *overrides],
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def output(self) -> str:
        """Everything said so far, by all launches of this run."""
        return self._log.read_text()

    def until(self, text: str, *, wait_s: float = WAIT_S) -> None:
        """Wait until it says something."""
        deadline = time.monotonic() + wait_s
        while True:
            has_ended = self.process.poll() is not None  # What it said last comes before its end.
            if text in self.output:
                return
            assert not has_ended, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.output}"
            time.sleep(0.05)

    def wait(self, wait_s: float = WAIT_S) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(wait_s)
        finally:
            self.end()

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()

    def ctrl_c(self) -> None:
        """Send what a terminal sends: an interruption of the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def pid_of(self, *words: str, wait_s: float = 20.0) -> int:
        """Return the process of this run whose command line has all these words."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            for pid, line in self.processes().items():
                if all(word in line.split() for word in words):
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"no process {words} of {self.folder}: {self.processes()}")

    def kill(self, *words: str) -> None:
        """kill -9 a process of this run."""
        os.kill(self.pid_of(*words), signal.SIGKILL)

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of all live processes that name this run's folder."""
        own = os.fsencode(self.folder)
        return {pid: line for pid, line in live_processes().items() if os.fsdecode(own) in line}

    @property
    def summary(self) -> dict[str, dict[str, object]]:
        """The closing figures."""
        return json.loads((self.folder / "summary.json").read_text())

    def check_sound(self, *, steps: int) -> None:
        """What must hold of every complete run, whatever happened to it."""
        found = self.summary
        assert found["rl"]["steps"] == steps
        assert found["rl"]["staleness_seen_max"] <= found["rl"]["staleness_max"]
        assert found["ledger"]["balanced"] is True
        assert found["replay"]["identical"] is True
        assert found["replay"]["steps_compared"] == steps
        assert found["sync"]["full_uploads_after_v0"] == 0
        told = penstock(self.runs, "log", "cat", self.folder.name, "--type", "BatchManifest")
        manifests = [json.loads(line) for line in told.stdout.splitlines()]
        assert [manifest["step"] for manifest in manifests] == list(range(1, steps + 1))
        samples = [s for m in manifests for g in m["groups"] for s in g["samples"]]
        samples += [sample for m in manifests for sample in m.get("live", [])]
        trained = [sample["rollout_id"] for sample in samples]
        assert len(trained) == len(set(trained)), "trained twice"


def machines() -> set[int]:
    """Return the processes of all virtual machines below this one; others' are none of ours.

    What a killed launcher leaves behind is ours, too: this process adopts it.
    """
    adopt_orphans()
    return machines_of(os.getpid())


def machines_of(pid: int) -> set[int]:
    """Return the processes of all virtual machines below a process."""
    below = set(_below(pid))
    return {
        pid
        for pid, line in live_processes().items()
        if pid in below
        and (line.startswith("/linux ") or "/bwrap " in line or line.startswith("bwrap "))
    }


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # It has just ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # The thread has.
                found += map(int, (task / "children").read_text().split())
    return found + [below for child in found for below in _below(child)]


def gone(pids: set[int], wait_s: float = 15.0) -> bool:
    """Return whether all of these end within a time."""
    deadline = time.monotonic() + wait_s
    while left := pids & set(live_processes()):
        if time.monotonic() > deadline:
            print({pid: live_processes().get(pid) for pid in left})
            return False
        time.sleep(0.1)
    return True


def live_processes() -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if line and state != "Z":
                found[int(folder.name)] = line
    return found
