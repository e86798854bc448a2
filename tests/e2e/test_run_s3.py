"""A whole run whose objects lie in a bucket behind HTTP."""

import json
import urllib.request

import pytest
from tests.s3_server import serving_bucket

from .launched import TINY, Launched, penstock

RUN_S = 300.0


@pytest.fixture
def credentials(monkeypatch):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")


@pytest.fixture
def endpoint():
    """Serve S3 with one bucket, `weights`."""
    with serving_bucket("weights") as endpoint:
        yield endpoint


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
        kind = "delta" if version else "full"
        assert f"r1/weights/{version:08d}/{kind}/manifest-" in listing
    state = json.loads(penstock(tmp_path, "status", "r1", "--json").stdout)
    for region in state["regions"].values():
        assert set(region["replicas"].values()) == {4}


@pytest.mark.usefixtures("credentials")
def test_a_server_that_is_away_is_told_in_one_line_before_anything_is_started(tmp_path):
    settings = ('store.kind="s3"', 'store.bucket="weights"', 'store.endpoint="http://127.0.0.1:9"')
    overrides = [word for setting in settings for word in ("--set", setting)]
    done = penstock(tmp_path, "run", "--config", str(TINY), *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "store.endpoint: http://127.0.0.1:9 does not answer" in lines[0]
