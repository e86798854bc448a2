"""The guest agent as a process of the host, built with sanitizers; see guest_alone.c."""

import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.protocol import GuestReply

HERE = Path(__file__).resolve().parent
GUEST = HERE.parents[1] / "envs/microvm/guest"
FLAGS = ("-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WRAPPED = (
    "getpid", "reboot", "clock_settime", "sethostname", "open", "ioctl", "setfsuid", "setfsgid",
)  # fmt: skip


def build(folder: Path) -> Path:
    """Return the program."""
    agent = folder / "agent"
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    sources = [HERE / "guest_alone.c", *sorted(GUEST.glob("*.c"))]
    subprocess.run(["gcc", *FLAGS, *wraps, "-o", agent, *sources], check=True, timeout=120)
    return agent


def request(op: str, number: int, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"v": 1, "id": number, "op": op, **fields})


class Guest:
    """The agent on a socket; `records` holds what it did to the machine."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.records = folder / "records"
        self.records.mkdir()
        self._line, theirs = socket.socketpair()
        self._line.settimeout(20.0)
        self._inbox = b""
        environment = {"GUEST_RECORDS": str(self.records), "PATH": "/usr/bin:/bin"}
        self.process = subprocess.Popen(
            [binary, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        assert self.reply()["hello"] == 1

    def send(self, *bodies: bytes, cut: int = 0) -> None:
        frames = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
        for part in (frames[:cut], frames[cut:]):
            self._line.sendall(part)

    def reply(self) -> dict[str, Any]:
        """Return the next reply; what confirms bytes alone is none."""
        while True:
            while len(self._inbox) < 4 or len(self._inbox) < 4 + self._length:
                data = self._line.recv(1 << 16)
                assert data, self.process.stderr and self.process.stderr.read().decode()
                self._inbox += data
            end = 4 + self._length
            reply = msgspec.msgpack.decode(self._inbox[4:end])
            msgspec.msgpack.decode(self._inbox[4:end], type=GuestReply)  # What hosts accept.
            self._inbox = self._inbox[end:]
            if set(reply) != {"v", "credit", "id"} or reply["id"] != 0:
                return reply

    @property
    def _length(self) -> int:
        return struct.unpack("<I", self._inbox[:4])[0]

    def record(self, name: str) -> bytes:
        path = self.records / name
        return path.read_bytes() if path.exists() else b""

    def end(self) -> int:
        """Hang up; return how the agent ended."""
        self._line.close()
        self.process.communicate(timeout=20)
        return self.process.returncode
