"""One tenant floods the tables of feedback: what others have in them stays."""

from penstock.actors.feedback import bursts as module
from penstock.actors.feedback.bursts import Bursts
from penstock.actors.feedback.config import BurstConfig, JoinConfig
from penstock.actors.feedback.trust import Trust
from penstock.messages.feedback import FeedbackReceived


def feedback(tenant: str, user: str, number: int, name: str = "accept", **more) -> FeedbackReceived:
    more = {"key_id": "k"} | more
    fields = {"feedback_id": f"{user}-{number}", "request_id": f"{tenant}-{user}-{number}"}
    return FeedbackReceived(tenant=tenant, user=user, name=name, value=1.0, **fields | more)


def test_a_flood_of_users_does_not_forget_what_another_tenant_earned():
    trust = Trust(JoinConfig(num_open_max=8))
    for number in range(3):
        trust.add(feedback("acme", "ann", number, request_id=f"r{number}"))
        trust.add(feedback("acme", "", number + 50, request_id=f"r{number}", is_trusted=True))
    earned = dict(trust._agreed)
    assert ("acme", "ann") in earned
    for number in range(40):
        trust.add(feedback("flood", f"u{number}", 0, request_id=f"f{number}"))
        trust.add(feedback("flood", "", number + 99, request_id=f"f{number}", is_trusted=True))
    assert trust._agreed["acme", "ann"] == earned["acme", "ann"]


def test_a_flood_of_users_does_not_release_what_another_tenants_burst_holds(monkeypatch):
    monkeypatch.setattr(module, "NUM_USERS_MAX", 20)
    bursts = Bursts(BurstConfig())
    for number in range(200):
        bursts.add(feedback("acme", "bot", number), 1000.0)
        if bursts.num_held >= 3:
            break
    held = set(bursts._held)
    assert held
    for user in range(30):
        for number in range(200):
            bursts.add(feedback("flood", f"u{user}", number), 1000.0)
    assert held <= set(bursts._held)
    assert ("acme", "bot") in bursts._usage
