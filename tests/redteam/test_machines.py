"""Programs that attack their machine, and a machine's host process that attacks its host."""

import asyncio
import os
import platform
import struct
from pathlib import Path

import pytest
from tests.contract.sandbox.check_sandbox import FILL_SYSTEM_V

from penstock.envs.backends import open_backend
from penstock.envs.microvm.confinement import groups
from penstock.envs.microvm.confinement.confinement import UID_FIRST
from penstock.envs.microvm.confinement.filters import (
    REFUSED_CALLS,
    UML_CALLS,
    allow_only,
    refuse_only,
)
from penstock.envs.microvm.confinement.groups import CgroupLimits, find_cgroup_parent
from penstock.envs.microvm.host_process import OUTPUT_BYTES_MAX, HostProcess, process_tree
from penstock.envs.sandbox import BackendUnavailable
from penstock.messages.task import MachineNeeds

pytestmark = pytest.mark.timeout(120)
X86_64, I386 = 0xC000003E, 0x40000003
ALLOWED, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
CLONE, CLONE3, CLONE_THREAD = 56, 435, 0x00010F00
NEW_NAMESPACES = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]


def judge_call(program: bytes, number: int, argument: int = 0, architecture: int = X86_64) -> int:
    """Run a BPF program over one system call, as the kernel does."""
    data = struct.pack("<IIQQ", number, architecture, 0, argument)
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case _:
                assert code == 0x06
                return operand


def test_a_program_that_breaks_out_of_its_user_mode_kernel_may_call_nothing_else():
    program = allow_only(UML_CALLS.values())
    answers = {number: judge_call(program, number) for number in range(600)}
    allowed = {number for number, answer in answers.items() if answer == ALLOWED}
    assert allowed == {*UML_CALLS.values(), CLONE}
    assert not allowed & set(REFUSED_CALLS.values())
    assert answers[CLONE3] == ENOSYS


@pytest.mark.parametrize("program", [allow_only(UML_CALLS.values()), refuse_only([101])])
@pytest.mark.parametrize("flag", NEW_NAMESPACES)
def test_no_process_makes_a_namespace(program, flag):
    assert judge_call(program, CLONE, CLONE_THREAD) == ALLOWED
    assert judge_call(program, CLONE, CLONE_THREAD | flag) == EPERM


@pytest.mark.parametrize("program", [allow_only(UML_CALLS.values()), refuse_only([101])])
def test_other_ways_into_the_kernel_are_refused(program):
    assert judge_call(program, 0, architecture=I386) == EPERM
    assert judge_call(program, 0x40000000) == EPERM  # x32's numbers


def machine_of(name: str):
    try:
        return open_backend(name, allow_process=True)
    except BackendUnavailable as absent:
        pytest.skip(str(absent))


