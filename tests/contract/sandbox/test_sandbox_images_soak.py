"""Layers torn, taken away and put back under many askers: the right machine, or `ImageAbsent`."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from tests.needs import need_layers

from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.layers import Images, layer_folder, layer_path
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.sandbox import ImageAbsent

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(300)]
NUM_IMAGES, NUM_ASKERS, NUM_ASKED, LIVE_MAX = 8, 8, 20, 6


@pytest.fixture
def images(tmp_path):
    need_layers()
    digests = []
    for number in range(NUM_IMAGES):
        source = tmp_path / f"source-{number}"
        source.mkdir()
        (source / "who").write_text(str(number))
        sources = LayerSources(folder=source, target="/opt/x")
        layer = build_layer(f"n{number}", sources, tmp_path / "vm", lambda line: None)
        digests.append(layer.digest)
    return layer_folder(tmp_path / "vm"), tmp_path / "own", digests


def num_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def spoil(shared, own, digests, rng):
    """Take layers away, put torn ones in their place, then whole ones again; until cancelled."""
    while True:
        digest = rng.choice(digests)
        path = layer_path(shared, digest)
        content = path.read_bytes()
        for spoiled in (path, layer_path(own, digest)):
            spoiled.unlink(missing_ok=True)
        await asyncio.sleep(0.1)
        path.write_bytes(b"torn")
        await asyncio.sleep(0.1)
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").replace(path)


async def ask(pool, digests, rng):
    """Return how often the machine was of the image asked for; what else there is fails."""
    num_right = 0
    for _ in range(NUM_ASKED):
        number = rng.randrange(NUM_IMAGES)
        try:
            lease = await pool.acquire(
                60.0, timeout_s=60.0, image=digests[number], reserved_slots=1
            )
        except ImageAbsent:
            continue
        done = await lease.sandbox.exec(["cat", "/opt/x/who"], timeout_s=60.0)
        assert done.stdout == str(number).encode()
        assert pool.counters().live <= LIVE_MAX
        num_right += 1
        if rng.random() < 0.2:
            os.kill(lease.sandbox.process.pid, signal.SIGKILL)
        await pool.release(lease.lease_id)
    return num_right


async def test_layers_that_come_and_go_give_no_machine_of_another_and_leave_nothing(images):
    shared, own, digests = images
    rng = random.Random(7)
    before = num_descriptors()
    known = Images(
        lambda layer: open_backend("uml", layer=layer), own=own, shared=shared, num_max=3
    )
    pool = Pool(open_backend("uml"), size=1, live_max=LIVE_MAX, images=known, boot_timeout_s=60.0)
    async with pool:
        spoiling = asyncio.create_task(spoil(shared, own, digests, rng))
        counts = await asyncio.gather(*(ask(pool, digests, rng) for _ in range(NUM_ASKERS)))
        spoiling.cancel()
        await asyncio.gather(spoiling, return_exceptions=True)
        assert sum(counts) > NUM_ASKERS * NUM_ASKED / 2
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
    assert num_descriptors() == before
