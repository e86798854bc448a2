"""An S3 server of a test's own."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def serving_bucket(name: str) -> Iterator[str]:
    """Serve S3 with one bucket; yield the endpoint, or skip where no server is installed."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
    yield endpoint
    server.stop()
