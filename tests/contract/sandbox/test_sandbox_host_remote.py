"""A machine on lease over the bus is a sandbox like any other: the same suite."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.actors.sandbox_host.actor import SandboxHost
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.envs.backends import open_backend
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import BackendUnavailable
from penstock.envs.sandbox_client.client import LeaseSpec, RemoteSandbox, lease_sandbox
from penstock.infra.stores.memory import MemoryStore

from .check_sandbox import (
    CHECKS,
    a_cancelled_call_kills_its_program,
    after_close_every_call_fails,
)

pytestmark = pytest.mark.vm
ONLY_LOCAL = {
    a_cancelled_call_kills_its_program,  # the host hears nothing of it: the command's bound holds
    after_close_every_call_fails,  # asks for `alive`, which only a local machine has
}


@contextlib.asynccontextmanager
async def remote_machine() -> AsyncIterator[RemoteSandbox]:
    try:
        backend = open_backend("process", allow_process=True)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    clock = SystemClock()
    server = MemoryServer(seed=0, clock=clock)
    store = MemoryStore()
    host_bus, bus = (
        MemoryBus(server, run_id="test", store=store, name=name) for name in ("host", "test")
    )
    config = SandboxHostConfig(egress_addresses=True)
    host = SandboxHost(Pool(backend, size=0, live_max=2), "host-0", config)
    stop = asyncio.Event()
    running = asyncio.create_task(
        ActorHost(host, host_bus, store, name="sandbox-0", seed=0).run(stop)
    )
    identity = ActorIdentity(name="test", seed=0, incarnation="i")
    ctx = HostContext(identity, bus=bus, store=store, clock=clock)
    try:
        async with lease_sandbox(ctx, "lease-1", LeaseSpec(holder="test")) as sandbox:
            yield sandbox
    finally:
        stop.set()
        await running
        await ctx.close()
        await host_bus.close()
        await bus.close()


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c not in ONLY_LOCAL], ids=lambda check: check.__name__
)
async def test_remote_machine(check) -> None:
    async with remote_machine() as sandbox:
        await check(sandbox)
