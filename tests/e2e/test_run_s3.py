"""A whole run whose objects lie in a bucket behind HTTP, and what wrong settings of it say."""

import http.server
import json
import threading
import urllib.request

import pytest

from .launched import TINY, Launched, penstock

RUN_S = 300.0


@pytest.fixture
def credentials(monkeypatch):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")


@pytest.fixture
def endpoint():
    """Serve S3 with one bucket, `weights`."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/weights", method="PUT")).close()
    yield endpoint
    server.stop()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every request with 403."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def refusing():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def refused(runs, *settings):
    """Return the one line that a run is refused with, before it has a folder."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    done = penstock(runs, "run", "--config", str(TINY), "--set", 'store.kind="s3"', *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert list(runs.iterdir()) == []
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_keeps_its_objects_in_a_bucket(tmp_path, endpoint, credentials):
    run = Launched(
        tmp_path, 'store.kind="s3"', 'store.bucket="weights"', f'store.endpoint="{endpoint}"'
    )
    try:
        assert run.wait(RUN_S) == 0, run.output
    finally:
        run.end()
    run.check_sound(steps=4)
    assert not (run.folder / "objects").exists()
    with urllib.request.urlopen(f"{endpoint}/weights?list-type=2&prefix=r1/weights/") as reply:
        listing = reply.read().decode()
    for version in range(5):
        kind = "delta" if version else "anchor"
        assert f"r1/weights/{version:08d}/{kind}/manifest" in listing
    state = json.loads(penstock(tmp_path, "status", "r1", "--json").stdout)
    for region in state["regions"].values():
        assert set(region["replicas"].values()) == {4}


@pytest.mark.usefixtures("credentials")
def test_a_server_that_is_away_a_missing_bucket_and_refused_keys_are_named(
    tmp_path, endpoint, refusing
):
    bucket = 'store.bucket="weights"'
    line = refused(tmp_path, bucket, 'store.endpoint="http://127.0.0.1:9"')
    assert "store.endpoint: http://127.0.0.1:9 does not answer" in line
    line = refused(tmp_path, 'store.bucket="absent"', f'store.endpoint="{endpoint}"')
    assert f"store.bucket: {endpoint} has no bucket 'absent'" in line
    line = refused(tmp_path, bucket, f'store.endpoint="{refusing}"')
    assert f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: {refusing} refuses them" in line


def test_missing_credentials_and_malformed_settings_are_named(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    bucket = 'store.bucket="weights"'
    line = refused(tmp_path, bucket, 'store.endpoint="http://127.0.0.1:9"')
    assert "expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment" in line
    assert "store.endpoint" in refused(tmp_path, bucket, 'store.endpoint="minio:9000"')
    assert "store.bucket" in refused(tmp_path, 'store.bucket="a/b"')
    assert "store.bucket" in refused(tmp_path)
