"""Two hosts and tasks of three images: real machines, graded on the task's own image."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.needs import need_layers
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.trajectories import trajectory

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.task_steps import HiddenTestsJudge
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.actors.sandbox_host.actor import SandboxHost
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.scheduler.actor import SandboxScheduler
from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.layers import Images, image_digest, layer_path
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.sandbox import ImageAbsent
from penstock.envs.sandbox_client.client import GroupSpec, LeaseSpec, lease_sandbox
from penstock.envs.tasks.storage import GradedTask
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.requests.scheduler import PlaceGroup
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.task import HiddenTests, Purpose, Split, Task

pytestmark = [pytest.mark.vm, pytest.mark.timeout(200)]
HOSTS = ("h0", "h1")
PACKAGES = "/usr/local/lib/python3.11/dist-packages"


def build(cache, folder, name):
    """Build a layer with one Python module, `name`, whose `WHO` is its name."""
    source = folder / name
    source.mkdir()
    (source / f"{name}.py").write_text(f"WHO = {name!r}\n")
    sources = LayerSources(folder=source, target=PACKAGES)
    return build_layer(name, sources, cache, lambda line: None).digest


class TwoHosts:
    """A scheduler and two hosts, each with a folder of layers of its own, over one shared cache."""

    def __init__(self, tmp_path):
        self.cache = tmp_path / "cache"
        self.own = {name: tmp_path / name for name in HOSTS}
        self.store, self.stop = MemoryStore(), asyncio.Event()
        self.server = MemoryServer(seed=0, clock=SystemClock())
        identity = ActorIdentity(name="test", seed=0, incarnation="i")
        self.ctx = HostContext(
            identity, bus=self._bus("test"), store=self.store, clock=SystemClock()
        )
        self.scheduler = SandboxScheduler()
        actors = {"scheduler": self.scheduler} | {name: self._host(name) for name in HOSTS}
        self.running = [
            asyncio.create_task(
                ActorHost(actor, self._bus(name), self.store, name=name, seed=0).run(self.stop)
            )
            for name, actor in actors.items()
        ]

    def _bus(self, name):
        return MemoryBus(self.server, run_id="test", store=self.store, name=name)

    def _host(self, name):
        shared = self.cache / "images"
        images = Images(
            lambda layer: open_backend("uml", layer=layer), own=self.own[name], shared=shared
        )
        pool = Pool(open_backend("uml"), size=0, live_max=6, images=images, boot_timeout_s=60.0)
        return SandboxHost(
            pool, name, SandboxHostConfig(reports_to_scheduler=True, acquire_s_max=60.0)
        )

    def held(self, name):
        """Return the layers that a host has copied."""
        folder = self.own[name]
        return {path.stem for path in folder.iterdir()} if folder.is_dir() else set()

    @asynccontextmanager
    async def machine(self, group_id, image):
        spec = LeaseSpec(
            holder="test",
            image_digest=image,
            margin_s=60.0,
            group=GroupSpec(group_id=group_id, num_machines=1),
        )
        async with lease_sandbox(self.ctx, f"{group_id}.0", spec) as sandbox:
            yield sandbox

    async def place(self, group_id, avoid_host=""):
        wanted = PlaceGroup(group_id=group_id, holder="test", num_machines=1, avoid_host=avoid_host)
        return (await self.ctx.request("scheduler", wanted, deadline_s=10.0)).host

    async def close(self):
        self.stop.set()
        await asyncio.gather(*self.running)
        await self.ctx.close()


@pytest.fixture
async def fleet(tmp_path):
    need_layers()
    hosts = TwoHosts(tmp_path)
    yield hosts
    await hosts.close()


def task_of(image, name):
    hidden = HiddenTests(
        task_id=f"task-{name}",
        files={"_hidden.py": f"import answer, {name}\nprint(answer.SAID == {name}.WHO)\n"},
        argv=["python3", "_hidden.py"],
        expected=["True"],
        timeout_s=60.0,
    )
    task = Task(
        task_id=hidden.task_id, category="image", split=Split.TRAIN, image=image,
        instruction="Say who", files={"answer.py": "SAID = ''\n"},
    )  # fmt: skip
    return GradedTask(task=task, hidden=hidden)


def group_of(number, graded):
    return f"{graded.task.task_id}-{number}"


async def attempt(fleet, group_id, graded):
    """Work on a task in a machine of its image: what its module says goes into the answer."""
    name = graded.task.task_id.removeprefix("task-")
    async with fleet.machine(group_id, graded.task.image) as sandbox:
        await sandbox.write_files({"answer.py": b""})
        script = f"import {name}; open('answer.py', 'w').write(f'SAID = {{{name}.WHO!r}}\\n')"
        done = await sandbox.exec(["python3", "-c", script], timeout_s=60.0)
        assert done.exit_code == 0, done
        files = {"answer.py": await sandbox.read_file("answer.py", 1000)}
        host, record = sandbox._leased.host, sandbox.info
    rollout = trajectory(
        rollout_id=f"r-{group_id}", group_id=group_id, group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id=graded.task.task_id, category="image",
        end=EpisodeEnd.FINISHED, turns=[], files=files, sandbox=record,
    )  # fmt: skip
    return host, rollout


@pytest.mark.slow
async def test_tasks_run_and_are_graded_on_their_image_where_it_is(fleet, tmp_path):
    images = {name: build(fleet.cache, tmp_path, name) for name in ("alpha", "beta")}
    tasks = [task_of(image, name) for name, image in images.items()]
    judge = HiddenTestsJudge(JudgeConfig(places_machines=True))
    base = open_backend("uml").assets.image_digest
    await asyncio.sleep(3.0)  # The scheduler listens to hosts before it places anything.
    first = await fleet.place(group_of(0, tasks[0]))
    await fleet.place(group_of(0, tasks[1]), avoid_host=first)  # Neither is a holder by chance.
    seen = []
    for number in range(3):
        attempts = [attempt(fleet, group_of(number, task), task) for task in tasks]
        done = await asyncio.gather(*attempts)
        await asyncio.sleep(2.2)  # Hosts report that the machines have ended.
        graded = [
            judge.judge(rollout, task, fleet.ctx)
            for (_, rollout), task in zip(done, tasks, strict=True)
        ]
        found = await asyncio.gather(*graded)
        for (_, rollout), task, findings in zip(done, tasks, found, strict=True):
            assert findings.outcome is Outcome.SOLVED, findings
            expected = image_digest(base, layer_path(tmp_path, task.task.image))
            assert (
                rollout.finished.sandbox.image_digest == findings.sandbox.image_digest == expected
            )
        await asyncio.sleep(2.2)
        seen.append([host for host, _ in done])
    assert set(seen[0]) == set(HOSTS)
    assert seen[1] == seen[2] == seen[0]
    assert [fleet.held(host) for host in seen[0]] == [{images["alpha"]}, {images["beta"]}]
    tally = fleet.scheduler._tally
    assert (tally["placed"], tally["image_hits"]) == (14, 10)


async def test_an_image_that_no_host_can_get_is_absent_and_masks_the_episode(fleet, tmp_path):
    await asyncio.sleep(3.0)
    for number, image in enumerate(("0" * 64, "python:3.11-slim")):
        with pytest.raises(ImageAbsent, match="image absent"):
            async with fleet.machine(f"g{number}", image):
                pass
    graded = task_of("0" * 64, "alpha")
    rollout = trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id="t", category="image",
        end=EpisodeEnd.FINISHED, turns=[], files={"answer.py": b"SAID = 1\n"},
    )  # fmt: skip
    judge = HiddenTestsJudge(JudgeConfig(places_machines=True))
    findings = await judge.judge(rollout, graded, fleet.ctx)
    assert findings.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert "image absent" in findings.detail
