"""One pool, several images: who asks gets its own, within the bounds of all machines together."""

import asyncio
import hashlib

import pytest

from penstock.envs.microvm.images.layers import Images, layer_path
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import ImageAbsent, SandboxDied, SandboxError
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import SandboxRecord


class PlainMachine:
    def __init__(self, image):
        self.info = SandboxRecord(
            backend="plain", isolation_class="none", kernel_digest="", image_digest=image
        )
        self.alive = True

    async def close(self):
        self.alive = False


class PlainBackend:
    """Boots at once, or never."""

    name = "plain"
    isolation_class = "none"
    capabilities = frozenset()

    def __init__(self, image="base"):
        self.image = image
        self.is_broken = False
        self.error = SandboxDied("no boot today")
        self.machines = []

    async def start(self, *, cpu=None, timeout_s=10.0):
        await asyncio.sleep(0)
        if self.is_broken:
            raise self.error
        self.machines.append(PlainMachine(self.image))
        return self.machines[-1]

    @property
    def num_live(self):
        return sum(machine.alive for machine in self.machines)


class Shop:
    """Layers in a shared folder, a host's own folder, and the backends that were opened."""

    def __init__(self, tmp_path, **options):
        self.shared, self.own = tmp_path / "shared", tmp_path / "own"
        self.shared.mkdir()
        self.base = PlainBackend()
        self.opened = {}
        self.images = Images(self.open, own=self.own, shared=self.shared, **options)

    def add(self, text):
        digest = hashlib.sha256(text.encode()).hexdigest()
        layer_path(self.shared, digest).write_text(text)
        return digest

    def open(self, path):
        self.opened[path.stem] = PlainBackend(path.stem)
        return self.opened[path.stem]

    def pool(self, **options):
        return Pool(self.base, images=self.images, **{"size": 0, "live_max": 4} | options)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_who_asks_for_an_image_gets_a_machine_of_it(tmp_path):
    shop = Shop(tmp_path)
    one, two = shop.add("one"), shop.add("two")
    async with shop.pool() as pool:
        asked = [pool.acquire(60.0, image=image) for image in ("", one, two, one)]
        leases = await asyncio.gather(*asked)
        assert [x.sandbox.info.image_digest for x in leases] == ["base", one, two, one]
        assert set(pool.ready_images()) == {one, two}
        assert layer_path(shop.own, one).read_text() == "one"


