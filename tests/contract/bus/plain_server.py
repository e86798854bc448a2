"""A nats-server that is not ours, from a configuration with users, TLS, or no JetStream."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.contract.bus.nats_cluster import free_ports

from penstock.infra.bus.server.server import find_server

START_S_MAX = 20.0


@contextlib.contextmanager
def plain_server(folder: Path, config: str) -> Iterator[int]:
    """Serve on a loopback port; yield it once it greets."""
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    file = folder / "nats.conf"
    file.write_text(f'listen: "127.0.0.1:{port}"\n{config}\n')
    with (folder / "nats.log").open("wb") as log:
        process = subprocess.Popen(
            [str(find_server()), "-c", str(file)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S_MAX
        while not _greets(port):
            assert process.poll() is None, (folder / "nats.log").read_text()
            assert time.monotonic() < deadline, (folder / "nats.log").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


def _greets(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
        return link.recv(4) == b"INFO"
    return False
