"""A service between whose training and whose users gates stand: arms, a rollback, a promotion."""

import json
import time

import pytest

from ..launched import WAIT_S, Launched, penstock
from .service import Service

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(500)]

SETTINGS = (
    "serve.gated=true", "serve.epoch_samples=4", "feedback_join.reward_wait_s=0.2",
    "gatekeeper.offline.num_tasks=0", "gatekeeper.quality_bar=0.0",
    "gatekeeper.test.sessions_per_user=1", "gatekeeper.test.replies_per_user=1",
)  # fmt: skip
OPTIONS = [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("trainer.steps_max=2", "users.num_requests=0", "prepare.num_heldout_tasks=2")
    launched = Launched(folder, *settings)
    assert launched.wait() == 0, launched.output
    return folder


def told(runs, kind: str) -> list[dict]:
    found = penstock(runs, "log", "cat", "r1", "--type", kind)
    return [json.loads(line) for line in found.stdout.splitlines()]


def wait_for(runs, service: Service, kind: str) -> dict:
    deadline = time.monotonic() + WAIT_S
    while not (found := told(runs, kind)):
        assert time.monotonic() < deadline, service.output
        time.sleep(1.0)
    return found[0]


def ask(service: Service, user: str) -> tuple[int, str]:
    body = {"model": "policy", "max_tokens": 8, "user": user,
            "messages": [{"role": "user", "content": "hello"}]}  # fmt: skip
    headers, reply = service.post("/v1/chat/completions", body)
    return int(headers["x-policy-version"]), reply["id"]


def rate(service: Service, user: str, value: int) -> int:
    version, request_id = ask(service, user)
    service.post("/v1/feedback", {"request_id": request_id, "name": "thumbs", "value": value})
    return version


def test_users_are_divided_and_a_version_that_they_dislike_is_rolled_back(runs):
    service = Service(runs, "--learn", *OPTIONS)
    try:
        assert service.ask()[0] == 2
        for value in (1, 0, 1, 0):
            service.teach(value)
        started = wait_for(runs, service, "ExperimentStarted")
        assert (started["stable_version"], started["policy_version"]) == (2, 3)
        served, deadline = {}, time.monotonic() + WAIT_S
        while not told(runs, "ExperimentDecided"):
            assert time.monotonic() < deadline, service.output
            for _ in range(25):
                user = f"user-{len(served)}"
                served[user] = ask(service, user)[0]
                rate(service, user, 0 if served[user] == 3 else 1)
        assert set(served.values()) == {2, 3}
        records = [one for one in told(runs, "InferenceRecorded") if one["propensity"] == 0.5]
        assert {one["variant"] for one in records} >= {"e0.0.stable", "e0.0.candidate"}
        assert all(one["channel"] == one["variant"].split(".")[2] for one in records)
        drifts = [one.get("drift", {}) for one in told(runs, "StepCompleted")]
        assert any("2" in one and one["2"]["num_tokens"] > 0 for one in drifts)
        assert all(0.9 < one["2"]["ess"] <= 1.0 for one in drifts if "2" in one)
        decided = told(runs, "ExperimentDecided")[0]
        assert decided["decision"] == "rolled_back", decided
        assert decided["reason"].startswith("users: it is worse")
        time.sleep(2.0)
        after = [ask(service, user)[0] for user in served]
        again = [one for one in told(runs, "ExperimentStarted") if one["number"] == 1]
        assert again or set(after) == {2}
        report = json.loads(penstock(runs, "experiment", "r1", "--json").stdout.splitlines()[-1])
        assert report["channels"]["stable"] == 2
        assert report["decided"][0]["decision"] == "rolled_back"
        assert "stable version 2" in penstock(runs, "status", "r1").stdout
        assert service.stop() == 0, service.output
    finally:
        service.end()