async def test_one_machine_of_an_image_stands_by_after_it_was_asked_for(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    async with shop.pool(size=1) as pool:
        await pool.acquire(60.0, image=one)
        await until(lambda: pool.counters().idle == 2)
        assert (shop.base.num_live, shop.opened[one].num_live) == (1, 2)


async def test_idle_machines_of_one_image_make_room_for_another(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    async with shop.pool(size=2, live_max=2) as pool:
        await until(lambda: pool.counters().idle == 2)
        leases = [await pool.acquire(60.0, image=one) for _ in range(2)]
        assert [x.sandbox.info.image_digest for x in leases] == [one, one]
        assert (shop.base.num_live, pool.counters().live) == (0, 2)
        with pytest.raises(DeadlineError):
            await pool.acquire(60.0, timeout_s=0.01)
        await pool.release(leases[0].lease_id)
        assert (await pool.acquire(60.0)).sandbox.info.image_digest == "base"


async def test_an_image_that_is_not_there_is_said_to_be_absent(tmp_path):
    shop = Shop(tmp_path)
    false = shop.add("one")
    layer_path(shop.shared, false).write_text("something else")
    async with shop.pool() as pool:
        for image in ("0" * 64, "python:3.11-slim", "../../etc/passwd", false):
            with pytest.raises(ImageAbsent, match="image absent"):
                await pool.acquire(60.0, image=image)
        assert pool.ready_images() == []
        assert await pool.acquire(60.0)
    assert not shop.own.exists(), "nothing is copied"
    async with Pool(PlainBackend(), size=0, live_max=1) as pool:
        with pytest.raises(ImageAbsent, match="this host has only one image"):
            await pool.acquire(60.0, image=false)


async def test_the_image_not_asked_for_for_longest_makes_way(tmp_path):
    shop = Shop(tmp_path, num_max=2)
    one, two, three = (shop.add(text) for text in ("one", "two", "three"))
    async with shop.pool(live_max=9) as pool:
        for image in (one, two, one, three):
            lease = await pool.acquire(60.0, image=image)
            await pool.release(lease.lease_id)
            await until(lambda: not any(image_pool.in_use for image_pool in pool._image_pools))
        assert pool.ready_images() == [one, three]
        await until(lambda: shop.opened[two].num_live == 0)
        await pool.acquire(60.0, image=shop.add("four"))
        assert not layer_path(shop.own, two).exists()


async def test_a_broken_image_holds_up_no_other(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    async with shop.pool() as pool:
        await pool.acquire(60.0, image=one)
        await until(lambda: pool.counters().idle == 1)
        shop.opened[one].is_broken = True
        await pool.acquire(60.0, image=one)
        with pytest.raises(SandboxDied, match="no boot today"):
            await pool.acquire(60.0, image=one)
        assert await pool.acquire(60.0)


async def test_what_a_killed_host_left_is_removed(tmp_path):
    shop = Shop(tmp_path, num_max=2)
    one, two = shop.add("one"), shop.add("two")
    shop.own.mkdir()
    for name in (f"{two}.erofs", f"{one}.partial"):
        (shop.own / name).write_text("left")
    async with shop.pool() as pool:
        await pool.acquire(60.0, image=one)
        assert {path.name for path in shop.own.iterdir()} == {f"{one}.erofs", f"{two}.erofs"}
        await pool.acquire(60.0, image=shop.add("three"))
    assert not layer_path(shop.own, two).exists()


async def test_no_machine_has_a_layer_that_is_not_what_its_name_says(tmp_path):
    shop = Shop(tmp_path)
    shared, own = shop.add("shared"), shop.add("own")
    layer_path(shop.shared, shared).write_text("torn")
    images = Images(shop.open, shared=shop.shared)
    async with Pool(shop.base, size=0, live_max=1, images=images) as pool:
        with pytest.raises(ImageAbsent, match="does not match its digest"):
            await pool.acquire(60.0, image=shared)
    shop.own.mkdir()
    layer_path(shop.own, own).write_text("torn")
    async with shop.pool() as pool:
        await pool.acquire(60.0, image=own)
    assert layer_path(shop.own, own).read_text() == "own"


async def test_a_folder_that_cannot_hold_layers_is_a_typed_failure(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    shop.own.write_text("no folder")
    async with shop.pool() as pool:
        with pytest.raises(SandboxError, match=one):
            await pool.acquire(60.0, image=one)


async def test_who_waits_for_a_broken_image_costs_no_other_its_idle_machines(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    async with shop.pool(size=2, live_max=2) as pool:
        lease = await pool.acquire(60.0, image=one)
        await pool.release(lease.lease_id)
        shop.opened[one].is_broken = True
        await until(lambda: shop.base.num_live + shop.opened[one].num_live == 2)
        num_before = len(shop.base.machines)
        asked = [pool.acquire(60.0, image=one, timeout_s=0.5) for _ in range(6)]
        assert None not in await asyncio.gather(*asked, return_exceptions=True)
        assert len(shop.base.machines) - num_before < 20


async def test_who_is_held_back_gets_a_machine_of_an_image_that_made_way_meanwhile(tmp_path):
    shop = Shop(tmp_path, num_max=1)
    one, two = shop.add("one"), shop.add("two")
    async with shop.pool(live_max=2) as pool:
        first = await pool.acquire(60.0)
        held_back = asyncio.create_task(pool.acquire(60.0, image=one, reserved_slots=1))
        await until(lambda: pool.ready_images() == [one])
        second = await pool.acquire(60.0, image=two)
        assert pool.ready_images() == [two]
        for lease in (first, second):
            await pool.release(lease.lease_id)
        assert (await held_back).sandbox.info.image_digest == one


async def test_an_image_that_goes_is_absent_until_it_is_there_again(tmp_path):
    shop = Shop(tmp_path)
    one = shop.add("one")
    async with shop.pool() as pool:
        lease = await pool.acquire(60.0, image=one)
        await until(lambda: pool.counters().idle == 1)
        gone = shop.opened[one]
        gone.is_broken, gone.error = True, ImageAbsent("image absent: gone")
        for path in (layer_path(shop.shared, one), layer_path(shop.own, one)):
            path.unlink()
        await pool.acquire(60.0, image=one)
        await until(lambda: pool.ready_images() == [])
        asked = [pool.acquire(60.0, image=one) for _ in range(3)]
        failures = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(failure) for failure in failures} == {ImageAbsent}
        assert lease.sandbox.alive
        shop.add("one")
        assert (await pool.acquire(60.0, image=one)).sandbox.info.image_digest == one
        assert pool.ready_images() == [one]


async def test_the_image_not_asked_for_for_longest_gives_its_idle_machine_up_first(tmp_path):
    shop = Shop(tmp_path)
    one, two, three = (shop.add(text) for text in ("one", "two", "three"))
    async with shop.pool(size=1, live_max=3) as pool:
        for image in (one, two):
            lease = await pool.acquire(60.0, image=image)
            await pool.release(lease.lease_id)
            await until(lambda image=image: shop.opened[image].num_live == 1)
        await until(lambda: pool.counters().idle == 3)
        await pool.acquire(60.0, image=three)
        assert [shop.opened[image].num_live for image in (one, two)] == [0, 1]
        assert shop.base.num_live == 1
