"""What a task's machines need against what a host offers: honored, or refused with both numbers."""

import asyncio

import pytest

from penstock.actors.sandbox_host.config import PoolConfig
from penstock.envs.backends import backend_class
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.needs import fit_machine_size, resolve_machine_size
from penstock.envs.sandbox import Capability, IsolationClass, NeedsRefused
from penstock.infra.run.prepare import _check_machine
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import SandboxRecord
from penstock.messages.task import MachineNeeds, Split, Task

UML = backend_class("uml")
OWN = resolve_machine_size(MachineNeeds(), UML)


class SizedMachine:
    """Lives until it is closed."""

    def __init__(self, needs):
        self.needs, self.alive = needs, True
        self.info = SandboxRecord(
            backend="sized", isolation_class="", kernel_digest="", image_digest=""
        )

    async def close(self):
        self.alive = False


class PlainSizes:
    """Starts machines of any size."""

    name, processors_max, memory_mib = "sized", 2, 100
    isolation_class, capabilities = IsolationClass.USER_MODE_KERNEL, frozenset[Capability]()

    def __init__(self, needs=MachineNeeds()):  # noqa: B008
        self.needs = resolve_machine_size(needs, self)

    async def start(self, *, cpu=None, timeout_s=10.0):
        return SizedMachine(self.needs)

    def resized(self, needs):
        return PlainSizes(needs)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"processors": 4}, "processors: the task needs 4, .*'uml' has at most 1"),
        ({"memory_mib": 8192}, "needs 8192 .* this host has 5120"),
        ({"disk_mib": 10_240}, "needs 14629 .* this host has 5120"),
        ({"isolation_min": "hardware_vm"}, "needs hardware_vm, .*'uml' offers user_mode_kernel"),
        ({"isolation_min": "vm"}, "expected one of process, .* got 'vm'"),
        ({"memory_mib": -1}, "expected 0 <= x"),
        ({"disk_mib": 1 << 62}, "expected 0 <= x"),
    ],
)
def test_more_than_a_host_offers_is_refused_with_both_numbers(needs, words):
    with pytest.raises(NeedsRefused, match=words):
        fit_machine_size(MachineNeeds(**needs), OWN, UML, 40)


def test_what_a_task_does_not_name_is_the_pools():
    assert fit_machine_size(MachineNeeds(), OWN, UML, 40) == (OWN, 1)
    size, num_own = fit_machine_size(MachineNeeds(disk_mib=200), OWN, UML, 40)
    assert size == MachineNeeds(memory_mib=286, disk_mib=200, processors=1)
    assert num_own == 3  # of 128 MiB


@pytest.mark.parametrize("offered", list(IsolationClass))
def test_isolation_has_an_order(offered):
    order = ["process", "user_mode_kernel", "emulated_vm", "hardware_vm"]
    backend = PlainSizes()
    backend.isolation_class = offered
    for least in order:
        is_enough = order.index(least) <= order.index(str(offered))
        if is_enough:
            resolve_machine_size(MachineNeeds(isolation_min=least), backend)
        else:
            with pytest.raises(NeedsRefused, match=f"needs {least}"):
                resolve_machine_size(MachineNeeds(isolation_min=least), backend)


async def test_a_larger_machine_counts_as_several_and_memory_is_never_exceeded():
    async with Pool(PlainSizes(), size=2, live_max=4) as pool:
        large = await pool.acquire(60.0, machine=MachineNeeds(memory_mib=250))
        assert large.sandbox.needs.memory_mib == 250
        assert pool.counters().live <= 4
        own = await pool.acquire(60.0)
        assert own.sandbox.needs.memory_mib == 100
        await asyncio.sleep(0.05)  # the pool would keep more ready if it had room
        assert pool.counters().live == 4
        with pytest.raises(NeedsRefused, match=r"needs 500 .* this host has 400"):
            await pool.acquire(60.0, machine=MachineNeeds(memory_mib=500))


def test_a_task_that_no_host_has_room_for_ends_the_preparation_by_name():
    task = Task(
        task_id="big", category="harbor", split=Split.TRAIN, instruction="", files={},
        machine=MachineNeeds(memory_mib=4096),
    )  # fmt: skip
    _check_machine(task, PoolConfig(live_max=32))
    with pytest.raises(ConfigError, match=r"task big: machine.memory_mib: .* 4096 .* has 3968"):
        _check_machine(task, PoolConfig(live_max=31))
