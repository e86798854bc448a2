"""A trainer's weights, the stores between, and engines that hold bits."""

from contextlib import asynccontextmanager

import numpy as np

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import Receiver
from penstock.kernels.digest import root_digest
from penstock.messages.errors import (
    CorruptDataError,
    DeadlineError,
    RemoteCallError,
    StoreFullError,
)
from penstock.messages.rpc import RemoteError
from penstock.messages.weights import WeightsPublished, WeightsRelayed

SHAPES = {
    "embed": (40, 16),
    "layers.0.mlp": (3, 16, 24),
    "norm": (16,),
    "scale": (),
    "none": (0, 4),
}


class Adam:
    """Moves weights as Adam does: normalized steps with momentum, noise and some drift."""

    def __init__(self, shape, learning_rate=3e-6, seed=0) -> None:
        self.rng = np.random.default_rng(seed)
        self.learning_rate = learning_rate
        self.drift = 0.2 * self.rng.standard_normal(shape).astype(np.float32)
        self.mean = np.zeros(shape, np.float32)
        self.square = np.ones(shape, np.float32)

    def step(self, weights):
        noise = self.rng.standard_normal(weights.shape).astype(np.float32)
        gradient = self.drift + noise
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.95 * self.square + 0.05 * gradient**2
        return weights - self.learning_rate * self.mean / np.sqrt(self.square)


class FaultyStore:
    """A store that counts, and fails on demand."""

    def __init__(self, inner):
        self.inner = inner
        self.num_gets: dict[str, int] = {}
        self.num_full = 0
        self.num_flips = 0
        self.exists, self.delete, self.keys = inner.exists, inner.delete, inner.keys

    async def put(self, key, data):
        if self.num_full:
            self.num_full -= 1
            raise StoreFullError("no space left on device")
        await self.inner.put(key, data)

    async def get(self, key):
        self.num_gets[key] = self.num_gets.get(key, 0) + 1
        data = await self.inner.get(key)
        if self.num_flips and "/manifest-" not in key and "head" not in key:
            self.num_flips -= 1
            data = flipped(data)
        return data

    async def damage(self, key):
        data = await self.inner.get(key)
        await self.inner.delete(key)
        await self.inner.put(key, flipped(data))

    async def tear(self, key):
        """Leave half of an object, as a crash of a lesser store would."""
        data = await self.inner.get(key)
        await self.inner.delete(key)
        await self.inner.put(key, data[: len(data) // 2])


async def manifest_in(store, folder):
    """Return the key of the only manifest in a folder."""
    (key,) = await store.keys(f"weights/{folder}/manifest-")
    return key


def flipped(data):
    """Flip a bit in the middle."""
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 0x10]) + data[half + 1 :]


async def offload(function, *args):
    """Work in place: the virtual clock knows no threads."""
    return function(*args)


class FakeContext:
    """As much of a context as these actors use; sleeping takes no time."""

    def __init__(self, store):
        self.store = store
        self.published = []
        self.gauges = {}
        self.slept_s = 0.0
        self.services = {}
        self.num_tile_bytes = 0

    def monotonic(self):
        return self.slept_s

    def now(self):
        return 1_700_000_000.0 + self.slept_s

    async def stream_request(self, service, message, *, idle_s, reason=""):
        if service not in self.services:
            raise DeadlineError(f"nobody serves {service}")
        async for reply in self.services[service](message):
            if isinstance(reply, RemoteError):
                raise RemoteCallError(reply.kind, reply.error)
            self.num_tile_bytes += len(reply.data)
            yield reply

    async def last(self, event_type, key=None):
        found = [
            event
            for event in self.published
            if isinstance(event, event_type) and key in (None, event.key())
        ]
        return found[-1] if found else None

    async def sleep(self, duration_s):
        self.slept_s += duration_s

    async def publish(self, *events):
        self.published += events
        return []

    async def offload(self, function, *args):
        return function(*args)

    def set_gauge(self, name, value):
        self.gauges[name] = value

    @asynccontextmanager
    async def waiting(self, target, reason, *, deadline_s, policy_version=-1):
        yield


