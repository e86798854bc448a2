"""QEMU's monitor, spoken to over a socket whose other end answers as QEMU does."""

import array
import asyncio
import json
import os
import socket

import pytest

from penstock.envs.microvm.qemu.machine import Qmp, QmpError
from penstock.envs.sandbox import SandboxDied, SandboxTimeout

DEVICES = b"the devices"


class Monitor:
    """Takes commands, writes the devices' state where it is told to, reports an event each time."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.end.setblocking(False)
        self.seen: list[str] = []
        self.lent: dict[int, int] = {}
        self.lines: list[bytes] = []

    def say(self, words: object) -> None:
        self.end.send(json.dumps(words).encode() + b"\n")

    async def serve(self) -> None:
        self.say({"QMP": {}})
        while asked := await self._next():
            self.seen.append(asked["execute"])
            self.say({"event": "NOTHING"})
            self.say(self._answer(asked["execute"], asked["arguments"]) | {"id": asked["id"]})

    async def _next(self):
        if self.lines:
            return json.loads(self.lines.pop(0))
        while True:
            try:
                text, control, _, _ = self.end.recvmsg(65536, socket.CMSG_SPACE(4))
                break
            except BlockingIOError:
                await asyncio.sleep(0.001)
        for _, _, data in control:
            self.lent[len(self.lent)] = array.array("i", data)[0]
        self.lines += text.splitlines()
        return json.loads(self.lines.pop(0)) if self.lines else None

    def _answer(self, command: str, arguments: dict) -> dict:
        match command:
            case "add-fd":
                return {"return": {"fdset-id": 0, "fd": 9}}
            case "xen-save-devices-state":
                os.write(self.lent[int(arguments["filename"].rpartition("/")[2])], DEVICES)
            case "remove-fd":
                os.close(self.lent.pop(arguments["fdset-id"]))
            case "refuse":
                return {"error": {"desc": "not now"}}
        return {"return": {}}


@pytest.fixture
async def monitor():
    ours, theirs = socket.socketpair()
    far = Monitor(theirs)
    serving = asyncio.create_task(far.serve())
    qmp = Qmp(ours)
    yield qmp, far
    qmp.close()
    serving.cancel()
    theirs.close()


async def test_the_first_command_enters_command_mode(monitor):
    qmp, far = monitor
    assert await qmp.run("stop") == {}
    await qmp.run("cont")
    assert far.seen == ["qmp_capabilities", "stop", "cont"]


async def test_devices_come_back_through_a_lent_descriptor(monitor):
    qmp, far = monitor
    assert await qmp.save_devices() == DEVICES
    assert far.lent == {}


async def test_a_refusal_has_its_reason(monitor):
    with pytest.raises(QmpError, match="refuse: not now"):
        await monitor[0].run("refuse")


async def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one():
    ours, theirs = socket.socketpair()
    qmp = Qmp(ours)
    with pytest.raises(SandboxTimeout, match="no answer to refuse"):
        await qmp.run("refuse", deadline_s=0.01)
    serving = asyncio.create_task(Monitor(theirs).serve())
    assert await qmp.run("stop") == {}
    serving.cancel()
    theirs.close()
    qmp.close()


async def test_an_end_has_a_type():
    ours, theirs = socket.socketpair()
    theirs.close()
    qmp = Qmp(ours)
    with pytest.raises(SandboxDied, match="monitor"):
        await qmp.run("stop")
    qmp.close()
