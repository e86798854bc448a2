"""A small world for episodes: the in-memory bus on virtual time, a scripted policy, fake machines.

Machines hold files in memory and run only what this file's tasks need; each can be made to die at
its n-th operation. The scripted policy answers turn by turn from a script, deterministically, and
can break off in the middle of a turn.
"""

import asyncio
import contextlib
import itertools
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec
import pytest
import torch
from tests.sim.rollout.machines import FakeBackend
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.evaluator.actor import Evaluator
from penstock.actors.evaluator.schedule import EvaluatorConfig
from penstock.actors.judge.actor import JudgeActor
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.pacer.actor import Pacer
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.actors.rollout_worker.actor import RolloutWorker
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.actors.sandbox_host.actor import SandboxHost
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.tasks.storage import hidden_tests_key, tasks_key
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.route_segments import seal_routes
from penstock.messages.base import Array, Event, Message, Stream
from penstock.messages.bus import Serve
from penstock.messages.codec import decode
from penstock.messages.errors import ConfigError
from penstock.messages.generation import Generate, ReplicaReported, TokensSampled
from penstock.messages.reading.trajectories import (
    Trajectory,
    last_of,
    own_turns,
    read_trajectory,
)
from penstock.messages.rollout import RolloutFinished, StopReason, ToolCall, TurnSampled
from penstock.messages.task import (
    HiddenTests,
    Limits,
    Purpose,
    Sampling,
    Split,
    StartRollout,
    Task,
)

BUGGY = "def double(x):\n    return x + 1\n"
FIXED = "def double(x):\n    return x * 2\n"
HIDDEN = """\
import m
results = [repr(m.double(x)) for x in (2, 3)]
print("\\n".join(results))
"""
_TEXTS = [BUGGY, FIXED, HIDDEN, "Fix double in m.py", "error: edited done"] * 4

Call = tuple[str, dict[str, str]]
FIX: Call = ("edit_file", {"path": "m.py", "old": "x + 1", "new": "x * 2"})
LOOK: Call = ("read_file", {"path": "m.py"})
FINISH: Call = ("finish", {})
GOOD_SCRIPT: list[list[Call]] = [[LOOK], [FIX], [FINISH]]


def make_task(task_id: str = "t0", split: Split = Split.TRAIN, **limits: float) -> Task:
    return Task(
        task_id=task_id,
        category="operator",
        split=split,
        instruction="Fix double in m.py",
        files={"m.py": BUGGY, "other.py": "x = 1\n"},
        limits=Limits(**limits),
    )


def make_hidden(task_id: str) -> HiddenTests:
    argv = ["python3", "-I", "-S", "_hidden.py"]
    files = {"_hidden.py": HIDDEN}
    return HiddenTests(task_id=task_id, files=files, argv=argv, expected=["4", "6"])


def make_command(rollout_id: str, task: Task | None = None, **changes: object) -> StartRollout:
    fields: dict = {
        "rollout_id": rollout_id, "group_id": "g0", "group_index": 0, "group_size": 1,
        "member": 0, "purpose": Purpose.TRAIN, "task": task or make_task(),
        "sampling": Sampling(seed=1), "policy_version": 0,
    }  # fmt: skip
    return StartRollout(**{**fields, **changes})


def reported(policy_version: int = 0, replica: str = "west", **changes: object) -> ReplicaReported:
    """Say that a replica serves everything."""
    fields: dict = {
        "region": replica.partition(".")[0], "replica": replica, "started_at": 0.0,
        "serves": list(Purpose), "policy_version": policy_version, "num_running_max": 64,
    }  # fmt: skip
    return ReplicaReported(**{**fields, **changes})


