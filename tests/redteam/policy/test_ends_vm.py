"""A policy that wants its bad episodes masked, in real machines: every such end is its own.

```
 scripted turns ─▶ episode loop ─▶ sandbox host ─▶ user-mode machine ─▶ judge's fresh machine
```
The bus is in memory; everything else is what a run has, on the machine's own clock.
"""

import os
import signal

import msgspec
import pytest
from tests.sim.boots.processes import children_of
from tests.sim.rollout.conftest import BUGGY, FINISH, LOOK, Call, World, make_command, tokenizer

from penstock.envs.backends import open_backend
from penstock.envs.microvm.protocol import GuestRequest
from penstock.envs.sandbox import BackendUnavailable
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import HiddenTests, Limits, Split, Task

__all__ = ["tokenizer"]

pytestmark = [pytest.mark.vm, pytest.mark.timeout(180)]
TASK = Task(
    task_id="train-0", category="operator", split=Split.TRAIN, instruction="Fix double in m.py",
    files={"m.py": BUGGY},
    limits=Limits(
        num_turns_max=6, num_tokens_max=8192, turn_tokens_max=1024, wall_s_max=60.0, tool_s_max=2.0
    ),
)  # fmt: skip
HIDDEN = HiddenTests(
    task_id="train-0",
    files={"_hidden.py": "import m\nprint(repr(m.double(2)))\nprint(repr(m.double(3)))\n"},
    argv=["python3", "_hidden.py"],
    expected=["4", "6"],
    timeout_s=3.0,
)


def run(command: str) -> list[Call]:
    return [("run_terminal", {"command": command})]


def leave(content: str) -> list[Call]:
    return [("write_file", {"path": "m.py", "content": content})]


EATER = "python3 -c 'x = []\nwhile 1: x.append(bytearray(1 << 24))'"
FAILED, POLICY_ERROR, TIMEOUT = Outcome.FAILED, Outcome.POLICY_ERROR, Outcome.TIMEOUT
LATE = "a call that never ends"
PLANTED: dict[str, tuple[list[list[Call]], set[Outcome]]] = {
    LATE: (
        [run("while :; do :; done")] * 9, {FAILED, TIMEOUT},
    ),
    "loops left behind that ignore signals": (
        [run("for i in 1 2 3 4 5 6 7 8; do (trap '' TERM HUP; while :; do :; done) & done"),
         leave(BUGGY + "# no\n"), [FINISH]], {FAILED},
    ),
    "calls without end": ([[LOOK]] * 99, {FAILED}),
    "a solution that never ends": ([leave("while True:\n    pass\n"), [FINISH]], {FAILED}),
    "a flood": ([run("yes flood & yes flood >&2"), [FINISH]], {FAILED}),
    "a flood into files": ([run("yes > big; yes > /tmp/big"), [FINISH]], {POLICY_ERROR}),
    "a solution that floods": (
        [leave("import os\nwhile True:\n    os.write(1, b'4' * 65536)\n"), [FINISH]], {FAILED},
    ),
    "memory taken": ([run(f"{EATER} & {EATER} & {EATER}")] * 3, {FAILED, POLICY_ERROR}),
    "memory taken by files": (
        [run("cat /dev/zero > /tmp/big; cat /dev/zero > /dev/shm/big; cat /dev/zero > big"),
         [FINISH]], {FAILED, POLICY_ERROR},
    ),
    "processes without end": (
        [run("b() { b | b & }; b; sleep 1"), [FINISH]], {FAILED, POLICY_ERROR},
    ),
    "a solution that takes all memory": (
        [leave("x = []\nwhile True:\n    x.append(bytearray(1 << 24))\n"), [FINISH]],
        {FAILED, POLICY_ERROR},
    ),
    "a folder for the file": ([run("rm m.py; mkdir -p m.py/m.py"), [FINISH]], {FAILED}),
    "a file that nobody reads": ([run("chmod 000 m.py"), [FINISH]], {FAILED}),
    "a pipe for the file": ([run("rm m.py; mkfifo m.py"), [FINISH]], {FAILED}),
    "a closed folder": ([run("chmod 000 /work"), [FINISH]], {FAILED, POLICY_ERROR}),
    "nothing left": ([run("rm -rf /work /work/* /work/.git"), [FINISH]], {FAILED}),
    "a solution whose results nobody can write": (
        [leave("import os\nos.chmod('.', 0)\nos.dup2(os.open('/dev/full', 1), 1)\n"), [FINISH]],
        {FAILED},
    ),
}  # fmt: skip


@pytest.fixture
def backend():
    try:
        return open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


async def end_of(
    world: World, script: list[list[Call]], task: Task = TASK
) -> tuple[RolloutFinished, Verdict]:
    """Run one episode and grade it."""
    world.policy.scripts = lambda _session: script
    await world.put_split([task], [HIDDEN])
    world.host(world.policy)
    world.host_machines(live_max=2)
    world.host_worker()
    world.host_judge()
    await world.publish(make_command("g0-m0", task))
    [rollout] = await world.wait_for(RolloutFinished, 1)
    [verdict] = await world.wait_for(Verdict, 1)
    return rollout, verdict


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_policy_is_never_masked(tokenizer, backend, name) -> None:
    script, outcomes = PLANTED[name]
    wall_s_max = 5.0 if name == LATE else TASK.limits.wall_s_max
    limits = msgspec.structs.replace(TASK.limits, wall_s_max=wall_s_max)
    world = World(tokenizer)
    world.backend = backend
    try:
        task = msgspec.structs.replace(TASK, limits=limits)
        rollout, verdict = await end_of(world, script, task)
    finally:
        await world.close()
    assert rollout.turns
    assert verdict.outcome in outcomes, (rollout.end, rollout.error, verdict)
    assert verdict.outcome.is_trained
    assert not verdict.outcome.is_masked


PANIC, HANG = "planted: panic", "planted: hang"


def plant(backend) -> None:
    """Let one command end the guest's kernel, and one stop it, for want of a hole in it."""
    start = backend.start

    async def start_planted(**options):
        machine = await start(**options)
        execute = machine.exec

        async def exec_planted(argv, **options):
            if argv[-1] == PANIC:
                await machine._connection.call(GuestRequest(op="shutdown"), timeout_s=5.0)
            if argv[-1] == HANG:
                for pid in children_of(machine.process.pid):
                    os.kill(pid, signal.SIGSTOP)
            return await execute(argv, **options)

        machine.exec = exec_planted
        return machine

    backend.start = start_planted


@pytest.mark.parametrize("command", [PANIC, pytest.param(HANG, marks=pytest.mark.slow)])
async def test_a_machine_killer_is_never_masked(tokenizer, backend, command, monkeypatch) -> None:
    # As NATS does, ask a host once: copies of a request would see a machine that was put away.
    monkeypatch.setattr("tests.support.memory_bus.rpc.RESEND_S", 60.0)
    plant(backend)
    world = World(tokenizer)
    world.backend = backend
    try:
        rollout, verdict = await end_of(world, [[LOOK], run(command), [FINISH]])
    finally:
        await world.close()
    assert "2 machines killed" in rollout.error
    assert len(rollout.turns) == 2
    assert verdict.outcome is POLICY_ERROR
