"""`penstock serve` on a model's folder, and its log."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import tomli_w

from penstock.gateway.keys import hash_key
from penstock.infra.run.runs import find_run, open_log
from penstock.messages.base import Event

from .checkpoint import CONTEXT_TOKENS

KEY, SLOW_KEY = "psk-clients", "psk-slow"
REPLY_TOKENS = 1024
START_S_MAX = 150.0
_STOP_S_MAX = 60.0


class Service:
    """Address and log of what is served."""

    def __init__(self, folder: Path) -> None:
        self._run = find_run("s1", folder)
        self.url = self._run.gateway_url.read_text()

    async def events(self, kind: type[Event]) -> Sequence[Event]:
        """Return all events of a type so far."""
        async with open_log(self._run, "clients") as bus:
            return [d.event async for d in bus.follow([kind], stop_at_end=True)]

    async def prefixes(self) -> dict[str, int]:
        """Return how many requests continued a conversation, by how exactly."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        found = re.findall(r'^penstock_gateway_prefixes_total\{kind="(\w+)"} (\d+)', text, re.M)
        return {kind: int(count) for kind, count in found}


@contextlib.contextmanager
def serving(model: Path, folder: Path) -> Iterator[Service]:
    """Serve a model's folder."""
    keys = folder / "keys.toml"
    consent = {"storage_consent": True, "training_consent": True}
    specs = [
        {"key_id": "clients", "key_hash": hash_key(KEY), "tpm_limit": 100_000_000, **consent},
        {"key_id": "slow", "key_hash": hash_key(SLOW_KEY), "rpm_limit": 2, **consent},
    ]
    keys.write_text(tomli_w.dumps({"keys": specs}))
    settings = {
        "gateway.port": 0,
        "gateway.keys_file": f'"{keys}"',
        "gateway.context_tokens_max": CONTEXT_TOKENS,
        "gateway.reply_tokens_max": REPLY_TOKENS,
        "generator.num_tokens_max": CONTEXT_TOKENS,
        "generator.num_running_max": 4,
    }
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(folder / "runs")]
    said = folder / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, "serve", str(model), "--run-id", "s1", *given],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + START_S_MAX
    try:
        while "live page:" not in said.read_text():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        yield Service(folder / "runs")
    finally:
        process.terminate()
        process.wait(_STOP_S_MAX)