class ScriptedPolicy(Actor):
    """Serves `generate.*`: the n-th turn of a session is the n-th entry of its script."""

    role = "generator"
    tick_s = 0.5

    def __init__(self, tokenizer: Tokenizer, replica: str = "west") -> None:
        self.replica = replica
        self.policy_version = 0
        self.scripts: Callable[[str], list[list[Call]]] = lambda _session: GOOD_SCRIPT
        self.token_s = 0.001
        self.slow_sessions: dict[str, float] = {}
        self.breaks: Counter[str] = Counter()
        """Session -> how many of its next requests break off after three tokens."""
        self.break_mode = "error"
        """error, silent, aborted or refused."""
        self.requests: list[Generate] = []
        self._tokenizer = tokenizer
        self._chat = PenstockChat(tokenizer)

    def services(self) -> dict[str, Serve]:
        return {f"generate.{purpose}.{self.replica}": self._generate for purpose in Purpose}

    async def start(self, ctx: Context) -> Effects:
        self._started_at = ctx.now()
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        return (self._report(),)

    async def stop(self, ctx: Context) -> Effects:
        return (msgspec.structs.replace(self._report(), serves=[], is_leaving=True),)

    def _report(self) -> ReplicaReported:
        return reported(self.policy_version, self.replica, started_at=self._started_at)

    def turn_ids(self, session: str, index: int) -> list[int]:
        script = self.scripts(session)
        calls = script[index] if index < len(script) else []
        made = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
        return self._chat.render_turn("ok" if not made else "", made)

    async def _generate(self, request: Message) -> AsyncIterator[Message]:
        assert isinstance(request, Generate)
        self.requests.append(request)
        session = request.session_id
        token_ids = self.turn_ids(session, self._turn_index(request))
        token_ids = token_ids[: request.sampling.num_tokens_max]
        version = self.policy_version
        if self.breaks[session] > 0:
            self.breaks[session] -= 1
            async for reply in self._break_off(request, token_ids[:3], version):
                yield reply
            return
        for start in range(0, len(token_ids), 3):
            chunk = token_ids[start : start + 3]
            await asyncio.sleep(self.slow_sessions.get(session, self.token_s) * len(chunk))
            routes = request.token_ids.shape[0] + len(token_ids) - 1 - request.routes_from
            is_last = start + 3 >= len(token_ids)
            yield self._sampled(request, chunk, version, num_routes=routes if is_last else None)
            version = self.policy_version

    async def _break_off(
        self, request: Generate, chunk: list[int], version: int
    ) -> AsyncIterator[Message]:
        if self.break_mode == "refused":
            raise ConfigError("the request is no good")
        sampled = self._sampled(request, chunk, version, num_routes=None)
        if self.break_mode == "aborted":
            yield msgspec.structs.replace(sampled, stop_reason=StopReason.ABORTED)
            return
        yield sampled
        if self.break_mode == "silent":
            await asyncio.sleep(1e6)
        raise RuntimeError("the generator died")

    def _turn_index(self, request: Generate) -> int:
        """Count the assistant's marks in the context."""
        mark = self._tokenizer.special_id("<|assistant|>")
        ids = struct.unpack(f"<{request.token_ids.shape[0]}i", request.token_ids.data)
        return ids.count(mark) - 1

    def _sampled(
        self, request: Generate, chunk: list[int], version: int, *, num_routes: int | None
    ) -> TokensSampled:
        """Make a chunk; its log-probabilities tell one sampling of a turn from another."""
        count = len(chunk)
        segments = []
        if num_routes is not None:
            routes = torch.zeros((num_routes, 1, 1), dtype=torch.int16)
            place = {"policy_version": version, "first_position": request.routes_from}
            segments = [seal_routes(routes, num_experts=2, **place)]
        number = next(n for n, one in enumerate(self.requests) if one is request)
        logprobs = [-0.001 * number] * count
        return TokensSampled(
            request_id=request.request_id,
            token_ids=Array(dtype="int32", shape=(count,), data=struct.pack(f"<{count}i", *chunk)),
            behavior_logprobs=Array(
                dtype="float32", shape=(count,), data=struct.pack(f"<{count}f", *logprobs)
            ),
            policy_version=version,
            stop_reason=StopReason.STOP if segments else None,
            route_segments=segments,
        )