class FakeEngine:
    """Holds weights as bits; can die or write wrongly in the middle of an update."""

    def __init__(self):
        self.live = {}
        self.staged = {}
        self.dies = False
        self.num_wrong = 0
        self.num_whole = 0

    async def begin_update(self):
        self.staged = {name: array.copy() for name, array in self.live.items()}

    async def apply(self, patches):
        for number, (name, patch) in enumerate(patches.items()):
            if self.dies and number == 1:
                raise ConnectionResetError("killed mid-apply")
            if isinstance(patch, np.ndarray):
                self.num_whole += 1
                self.staged[name] = patch.copy()
            else:
                self.staged[name].reshape(-1)[patch.flat_indices] = patch.values
        if self.num_wrong:
            self.num_wrong -= 1
            self.staged["norm"][3] ^= 1

    async def commit(self, policy_version, digest=None, probe=()):
        if root_digest(self.staged) != digest:
            raise CorruptDataError("staged weights have another digest")
        self.live = self.staged
        return 0.5

    async def digest(self):
        return root_digest(self.live)

    def probe(self):
        return []


def bits(weights):
    return {name: (w.view(np.uint32) >> 16).astype(np.uint16) for name, w in weights.items()}


class World:
    """One trainer's weights and store, and the regions that follow."""

    def __init__(self, make_store, seed=5, shapes=SHAPES) -> None:
        self.make_store = make_store
        self.stores: dict[str, FaultyStore] = {}
        self.origin = FaultyStore(make_store("origin"))
        self.context = FakeContext(self.origin)
        self.publisher = self.new_publisher()
        self.rng = np.random.default_rng(seed)
        self.weights = {
            name: (self.rng.standard_normal(shape) * 0.05).astype(np.float32).reshape(shape)
            for name, shape in shapes.items()
        }
        self.manifests: list[WeightsPublished] = []

    def train(self) -> None:
        if self.manifests:
            for name, array in self.weights.items():
                noise = 1e-5 * self.rng.standard_normal(array.shape)
                self.weights[name] = (array + noise).astype(np.float32).reshape(array.shape)

    async def step(self) -> WeightsPublished:
        self.train()
        return await self.prepare()

    async def prepare(self) -> WeightsPublished:
        version = len(self.manifests)
        manifest = await self.publisher.prepare(
            version, bits(self.weights), optimizer_step=version, config_json="{}"
        )
        self.manifests.append(manifest)
        return manifest

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()

    def new_publisher(self) -> Publisher:
        return Publisher(StoreIO(self.origin, self.context.sleep, offload))

    def history(self, version: int) -> int:
        """Return the bytes of the chain of deltas up to a version."""
        return sum(s.num_bytes for m in self.manifests[1 : version + 1] for s in m.shards)

    def store(self, region: str) -> FaultyStore:
        if region not in self.stores:
            self.stores[region] = FaultyStore(self.make_store(region))
        return self.stores[region]

    async def region(self, name: str) -> tuple[Relay, FaultyStore]:
        store = self.store(name)
        relay = Relay(name, store)
        await relay.start(self.context)
        self.context.services |= relay.services()
        return relay, store

    async def relay(self, relay: Relay, first: int = 0) -> None:
        for manifest in self.manifests[first:]:
            await relay.on_weights_published(manifest, self.context)

    async def wake(self, receiver: Receiver, version: int | None = None, region: str = "west"):
        event = WeightsRelayed(
            region=region,
            policy_version=len(self.manifests) - 1 if version is None else version,
            num_bytes=0,
            fetch_ms=0.0,
        )
        return await receiver.on_weights_relayed(event, self.context)

    def converged(self, engine: FakeEngine) -> bool:
        return root_digest(engine.live) == root_digest(bits(self.weights))
