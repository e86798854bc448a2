"""`penstock serve` in a subprocess, and clients of it."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from .. import launched
from ..launched import PENSTOCK, live_processes

WAIT_S = 300.0
"""On a machine with other work."""


def penstock(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return launched.penstock(runs, *arguments, wait_s=WAIT_S)


class Service:
    """A service in the background; what it says is in `output`."""

    def __init__(self, runs: Path, *arguments: str, run_id: str = "r1") -> None:
        self.folder = runs / run_id
        self._log = runs / "service.out"
        for url in self.folder.glob("gateway_url*"):
            url.unlink()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PENSTOCK, "--runs-dir", str(runs), "serve", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def url(self, name: str = "gateway_url") -> str:
        """Wait until a gateway listens; return its address."""
        deadline = time.monotonic() + WAIT_S
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return (self.folder / name).read_text()

    def post(self, path: str, body: dict, **headers: str) -> tuple[dict, dict]:
        """Return headers and body of the answer."""
        url = self.url()
        key = (self.folder / "gateway_key").read_text().strip()
        given = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} | headers
        request = urllib.request.Request(url + path, json.dumps(body).encode(), given)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(answer.headers), json.loads(answer.read())

    def ask(self, text: str = "hello", **headers: str) -> tuple[int, str]:
        """Ask until a generator answers; return version (-1: not named) and request id."""
        deadline = time.monotonic() + WAIT_S
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        while True:
            try:
                found, reply = self.post(
                    "/v1/chat/completions", body | {"max_tokens": 8}, **headers
                )
                return int(found.get("x-policy-version", -1)), reply["id"]
            except urllib.error.HTTPError as error:
                assert error.code == 503, error.read()
                assert time.monotonic() < deadline, self.output
                time.sleep(0.1)

    def teach(self, value: float) -> int:
        """Ask, and say what one thinks of the reply; return the reply's version."""
        version, request_id = self.ask()
        body = {"request_id": request_id, "name": "thumbs", "value": value}
        self.post("/v1/feedback", body)
        return version

    def until_version(self, version: int) -> None:
        """Wait until users are answered by a version, or a later one."""
        deadline = time.monotonic() + WAIT_S
        while self.ask()[0] < version:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of all live processes that name this run's folder."""
        return {pid: line for pid, line in live_processes().items() if str(self.folder) in line}

    def pid_of(self, word: str) -> int | None:
        """Return the process of this run whose command line has a word, if it runs."""
        for pid, line in self.processes().items():
            if any(part.rpartition("/")[2] == word or part == word for part in line.split()):
                return pid
        return None

    def stop(self) -> int:
        """Press Ctrl-C; return the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(WAIT_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