class Hosted:
    """One running actor."""

    def __init__(self, actor: Actor, host: ActorHost) -> None:
        self.actor = actor
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(host.run(self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await self.task

    async def kill(self) -> None:
        """End it as SIGKILL would: nothing is settled, nothing said."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Whole:
    """A finished rollout, its turns and files in place of what its event says of them."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.event = trajectory.finished
        self.turns, self.files = trajectory.turns, trajectory.files
        self.own_turns = own_turns(trajectory.finished, trajectory.turns)

    def __getattr__(self, name: str) -> object:
        return getattr(self.event, name)


class World:
    """The bus, the store, a policy, machines, and whatever actors a test starts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = PenstockChat(tokenizer)
        self.server = MemoryServer(seed=0, clock=VirtualClock())
        self.store = MemoryStore()
        self.policy = ScriptedPolicy(tokenizer)
        self.backend = FakeBackend()
        self._hosted: list[Hosted] = []
        self._names = itertools.count()
        self.bus = self._connect("test")

    def _connect(self, name: str) -> MemoryBus:
        return MemoryBus(self.server, run_id="test", store=self.store, name=name)

    def set_faults(self, **probabilities: float) -> None:
        self.server.faults = Faults(**probabilities)

    def client(self, name: str = "test") -> HostContext:
        """Return a context of the test's own."""
        identity = ActorIdentity(name=name, incarnation="i", seed=0)
        return HostContext(identity, bus=self.bus, store=self.store, clock=VirtualClock())

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def host(self, actor: Actor, name: str = "") -> Hosted:
        name = name or f"{actor.role}-{next(self._names)}"
        host = ActorHost(
            actor,
            self._connect(name),
            self.store,
            name=name,
            seed=0,
            clock=VirtualClock(),
            incarnation=f"i{next(self._names)}",
        )
        self._hosted.append(Hosted(actor, host))
        return self._hosted[-1]

    def host_worker(self, **settings: object) -> Hosted:
        return self.host(RolloutWorker(self.chat, RolloutWorkerConfig(**settings)))

    def host_judge(self, **settings: object) -> Hosted:
        return self.host(JudgeActor(self.chat, JudgeConfig(**settings)))

    def host_machines(
        self, *, live_max: int = 64, name: str = "host-0", **settings: object
    ) -> Hosted:
        pool = Pool(self.backend, size=0, live_max=live_max, monotonic=VirtualClock().monotonic)
        return self.host(SandboxHost(pool, name, SandboxHostConfig(**settings)))

    def host_pacer(self, **settings: object) -> Hosted:
        return self.host(Pacer(PacerConfig(**settings)))

    def host_evaluator(self, **settings: object) -> Hosted:
        return self.host(Evaluator(EvaluatorConfig(**settings)))

    async def put_tasks(self, num_train: int = 4, num_heldout: int = 4) -> None:
        for split, count in ((Split.TRAIN, num_train), (Split.HELDOUT, num_heldout)):
            tasks = [make_task(f"{split}-{n}", split) for n in range(count)]
            await self.put_split(tasks, [make_hidden(task.task_id) for task in tasks])

    async def put_split(self, tasks: list[Task], hidden: list[HiddenTests]) -> None:
        split = tasks[0].split
        await self.store.put(tasks_key(split), msgspec.msgpack.encode(tasks))
        await self.store.put(hidden_tests_key(split), msgspec.msgpack.encode(hidden))

    async def publish(self, *events: Event) -> None:
        await self.bus.publish(events)

    async def read(self, event_type: type[Event]) -> list[Event]:
        """Return all stored events of a type; rollouts with their turns and files read in."""
        events = [d.event async for d in self.bus.follow([event_type], stop_at_end=True)]
        if event_type is not RolloutFinished:
            return events
        last = last_of(self.bus)
        return [Whole(await read_trajectory(self.store, last, event)) for event in events]

    async def wait_for(self, event_type: type[Event], count: int, within_s: float = 600.0) -> list:
        """Wait until that many events of a type are stored."""
        async with asyncio.timeout(within_s):
            while len(events := await self.read(event_type)) < count:
                await asyncio.sleep(0.05)
        return events

    def commands(self) -> list[StartRollout]:
        """Return what lies on the work queue."""
        stored = self.server.logs[Stream.TASKS].messages()
        events = [decode(message.data) for message in stored]
        return [event for event in events if isinstance(event, StartRollout)]

    async def wait_for_commands(self, count: int) -> list[StartRollout]:
        async with asyncio.timeout(600.0):
            while len(self.commands()) < count:
                await asyncio.sleep(0.05)
        return self.commands()

    async def close(self) -> None:
        for hosted in self._hosted:
            if not hosted.task.done():
                await hosted.stop()
        await self.bus.close()

    async def check_ledger(self) -> None:
        """Every stored turn is in its rollout's trajectory, once, and no other turn is."""
        stored: dict[str, list[TurnSampled]] = defaultdict(list)
        for event in await self.read(TurnSampled):
            stored[event.rollout_id].append(event)
        for rollout in await self.read(RolloutFinished):
            turns = sorted(stored.pop(rollout.rollout_id, []), key=lambda e: e.turn_index)
            first = rollout.num_trunk_turns
            assert [event.turn_index for event in turns] == list(range(first, len(rollout.turns)))
            assert [event.turn for event in turns] == rollout.turns[first:]
        assert not stored


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(_TEXTS, vocab_size=400)


@pytest.fixture
def simulate(
    tokenizer: Tokenizer,
) -> Callable[[Callable[[World], Coroutine]], None]:
    """Return a function that runs a scenario in a world of its own, on virtual time."""

    async def run(scenario: Callable[[World], Coroutine]) -> None:
        world = World(tokenizer)
        try:
            await scenario(world)
        finally:
            await world.close()

    return lambda scenario: run_virtual(run(scenario))
