"""A service between whose training and whose users gates stand: arms, a rollback, a promotion."""

import json
import time

import pytest

from .service import WAIT_S, Service, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1200, func_only=True)]

GUARDS = ", ".join(
    f"{name} = {{ bound = {bound}, num_min = 5 }}"
    for name, bound in {
        "reply_length": 9.0, "empty_replies": 1.0, "invalid_calls": 1.0, "question_rate": 1.0,
        "edit_rate": 1.0, "unrated": 1.0, "discard_rate": 1.0, "kl": 9.0, "ess": 0.01,
    }.items()
)  # fmt: skip
"""An untrained policy's replies are of any kind."""
SETTINGS = (
    "serve.epoch_samples=4", "feedback.reward_wait_s=0.2",
    "gatekeeper.offline.num_tasks=0", "gatekeeper.quality_bar=0.0",
    "gatekeeper.test.sessions_per_user=1", "gatekeeper.test.replies_per_user=1",
    "gatekeeper.test.user_window_s=5.0", f"gatekeeper.guards={{ {GUARDS} }}",
)  # fmt: skip
OPTIONS = [word for setting in SETTINGS for word in ("--set", setting)]


def told(runs, kind: str) -> list[dict]:
    found = penstock(runs, "log", "cat", "r1", "--type", kind)
    return [json.loads(line) for line in found.stdout.splitlines()]


def wait_for(runs, service: Service, kind: str, number: int = 0) -> dict:
    deadline = time.monotonic() + WAIT_S
    while len(found := told(runs, kind)) <= number:
        assert time.monotonic() < deadline, service.output
        time.sleep(1.0)
    return found[number]


def ask(service: Service, user: str) -> str:
    body = {"model": "policy", "max_tokens": 8, "user": user,
            "messages": [{"role": "user", "content": "hello"}]}  # fmt: skip
    _, reply = service.post("/v1/chat/completions", body)
    return reply["id"]


def versions_of_replies(runs) -> dict[str, int]:
    """Return the version of each reply from the log: in an experiment users must not know it."""
    return {one["request_id"]: one["policy_version"] for one in told(runs, "InferenceRecorded")}


def experiment(runs, service: Service, number: int, *, liked: str) -> dict:
    """Have new users rate one arm well until the candidate is decided; nobody's request fails."""
    started = wait_for(runs, service, "ExperimentStarted", number)
    versions = {"candidate": started["policy_version"], "stable": started["stable_version"]}
    deadline, count = time.monotonic() + WAIT_S, 0
    while len(told(runs, "ExperimentDecided")) <= number:
        assert time.monotonic() < deadline, service.output
        asked = [ask(service, f"user-{number}-{count + n}") for n in range(25)]
        count += len(asked)
        answered = versions_of_replies(runs)
        for request_id in asked:
            value = int(answered[request_id] == versions[liked])
            body = {"request_id": request_id, "name": "thumbs", "value": value}
            service.post("/v1/feedback", body)
    return versions


def test_a_version_that_users_dislike_is_rolled_back_and_one_that_they_like_is_promoted(runs):
    service = Service(runs, "--learn", *OPTIONS)
    try:
        assert service.ask()[0] == 2
        for value in (1, 0, 1, 0):
            service.teach(value)
        assert experiment(runs, service, 0, liked="stable") == {"stable": 2, "candidate": 3}
        drawn = [one for one in told(runs, "InferenceRecorded") if one["variant"] != "current"]
        assert {one["variant"] for one in drawn} == {"e0.0.stable", "e0.0.candidate"}
        for one in drawn:
            assert one["propensity"] == 0.5
            assert one["channel"] == one["variant"].split(".")[2]
            assert one["policy_version"] == {"stable": 2, "candidate": 3}[one["channel"]]
        decided = wait_for(runs, service, "ExperimentDecided")
        assert decided["decision"] == "rolled_back", decided
        assert decided["reason"].startswith("users: the candidate is worse")

        versions = experiment(runs, service, 1, liked="candidate")
        assert versions["stable"] == 2 < versions["candidate"]
        decided = wait_for(runs, service, "ExperimentDecided", 1)
        assert decided["decision"] == "promoted", decided
        # The next candidate's experiment may run already, so every user gets one of the two.
        deadline = time.monotonic() + WAIT_S
        reply = ask(service, "later")
        while versions_of_replies(runs).get(reply, -1) < versions["candidate"]:
            reply = ask(service, "later")
            assert time.monotonic() < deadline, service.output
            time.sleep(1.0)

        drifts = [one.get("drift", {}) for one in told(runs, "StepCompleted")]
        assert any("2" in one and one["2"]["num_tokens"] > 0 for one in drifts)
        report = json.loads(penstock(runs, "experiment", "r1", "--json").stdout.splitlines()[-1])
        assert report["channels"]["stable"] == versions["candidate"]
        assert [one["decision"] for one in report["decided"][:2]] == ["rolled_back", "promoted"]
        status = penstock(runs, "status", "r1").stdout
        assert f"stable version {versions['candidate']}" in status
        assert service.stop() == 0, service.output
    finally:
        service.end()
