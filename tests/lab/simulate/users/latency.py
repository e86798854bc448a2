"""Part `latency`: from a rating to the first token that it changed, on the real clock.

`penstock serve --learn` runs, with its gates, on a copy of a finished run. Users come one after the
other, ask once and rate; half of them are served by the channel `candidate`, which begins with a
newer version as soon as the gates have decided on the one before. That takes the evidence of many
users, in use for days or weeks. Here it is complete in seconds: users like what the newest version
says and nothing else, and guards ask for few of them (`SETTINGS`).

A rating's time is from the 2xx of its feedback to the first token of a reply that a version sampled
which had trained it: one on the channel `candidate`, and apart, one on `stable`.
"""

import asyncio
import contextlib
import math
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import openai
from tests.lab.simulate.users.client import NO_REPLY, connect, post_feedback
from tests.lab.simulate.users.settings import UsersScenario

from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.errors import DeadlineError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, ExperimentDecided
from penstock.messages.training import BatchManifest

START_S_MAX = 120.0
STOP_S_MAX = 60.0
RETRY_S = 0.25
SHOWN_EVERY_S = 15.0
TENANT = "local"
"""Of the key that a service makes for itself."""
PROMPTS = ("List the files.", "Fix the function add.", "What does join do?", "Run the tests.")
REPLY_TOKENS_MAX = 24
NUM_USERS = 10
"""Per arm, or tokens or samples, that a guard asks for; how far it lets replies go is not the
matter here, and replies of a policy that learns from such users go anywhere."""
GUARDS = ", ".join(
    f"{name} = {{ bound = {bound}, num_min = {NUM_USERS} }}"
    for name, bound in {
        "reply_length": 9.0, "empty_replies": 1.0, "invalid_calls": 1.0, "question_rate": 1.0,
        "edit_rate": 1.0, "unrated": 1.0, "tool_mix": 1.0, "discard_rate": 1.0, "kl": 99.0,
        "ess": 1e-6,
    }.items()
)  # fmt: skip
SETTINGS = (
    "gateway.port=0",
    "gatekeeper.quality_bar=0",
    "gatekeeper.offline.num_tasks=0",
    "gatekeeper.test.sessions_per_user=1",
    "gatekeeper.test.replies_per_user=1",
    "gatekeeper.test.user_window_s=5.0",
    f"gatekeeper.guards={{ {GUARDS} }}",
)


class _Times:
    """What users noted, in seconds of one clock."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        """Of this measurement, in the names of its users and feedback: the log may hold others."""
        self.rated: dict[str, float] = {}
        """Request's id -> the 2xx of its rating, of the ratings that are measured."""
        self.first_token: dict[str, float] = {}
        """Request's id -> the first token of its reply."""
        self.newest = -1
        """Newest version that anybody was served by."""
        self.num_failed = 0

    def waits_s(self, trained: dict[str, int], served: dict[str, int]) -> list[float]:
        """Return, sorted, how long each trained rating took to be served; infinite if it was not.

        Args:
            trained: Feedback's key -> the version that trained it.
            served: Request's id -> the version that answered it, of one channel.

        """
        seen = [
            (self.first_token[name], served[name]) for name in served if name in self.first_token
        ]
        return sorted(
            min((at for at, version in seen if version >= trained[key]), default=math.inf)
            - rated_at
            for key, rated_at in self.rated.items()
            if key in trained
        )


def simulate_latency(scenario: UsersScenario, run: RunDir) -> dict[str, Any]:
    """Serve a copy of a run; return the figures.

    Raises:
        BusError: Another process is running it.

    """
    with tempfile.TemporaryDirectory(prefix="penstock-users-") as folder:
        copy = Path(folder) / run.run_id
        with run.lock():
            shutil.copytree(run.path, copy)
        return asyncio.run(_measure(scenario, RunDir(copy)))


async def _measure(scenario: UsersScenario, run: RunDir) -> dict[str, Any]:
    times = _Times()
    began = time.monotonic()
    async with _serving(scenario, run) as url:
        up_s = time.monotonic() - began
        async with connect(url, run.gateway_key.read_text().strip()) as client:
            first_s = await _until_answered(client, began)
            await _use(scenario, client, times)
    told = await _read_log(run)
    candidate = times.waits_s(told.trained, told.served[Arm.CANDIDATE])
    stable = times.waits_s(told.trained, told.served[Arm.STABLE])
    return {
        "feedback_to_served_s_p50": _quantile(candidate, 0.5),
        "feedback_to_served_s_p95": _quantile(candidate, 0.95),
        "feedback_to_stable_s_p50": _quantile(stable, 0.5),
        "feedback_to_stable_s_p95": _quantile(stable, 0.95),
        "num_rated": len(times.rated),
        "num_trained": len(candidate),
        "num_served": sum(map(math.isfinite, candidate)),
        "num_served_stable": sum(map(math.isfinite, stable)),
        "num_versions": len({told.trained[key] for key in times.rated if key in told.trained}),
        "decisions": told.decisions,
        "listening_s": round(up_s, 1),
        "first_answer_s": round(first_s, 1),
        "failed_requests": times.num_failed,
    }


