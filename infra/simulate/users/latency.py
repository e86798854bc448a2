"""Part `latency`: from a rating to the first token that it changed, on the real clock.

`penstock serve --learn --ungated` runs on a copy of a finished run. Users ask and rate; beside them
a probe asks for a few tokens over and over and notes which version sampled the first. A rating's
time is from the 2xx of its feedback to the first probe whose version had trained it. Without gates
every version is served at once: what gates take is not in these figures.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp

from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.simulate.users.settings import UsersScenario
from penstock.messages.errors import DeadlineError
from penstock.messages.feedback import LiveSampleJoined, feedback_key
from penstock.messages.training import BatchManifest

START_S_MAX = 120.0
STOP_S_MAX = 60.0
REQUEST_S_MAX = 60.0
PROBE_S = 0.25
TENANT = "local"
"""Of the key that a service makes for itself."""
PROMPTS = ("List the files.", "Fix the function add.", "What does join do?", "Run the tests.")


class _Times:
    """What users and the probe noted, in seconds of one clock."""

    def __init__(self) -> None:
        self.rated: dict[str, float] = {}
        """Feedback's key on the log -> its 2xx."""
        self.seen: list[tuple[float, int]] = []
        """First token of a probe, and the version that sampled it."""
        self.num_failed = 0

    def waits_s(self, versions: dict[str, int]) -> list[float]:
        """Return, sorted, how long each trained rating took to be served."""
        found: list[float] = []
        for key, rated_at in self.rated.items():
            served = [at for at, version in self.seen if version >= versions.get(key, sys.maxsize)]
            if served:
                found.append(min(served) - rated_at)
        return sorted(found)


def simulate_latency(scenario: UsersScenario, run: RunDir) -> dict[str, Any]:
    """Serve a copy of a run; return the figures."""
    with tempfile.TemporaryDirectory(prefix="penstock-users-") as folder:
        copy = Path(folder) / run.run_id
        shutil.copytree(run.path, copy)
        return asyncio.run(_measure(scenario, RunDir(copy)))


async def _measure(scenario: UsersScenario, run: RunDir) -> dict[str, Any]:
    times = _Times()
    began = time.monotonic()
    async with _serving(scenario, run) as url:
        up_s = time.monotonic() - began
        token = run.gateway_key.read_text().strip()
        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
            first_s = await _until_answered(session, began)
            probing = asyncio.create_task(_probe(session, times))
            try:
                await _use(scenario, session, times)
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
    versions = await _trained_in(run)
    waits = times.waits_s(versions)
    return {
        "feedback_to_served_s_p50": _quantile(waits, 0.5),
        "feedback_to_served_s_p95": _quantile(waits, 0.95),
        "num_served": len(waits),
        "num_rated": len(times.rated),
        "num_versions": len({version for _, version in times.seen}) - 1,
        "listening_s": round(up_s, 1),
        "first_answer_s": round(first_s, 1),
        "failed_requests": times.num_failed,
    }


@contextlib.asynccontextmanager
async def _serving(scenario: UsersScenario, run: RunDir) -> AsyncGenerator[str]:
    """Run the service in processes of its own; yield its address."""
    run.gateway_url.unlink(missing_ok=True)
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(run.path.parent)]
    command += ["serve", run.run_id, "--learn", "--ungated", "--set", "gateway.port=0"]
    command += ["--set", f"serve.epoch_samples={scenario.latency_epoch_samples}"]
    with (run.path / "service.out").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(START_S_MAX):
                while not run.gateway_url.exists():
                    if process.returncode is not None:
                        text = (run.path / "service.out").read_text(errors="replace")
                        raise DeadlineError(f"simulate users: the service ended: {text[-2000:]}")
                    await asyncio.sleep(0.05)
            yield run.gateway_url.read_text()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(STOP_S_MAX):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _until_answered(session: aiohttp.ClientSession, began: float) -> float:
    """Wait for the first reply; return the seconds since the command."""
    async with asyncio.timeout(START_S_MAX):
        found = None
        while found is None:
            found = await _ask(session, PROMPTS[0], 1)
            await asyncio.sleep(PROBE_S)
    return time.monotonic() - began


async def _use(scenario: UsersScenario, session: aiohttp.ClientSession, times: _Times) -> None:
    """Ask and rate for a while, then wait for what is under way."""
    ends = time.monotonic() + scenario.latency_s
    number = 0
    while time.monotonic() < ends:
        await _ask_and_rate(session, times, number)
        number += 1
        await asyncio.sleep(scenario.latency_pause_s)
    sys.stderr.write(f"{len(times.rated)} ratings given; waiting for the last version\n")
    await asyncio.sleep(scenario.latency_tail_s)


async def _ask_and_rate(session: aiohttp.ClientSession, times: _Times, number: int) -> None:
    found = await _ask(session, PROMPTS[number % len(PROMPTS)], 24)
    if found is None:
        times.num_failed += 1
        return
    body = {
        "request_id": found[0],
        "feedback_id": f"fb-{number}",
        "name": "reject" if number % 3 else "accept",
        "value": 1.0,
    }
    try:
        async with session.post("/v1/feedback", json=body) as reply:
            if reply.status == 200:
                times.rated[feedback_key(TENANT, f"fb-{number}")] = time.monotonic()
            else:
                times.num_failed += 1
    except (aiohttp.ClientError, TimeoutError):
        times.num_failed += 1


async def _ask(
    session: aiohttp.ClientSession, text: str, num_tokens: int
) -> tuple[str, int, float] | None:
    """Return the request's id, the version and the time of the first token; None without reply."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "stream": True,
    }
    try:
        async with session.post("/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                return None
            at = time.monotonic()  # Headers go out with the first token.
            await reply.read()
            return reply.headers["x-request-id"], int(reply.headers["x-policy-version"]), at
    except (aiohttp.ClientError, TimeoutError):
        return None


async def _probe(session: aiohttp.ClientSession, times: _Times) -> None:
    while True:
        found = await _ask(session, PROMPTS[0], 1)
        if found is None:
            times.num_failed += 1
        else:
            times.seen.append((found[2], found[1]))
        await asyncio.sleep(PROBE_S)


async def _trained_in(run: RunDir) -> dict[str, int]:
    """Return the version that each piece of feedback was trained in, by its key on the log."""
    joined: dict[str, list[str]] = {}
    versions: dict[str, int] = {}
    async with open_log(run, "users") as bus:
        async for delivery in bus.follow([LiveSampleJoined], stop_at_end=True):
            if isinstance(event := delivery.event, LiveSampleJoined):
                joined[event.key()] = event.feedback_ids
        async for delivery in bus.follow([BatchManifest], stop_at_end=True):
            if isinstance(event := delivery.event, BatchManifest):
                for sample in event.live:
                    if sample.outcome.is_trained:
                        for key in joined.get(f"{sample.rollout_id}.{sample.revision}", []):
                            versions.setdefault(key, event.step)
    return versions


def _quantile(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