ESCAPES = {
    "io_uring_setup": (425, 8, 0),
    "userfaultfd": (323, 1),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, 0, 0, 0, 0, -3),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "fsopen": (430, 0, 0),
    "unshare": (272, 1 << 28),
    "setns": (308, 0, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86-64")
async def test_a_process_machine_reaches_no_risky_part_of_the_hosts_kernel():
    machine = await machine_of("process").start()
    script = (
        "import ctypes, errno\n"
        "call = ctypes.CDLL(None, use_errno=True).syscall\n"
        f"for name, numbers in {ESCAPES!r}.items():\n"
        "    done = call(*(ctypes.c_long(n) for n in numbers))\n"
        "    print(name, done, errno.errorcode.get(ctypes.get_errno()))\n"
    )
    try:
        result = await machine.exec(["python3", "-c", script], timeout_s=30.0)
    finally:
        await machine.close()
    assert result.stdout.decode().splitlines() == [f"{name} -1 EPERM" for name in ESCAPES]


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.vm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives machines users of their own")
async def test_no_process_of_a_machine_is_root_on_its_host_or_shares_a_user_with_another():
    backend = machine_of("uml")
    machines = [await backend.start(timeout_s=30.0) for _ in range(2)]
    try:
        users = []
        for machine in machines:
            found = [status_of(pid) for pid in process_tree(machine.process.pid)]
            users.append({uid for each in found for uid in each["Uid"].split()})
            assert all(each["NoNewPrivs"] == "1" for each in found[2:])
            assert all(each["Seccomp"] == "2" for each in found[2:])
    finally:
        await asyncio.gather(*(machine.close() for machine in machines))
    assert all(int(uid) >= UID_FIRST for each in users for uid in each)
    assert not users[0] & users[1]


@pytest.mark.vm
async def test_a_machines_process_has_limits_and_groups_which_end_with_it(monkeypatch):
    # A busy kernel takes longer to end processes than closing waits.
    monkeypatch.setattr(groups, "_REMOVE_PAUSES_S", (0.01,) * 2000)
    if find_cgroup_parent() is None:
        pytest.skip("no control groups can be made here")
    machine = await machine_of("uml").start(timeout_s=30.0)
    pid = process_tree(machine.process.pid)[2]
    limits = Path(f"/proc/{pid}/limits").read_text()
    folders = list(machine.process.group.folders)
    try:
        assert all(str(pid) in (folder / "cgroup.procs").read_text() for folder in folders)
        assert {"memory_group", "pids_group", "limits"} <= set(machine.info.confinement)
    finally:
        await machine.close()
    for line in ("core file size        0", "locked memory         0", "msgqueue size         0"):
        assert f"Max {line}" in limits
    assert not any(folder.exists() for folder in folders)


def test_a_group_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    home = find_cgroup_parent()
    if home is None:
        pytest.skip("no control groups can be made here")
    folders = set(home.folders.values())

    def own_groups():
        """Other processes make and remove theirs meanwhile."""
        return {group for folder in folders for group in folder.glob(f"penstock-{os.getpid()}-*")}

    before = own_groups()
    with pytest.raises(OSError):
        home.make(CgroupLimits(memory_bytes=-5, num_processes=10))
    assert own_groups() <= before


async def test_a_machines_process_that_prints_without_end_fills_no_memory():
    process = HostProcess(["/bin/sh", "-c", "head -c 10000000 /dev/zero; echo gone >&2"], None, ())
    await asyncio.to_thread(process._popen.wait)
    assert os.fstat(process._words).st_size == OUTPUT_BYTES_MAX
    await process.kill()


FILL = "cat /dev/zero > {0}/big; ls -s {0} >&2; df -k {0} >&2"
SEGMENTS = """
import ctypes
get = ctypes.CDLL(None, use_errno=True).shmget
at = ctypes.CDLL(None).shmat
at.restype = ctypes.c_void_p
made = 0
for key in range(1, 1000):
    segment = get(key, 4 << 20, 0o1600)
    if segment < 0:
        break
    ctypes.memset(at(segment, None, 0), 1, 4 << 20)
    made += 1
print("made", made)
"""
INODES = """
for folder in ("/tmp", "/dev/shm"):
    try:
        for n in range(200_000):
            open(f"{folder}/{n}", "x").close()
    except OSError as error:
        print(folder, error.strerror)
"""
HOG = "held = []\nwhile True: held.append(bytearray(b'x' * (1 << 20)))"
OWN_MOUNT = (
    "unshare --user --map-root-user --mount sh -c"
    " 'mount -t tmpfs -o size=100% none /mnt; cat /dev/zero > /mnt/big'"
)
BOMB = "bomb() { bomb | bomb & }; bomb; sleep 5"


async def attack(machine, argv: list[str], timeout_s: float = 30.0, bytes_max: int = 65536):
    return await machine.exec(argv, timeout_s=timeout_s, output_bytes_max=bytes_max)


@pytest.mark.vm
async def test_no_program_fills_its_machine_to_death():
    """One after the other, and what each leaves behind stays: the machine must survive the sum."""
    machine = await machine_of("uml").start(timeout_s=30.0)
    try:
        inodes = await attack(machine, ["python3", "-c", INODES])
        assert inodes.stdout.decode().count("No space left on device") == 2
        await attack(machine, ["sh", "-c", "rm -f /tmp/* 2>/dev/null; true"])
        for folder in ("/tmp", "/dev/shm", "/work", "/home/agent"):
            filled = await attack(machine, ["sh", "-c", FILL.format(folder)])
            assert b"No space left on device" in filled.stderr
        segments = await attack(machine, ["python3", "-c", SEGMENTS])
        assert segments.stdout == b"made 0\n"
        queues = await attack(machine, ["python3", "-c", FILL_SYSTEM_V])
        assert queues.stdout.decode().count("ENOSPC") == 2
        hog = await attack(machine, ["python3", "-c", HOG])
        assert hog.exit_code in {-9, 1}  # killed, or refused memory
        await attack(machine, ["sh", "-c", OWN_MOUNT])
        await attack(machine, ["sh", "-c", BOMB], timeout_s=3.0)
        machine.hang_grace_s = 100.0  # Beside a bomb, and on a busy machine, an answer takes long.
        await machine.ping()  # the bomb may go on, and take all processes that the agent has
        assert b"MemTotal" in await machine.read_file("/proc/meminfo", 4096)
    finally:
        await machine.close()


@pytest.mark.vm
async def test_output_without_end_is_cut_and_costs_no_more_than_asked():
    machine = await machine_of("uml").start(timeout_s=30.0)
    try:
        for flood in ("yes", "yes >&2", "cat /dev/zero"):
            for timeout_s in (0.5, 5.0, 15.0):  # The longer ones where it has hardly begun.
                flooded = await attack(machine, ["sh", "-c", flood], timeout_s, 1000)
                assert flooded.timed_out
                if flooded.truncated:
                    break
            assert flooded.truncated
            assert max(len(flooded.stdout), len(flooded.stderr)) == 1000
    finally:
        await machine.close()


@pytest.mark.vm
async def test_a_machine_has_the_size_that_was_asked_for_and_files_end_at_their_bound():
    needs = MachineNeeds(memory_mib=192, disk_mib=32)
    backend = machine_of("uml").resized(needs)
    machine = await backend.start(timeout_s=30.0)
    try:
        await machine.exec(["sh", "-c", "cat /dev/zero > /tmp/big"], timeout_s=30.0)
        sizes = await machine.exec(["sh", "-c", "stat -c %s /tmp/big; grep MemTotal /proc/meminfo"],
                                   timeout_s=30.0)  # fmt: skip
    finally:
        await machine.close()
    filled, _, memory_kib, _ = sizes.stdout.split()
    assert 31 << 20 <= int(filled) <= 32 << 20
    assert 170 << 10 <= int(memory_kib) <= 192 << 10