@contextlib.asynccontextmanager
async def _serving(scenario: UsersScenario, run: RunDir) -> AsyncGenerator[str]:
    """Run the service in processes of its own; yield its address."""
    run.gateway_url.unlink(missing_ok=True)
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(run.path.parent)]
    command += ["serve", run.run_id, "--learn"]
    for setting in (f"serve.epoch_samples={scenario.latency_epoch_samples}", *SETTINGS):
        command += ["--set", setting]
    with (run.path / "service.out").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            give_up_at = time.monotonic() + START_S_MAX
            while not run.gateway_url.exists():
                ended = "ended" if process.returncode is not None else ""
                if ended or time.monotonic() > give_up_at:
                    state = ended or f"does not listen after {START_S_MAX:g} s"
                    text = (run.path / "service.out").read_text(errors="replace")
                    raise DeadlineError(f"simulate users: the service {state}: {text[-2000:]}")
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


async def _until_answered(client: openai.AsyncOpenAI, began: float) -> float:
    """Wait for the first reply; return the seconds since the command.

    Raises:
        DeadlineError: None came.

    """
    try:
        async with asyncio.timeout(START_S_MAX):
            found = await _ask(client, PROMPTS[0], "first")
            while found is None:
                await asyncio.sleep(RETRY_S)
                found = await _ask(client, PROMPTS[0], "first")
    except TimeoutError as error:
        raise DeadlineError(f"simulate users: no reply in {START_S_MAX:g} s") from error
    return time.monotonic() - began


async def _use(scenario: UsersScenario, client: openai.AsyncOpenAI, times: _Times) -> None:
    """Have users ask and rate; ratings at the end are for the last decisions, and not measured."""
    began = time.monotonic()
    shown_at = began
    number = 0
    while (now := time.monotonic()) < began + scenario.latency_s + scenario.latency_tail_s:
        is_measured = now < began + scenario.latency_s
        await _ask_and_rate(client, times, number, is_measured=is_measured)
        number += 1
        if now - shown_at >= SHOWN_EVERY_S:
            shown_at = now
            text = f"{now - began:.0f} s: {number} ratings, newest version {times.newest}"
            sys.stderr.write(f"{text}, {times.num_failed} failed requests\n")
        await asyncio.sleep(scenario.latency_pause_s)


async def _ask_and_rate(
    client: openai.AsyncOpenAI, times: _Times, number: int, *, is_measured: bool
) -> None:
    name = f"{times.name}-{number}"
    found = await _ask(client, PROMPTS[number % len(PROMPTS)], name)
    if found is None:
        times.num_failed += 1
        return
    request_id, version, at = found
    times.first_token[request_id] = at
    times.newest = max(times.newest, version)
    try:
        await post_feedback(client, request_id, name, is_accepted=version == times.newest)
    except NO_REPLY:
        times.num_failed += 1
    else:
        if is_measured:
            times.rated[request_id] = time.monotonic()


async def _ask(client: openai.AsyncOpenAI, text: str, user: str) -> tuple[str, int, float] | None:
    """Return the request's id, its version and the time of its first token; None without reply."""
    try:
        answer = await client.chat.completions.with_raw_response.create(
            model="policy",
            messages=[{"role": "user", "content": text}],
            max_tokens=REPLY_TOKENS_MAX,
            temperature=1.0,
            stream=True,
            user=user,
        )
        at = time.monotonic()  # Headers go out with the first token.
        async for _ in answer.parse():
            pass
        return answer.headers["x-request-id"], int(answer.headers["x-policy-version"]), at
    except NO_REPLY:
        return None


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says of the service."""

    trained: dict[str, int]
    """Request's id -> the first version that trained its feedback."""
    served: dict[str, dict[str, int]]
    """Channel -> request's id -> the oldest version that sampled a token of its reply."""
    decisions: dict[str, int]
    """How many candidates ended in which way."""


async def _read_log(run: RunDir) -> _Told:
    joined: dict[str, list[str]] = {}
    told = _Told(trained={}, served={arm.value: {} for arm in Arm}, decisions={})
    request_of: dict[str, str] = {}
    types = (FeedbackReceived, LiveSampleJoined, InferenceRecorded, ExperimentDecided)
    async with open_log(run, "users") as bus:
        async for delivery in bus.follow(types, stop_at_end=True):
            match delivery.event:
                case LiveSampleJoined() as event:
                    joined[event.key()] = event.feedback_ids
                case FeedbackReceived() as event:
                    request_of[event.key()] = event.request_id
                case InferenceRecorded() as event if event.channel in told.served:
                    told.served[event.channel][event.request_id] = event.policy_version
                case ExperimentDecided() as event:
                    count = told.decisions.get(event.decision.value, 0)
                    told.decisions[event.decision.value] = count + 1
                case _:
                    pass
        async for delivery in bus.follow([BatchManifest], stop_at_end=True):
            if isinstance(event := delivery.event, BatchManifest):
                for sample in (one for one in event.live if one.outcome.is_trained):
                    for key in joined.get(f"{sample.rollout_id}.{sample.revision}", []):
                        told.trained.setdefault(request_of[key], event.step)
    return told


def _quantile(ordered: list[float], share: float) -> float | None:
    """Return a quantile; None where it is infinite, or of nothing."""
    if not ordered:
        return None
    value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return round(value, 2) if math.isfinite(value) else None
