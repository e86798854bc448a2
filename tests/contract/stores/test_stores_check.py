"""What a run says before it starts where its bucket does not answer: the setting, by name."""

import http.server
import threading
import urllib.request

import msgspec
import pytest

from penstock.infra.stores.open import check_store
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.errors import ConfigError

AWAY = "http://127.0.0.1:9"


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers every request with one status."""

    status = 403

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(params=[401, 403, 500])
def answering(request, monkeypatch):
    monkeypatch.setattr(Answering, "status", request.param)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def credentials(monkeypatch):
    pytest.importorskip("obstore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


def section(**fields):
    return StoreSection(kind=StoreKind.S3, **fields)


@pytest.mark.usefixtures("credentials")
def test_a_server_that_is_away_is_named():
    with pytest.raises(ConfigError, match=f"store.endpoint: {AWAY} does not answer"):
        check_store(section(bucket="weights", endpoint=AWAY))


@pytest.mark.usefixtures("credentials")
def test_a_missing_bucket_is_named_and_one_that_is_there_passes():
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    try:
        with pytest.raises(ConfigError, match=r"store\.bucket: .* has no bucket 'absent'"):
            check_store(section(bucket="absent", endpoint=endpoint))
        request = urllib.request.Request(f"{endpoint}/weights", method="PUT")
        urllib.request.urlopen(request).close()
        check_store(section(bucket="weights", endpoint=endpoint))
    finally:
        server.stop()


@pytest.mark.usefixtures("credentials")
def test_refused_credentials_are_told_from_a_server_that_fails(answering):
    status, endpoint = answering
    words = (
        "does not answer as S3 does"
        if status == 500
        else r"store\.bucket: .* refuses to list in 'weights'"
    )
    with pytest.raises(ConfigError, match=words):
        check_store(section(bucket="weights", endpoint=endpoint))


class Guarded(Answering):
    """Lists an empty bucket, and answers puts with one status."""

    def do_GET(self):
        body = b'<?xml version="1.0"?><ListBucketResult><Name>weights</Name></ListBucketResult>'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, r"regions\.eu\.bucket: .* refuses to put in 'weights'.* may list, get, put"),
        (200, r"regions\.eu\.endpoint: .*overwrites objects: expected conditional puts"),
    ],
)
def test_a_bucket_that_refuses_writes_is_named_with_the_operation(monkeypatch, status, words):
    monkeypatch.setattr(Guarded, "status", status)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with pytest.raises(ConfigError, match=words):
                check_store(section(bucket="weights", endpoint=endpoint), "regions.eu")
        finally:
            server.shutdown()
            thread.join()


def test_missing_credentials_are_named(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(ConfigError, match="expected AWS_ACCESS_KEY_ID in the environment"):
        check_store(section(bucket="weights", endpoint=AWAY))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "store.bucket: kind s3 needs one"),
        ({"bucket": "a/b"}, r"A-Za-z0-9.*\$\.bucket"),
        ({"bucket": "weights", "endpoint": "minio:9000"}, r"https\?://.*\$\.endpoint"),
        ({"bucket": "weights", "endpoint": "http://"}, r"https\?://.*\$\.endpoint"),
    ],
)
def test_malformed_settings_are_named(fields, words):
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert({"kind": "s3", **fields}, StoreSection)


def test_other_stores_are_not_asked():
    check_store(StoreSection())
