"""Stands where jailer and Firecracker would: checks requests by the published API's rules.

Started with the jailer's arguments. It serves the API in the jail, refuses what the API's
definition refuses (unknown or missing fields, wrong types, wrong order, files that the jail does
not hold) and, once started or loaded, answers on the vsock socket as the guest agent does. A loaded
guest goes on with the line's byte count that was saved, frozen, as the real agent would.
"""

import argparse
import asyncio
import json
import os
import struct
import sys
from pathlib import Path

import msgspec
from aiohttp import web

FIELDS = {
    "/machine-config": ({"vcpu_count": int, "mem_size_mib": int}, {"smt": bool}),
    "/boot-source": ({"kernel_image_path": str}, {"boot_args": str, "initrd_path": str}),
    "/drives/image": (
        {"drive_id": str, "is_root_device": bool},
        {"path_on_host": str, "is_read_only": bool},
    ),
    "/vsock": ({"guest_cid": int, "uds_path": str}, {}),
    "/actions": ({"action_type": str}, {}),
    "/vm": ({"state": str}, {}),
    "/snapshot/create": ({"snapshot_path": str, "mem_file_path": str}, {"snapshot_type": str}),
    "/snapshot/load": (
        {"snapshot_path": str},
        {"mem_backend": dict, "resume_vm": bool, "clock_realtime": bool, "track_dirty_pages": bool},
    ),
}
"""Resource -> required and optional fields."""
PATHS = ("kernel_image_path", "initrd_path", "path_on_host")


class Refused(Exception):
    """What the API answers with 400."""


class Guest:
    """The guest agent's side of the line, in as far as the adapter needs it."""

    def __init__(self, taken=0, epoch=0, frozen=False):
        self.taken = taken
        self.epoch = epoch
        self.frozen = frozen
        self.hello = taken == 0

    async def serve(self, reader, writer):
        port = (await reader.readline()).decode()
        assert port == "CONNECT 52\n", port
        writer.write(b"OK 1073741824\n")
        if self.hello:
            self.say(writer, id=0, hello=1)
        while True:
            try:
                (length,) = struct.unpack("<I", await reader.readexactly(4))
                request = msgspec.msgpack.decode(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            self.taken += 4 + length
            self.say(writer, id=request["id"], **self.answer(request))

    def answer(self, request):
        if request.get("epoch", 0) < self.epoch:
            return {"error": "stale_epoch", "text": b""}
        match request["op"]:
            case "thaw":
                self.frozen, self.epoch = False, request.get("epoch", 0)
                return {"epoch": self.epoch}
            case _ if self.frozen:
                return {"error": "frozen", "text": b""}
            case "freeze":
                self.frozen = True
                return {}
            case "exec":
                return {"exit_code": 0, "stdout": " ".join(request["argv"]).encode()}
        return {}

    def say(self, writer, **fields):
        body = msgspec.msgpack.encode({"v": 1, "credit": self.taken, **fields})
        writer.write(struct.pack("<I", len(body)) + body)


class Machine:
    """The state that the API's rules speak of."""

    def __init__(self, root):
        self.root = root
        self.done = {}
        self.state = "Not started"
        self.guest = None

    async def put(self, resource, body):
        if resource in {"/actions", "/snapshot/load"} or self.state == "Not started":
            if self.state != "Not started":
                raise Refused("only before the start")
        elif resource != "/snapshot/create":
            raise Refused("only before the start")
        match resource:
            case "/actions":
                await self.start(body)
            case "/snapshot/create":
                self.create(body)
            case "/snapshot/load":
                await self.load(body)
        self.done[resource] = body

    async def start(self, body):
        if body["action_type"] != "InstanceStart" or "/boot-source" not in self.done:
            raise Refused("no boot source")
        await self.run(Guest(), self.done["/vsock"]["uds_path"])

    def create(self, body):
        if self.state != "Paused":
            raise Refused("a machine is saved while it is paused")
        saved = [self.guest.taken, self.guest.epoch, self.done["/vsock"]["uds_path"]]
        self.inside(body["snapshot_path"]).write_text(json.dumps(saved))
        self.inside(body["mem_file_path"]).write_bytes(b"memory")

    async def load(self, body):
        memory = body.get("mem_backend") or {}
        if set(self.done) or memory.get("backend_type") not in {"File", "Uffd"}:
            raise Refused("loaded by a fresh Firecracker alone, with a memory backend")
        if not self.inside(memory["backend_path"]).exists():
            raise Refused("no memory")
        taken, epoch, uds_path = json.loads(self.inside(body["snapshot_path"]).read_text())
        self.done["/vsock"] = {"uds_path": uds_path}
        if not body.get("resume_vm"):
            raise Refused("this test resumes at once")
        await self.run(Guest(taken, epoch, frozen=True), uds_path)

    async def run(self, guest, uds_path):
        self.guest, self.state = guest, "Running"
        await asyncio.start_unix_server(guest.serve, self.inside(uds_path))

    def patch(self, resource, body):
        if resource != "/vm" or self.state == "Not started":
            raise Refused("not started")
        self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]

    def inside(self, path):
        return self.root / path.lstrip("/")

    async def handle(self, request):
        try:
            body = await request.json()
            check(request.path, body, self)
            if request.method == "PATCH":
                self.patch(request.path, body)
            else:
                await self.put(request.path, body)
        except (Refused, KeyError, OSError) as error:
            return web.json_response({"fault_message": repr(error)}, status=400)
        return web.Response(status=204)


def check(resource, body, machine):
    required, optional = FIELDS[resource]
    for name, value in body.items():
        if not isinstance(value, (required | optional)[name]):
            raise Refused(f"{name}: {value!r}")
        if name in PATHS and not machine.inside(value).is_file():
            raise Refused(f"{name}: no such file in the jail")
    if missing := set(required) - set(body):
        raise Refused(f"missing: {missing}")


async def main():
    parser = argparse.ArgumentParser()
    for name in ("--id", "--uid", "--gid", "--chroot-base-dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--exec-file", default="firecracker")
    cut = sys.argv.index("--")
    jailer = parser.parse_args(sys.argv[1:cut])
    firecracker = argparse.ArgumentParser()
    firecracker.add_argument("--api-sock", required=True)
    own = firecracker.parse_args(sys.argv[cut + 1 :])
    folder = Path(jailer.chroot_base_dir) / Path(jailer.exec_file).name / jailer.id / "root"
    os.chdir(folder)  # short socket paths
    machine = Machine(Path())
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", machine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, own.api_sock.lstrip("/")).start()
    await asyncio.sleep(600)


asyncio.run(main())
