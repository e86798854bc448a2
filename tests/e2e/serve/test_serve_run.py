"""A finished run becomes a service that learns from its users, in the same log."""

import contextlib
import json

import pytest

from .service import Service, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1200, func_only=True)]

WAITS = ("--set", "feedback.reward_wait_s=0.2")
EPOCH = ("--set", "serve.epoch_samples=4")


@contextlib.contextmanager
def serving(runs, *arguments):
    service = Service(runs, *arguments)
    try:
        yield service
        assert service.stop() == 0, service.output
    finally:
        service.end()


def replayed(runs):
    done = penstock(runs, "replay", "r1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_learns_from_users_alone_and_its_versions_continue(runs):
    with serving(runs, "--learn", "--ungated", *EPOCH, *WAITS) as service:
        assert service.ask()[0] == 2
        for value in (1, 0, 1, 0):
            service.teach(value)
        service.until_version(3)
        assert "serving" in penstock(runs, "status", "r1").stdout
        for value in (1, 1, 0, 1):
            service.teach(value)
        service.until_version(4)
        assert "warning: no gates" in service.output
    found = replayed(runs)
    assert found["identical"] and found["steps_compared"] == 4, "both parts"
    told = penstock(runs, "log", "cat", "r1", "--type", "BatchManifest").stdout.splitlines()
    manifests = [json.loads(line) for line in told]
    assert [one["step"] for one in manifests] == [1, 2, 3, 4]
    assert all(one["groups"] and not one.get("live") for one in manifests[:2])
    assert all(not one["groups"] and len(one["live"]) == 4 for one in manifests[2:])

    # And on, without learning.
    with serving(runs) as service:
        version, _ = service.ask()
        assert version == 4
        assert "trainer" not in (service.folder / "service.toml").read_text().split("[run]")[0]
    assert penstock(runs, "export", "r1", "-o", str(runs / "hf")).returncode == 0
    assert (runs / "hf" / "config.json").exists()

    # The folder that it wrote is one that a service starts from.
    arguments = (str(runs / "hf"), "--run-id", "r2", "--set", "gateway.port=0")
    service = Service(runs, *arguments, run_id="r2")
    try:
        assert service.ask()[0] == 0
        assert service.stop() == 0, service.output
    finally:
        service.end()
