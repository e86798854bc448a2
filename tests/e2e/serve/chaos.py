"""Weight swaps and kill -9 under load, of a service that learns: what users see, what the log has.

    python -m tests.e2e.serve.chaos RUNS --kills 200 --swaps 1000

serves the finished run `r1` below RUNS, and prints one JSON object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import openai

from penstock.actors.policy.checkpoint import load_published
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.history import read_back
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.step import train_step
from penstock.infra.config.file import load_config
from penstock.infra.run.runs import RunDir, find_run, open_log, open_vault
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.reading.trajectories import open_live_turn
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, SampleEntry
from penstock.messages.weights import WeightsApplied

from ..launched import gone
from .service import Service

NUM_CLIENTS = 3
KILL_PAUSE_S = 0.25
LIMITED_PAUSE_S = 1.0
GENERATORS = ("generator:east", "generator:east/b")
GATEWAYS = ("gateway:a", "gateway:b")
PAIRS = (GENERATORS, GATEWAYS)
"""Of each, one at a time is killed: the other one is what answers meanwhile."""
VICTIMS = (*GENERATORS, "relay:east", "trainer", "nats-server")
SETTINGS = (
    'processes.generator-east-b=["generator:east/b"]',
    'processes.control=["relay:east"]',
    'processes.join=["feedback"]',
    "serve.epoch_samples=1",
    "trainer.live.num_samples_max=1",
    "trainer.staleness_max=1000",
    "pacer.staleness_max=1000",
    "trainer.checkpoint_steps=100",
    "trainer.optimizer.learning_rate=0.01",
    "feedback.reward_wait_s=0.0",
    "run.restarts_max=100000",
)


class Client(threading.Thread):
    """Asks and says what it thinks, over and over; a failed request is a failure of the service."""

    def __init__(self, service: Service, num_retries: int) -> None:
        super().__init__(daemon=True)
        key = (service.folder / "gateway_key").read_text().strip()
        self._client = openai.OpenAI(
            base_url=f"{service.url()}/v1", api_key=key, max_retries=num_retries, timeout=120.0
        )
        self._service = service
        self.versions: dict[str, int] = {}
        """Request id -> the version that the reply's header named."""
        self.failures: list[str] = []
        self.is_over = threading.Event()
        self.num_lost_signals = 0

    def run(self) -> None:
        for number in itertools.count():
            if self.is_over.is_set():
                return
            try:
                answer = self._client.chat.completions.with_raw_response.create(
                    model="policy",
                    messages=[{"role": "user", "content": f"{number} {self.name}"}],
                    max_tokens=12,
                )
            except openai.RateLimitError:
                time.sleep(LIMITED_PAUSE_S)  # Its key's own limit, not the service's failure.
                continue
            except openai.OpenAIError as error:
                self.failures.append(repr(error))
                continue
            request_id = answer.parse().id
            self.versions[request_id] = int(answer.headers["x-policy-version"])
            try:
                body = {"request_id": request_id, "name": "thumbs", "value": number % 2}
                self._service.post("/v1/feedback", body)
            except OSError:
                self.num_lost_signals += 1


class Killer(threading.Thread):
    """kill -9 of one process after the other, each when it is back."""

    def __init__(self, service: Service, num_kills: int, victims: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self._service, self._num_kills, self._victims = service, num_kills, victims
        self.killed: dict[str, int] = dict.fromkeys(victims, 0)
        self._killed_at: dict[str, float] = {}

    def run(self) -> None:
        dead: dict[str, int] = {}
        dice = random.Random(0)
        while sum(self.killed.values()) < self._num_kills:
            victim = dice.choice(self._victims)
            pid = self._service.pid_of(victim)
            others = [one for pair in PAIRS if victim in pair for one in pair if one != victim]
            is_alone = any(not self._is_up(one) for one in others)
            if pid is not None and pid != dead.get(victim) and not is_alone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    dead[victim] = pid
                    self.killed[victim] += 1
                    self._killed_at[victim] = time.time()
            time.sleep(KILL_PAUSE_S)

    def _is_up(self, role: str) -> bool:
        """Whether a gateway listens, or a generator runs."""
        pid = self._service.pid_of(role)
        file = self._service.folder / f"gateway_url.{role.partition(':')[2]}"
        if pid is None or not file.exists():
            return pid is not None
        return file.stat().st_mtime > self._killed_at.get(role, 0.0)


def chaos(
    runs: Path,
    *,
    num_kills: int,
    num_swaps: int,
    wait_s: float,
    victims: tuple[str, ...] = VICTIMS,
    settings: tuple[str, ...] = (),
    num_retries: int = 0,
) -> dict[str, object]:
    """Serve `r1` under load until all that was asked for has happened; return the figures."""
    words = [word for one in (*SETTINGS, *settings) for word in ("--set", one)]
    service = Service(runs, "r1", "--learn", "--ungated", *words)
    started = time.monotonic()
    try:
        first, _ = service.ask()
        clients = [Client(service, num_retries) for _ in range(NUM_CLIENTS)]
        killer = Killer(service, num_kills, victims)
        for thread in (*clients, killer):
            thread.start()
        newest = first
        while killer.is_alive() or newest - first < num_swaps:
            assert service.process.poll() is None, service.output
            if time.monotonic() > started + wait_s:
                break
            time.sleep(1.0)
            seen = [max(client.versions.values(), default=first) for client in clients]
            newest = max(seen)
        for client in clients:
            client.is_over.set()
        for client in clients:
            client.join(150.0)
        service.ask()
        assert service.stop() == 0, service.output
    finally:
        service.end()
    versions = {name: v for client in clients for name, v in client.versions.items()}
    figures = {
        "wall_s": round(time.monotonic() - started, 1),
        "kills": killer.killed,
        "num_kills": sum(killer.killed.values()),
        "requests": len(versions),
        "failed": [text for client in clients for text in client.failures],
        "signals_lost": sum(client.num_lost_signals for client in clients),
        "versions": newest - first,
    }
    sys.stderr.write(f"{figures}\n")
    assert gone(set(service.processes()))
    return figures | asyncio.run(_check_log(find_run("r1", runs), versions))


async def _check_log(run: RunDir, headers: dict[str, int]) -> dict[str, object]:
    """Compare what replies said with what the log has, and tokens with the weights it names."""
    config = load_config(run.config)
    async with open_log(run, "chaos") as bus:
        applied = {
            (delivery.event.replica, delivery.event.policy_version)
            async for delivery in bus.follow([WeightsApplied], stop_at_end=True)
        }
        records = {
            delivery.event.request_id: delivery.event
            async for delivery in bus.follow([InferenceRecorded], stop_at_end=True)
        }
        found = {
            "swaps": len(applied),
            "unrecorded": sum(name not in records for name in headers),
            "wrong_header": sum(
                name in records and records[name].policy_version != version
                for name, version in headers.items()
            ),
            "not_applied": sum(
                (record.replica, span.policy_version) not in applied
                for record in records.values()
                for span in record.turn.summary.version_spans[-1:]
            ),
        }
        return found | await _rescored(run, config, records)


async def _rescored(
    run: RunDir, config, records: dict[str, InferenceRecorded], num_max: int = 8
) -> dict[str, float]:
    """Return k3 of replies under the weights of their version, and under those of another one."""
    dice, store = random.Random(0), run.store()
    vault = open_vault(run)
    single = [r for r in records.values() if len(r.turn.summary.version_spans) == 1]
    chosen = dice.sample(single, min(num_max, len(single)))
    newest = max(record.policy_version for record in records.values())
    own, others = [0.0], [0.0]
    learner = Learner.initialized(config.policy, config.trainer.optimizer, seed=0)
    for record in chosen:
        turn = await open_live_turn(store, vault.open, record.turn, record.request_id)
        entry = SampleEntry(
            rollout_id=record.request_id,
            outcome=Outcome.SOLVED,
            reward=1.0,
            advantage=1.0,
            version_spans=turn.summary.version_spans,
        )
        manifest = BatchManifest(step=1, policy_version=0, groups=[], live=[entry])
        far = 0 if record.policy_version > newest / 2 else newest
        for version, into in ((record.policy_version, own), (far, others)):
            flat, _ = await read_back(StoreIO(store), version)
            load_published(learner.policy, _tensors(flat.tensors))
            turns = {record.request_id: [turn]}
            result = train_step(learner, manifest, turns, config.trainer)
            into.append(abs(result.metrics["mismatch_k3"]))
    return {"rescored": len(chosen), "k3_max": max(own), "k3_of_another_version": max(others)}


def _tensors(arrays):
    import torch

    return {name: torch.from_numpy(array.view("int16")).view(torch.bfloat16)
            for name, array in arrays.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--wait-s", type=float, default=800.0)
    given = parser.parse_args()
    figures = chaos(given.runs, num_kills=given.kills, num_swaps=given.swaps, wait_s=given.wait_s)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
