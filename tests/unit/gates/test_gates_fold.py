"""What the gatekeeper knows does not depend on how the log's streams interleave."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.gates.world import CONFIG, TURN, good, published
from tests.unit.monitor.gate_story import chosen, moved, started

from penstock.actors.gatekeeper.fold import GateFold
from penstock.gateway.arms import Arms
from penstock.messages.base import Event
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, CandidateChosen


def feedback_stream(num: int = 30) -> list[Event]:
    rng, arms, found = random.Random(4), Arms("stable"), []
    arms.started(started())
    for n in range(num):
        route = arms.route(f"u{n}", 200.0 + n)
        facts, reward = good(Arm(route.channel), rng)
        about = {"tenant": "t", "user": f"u{n}", "variant": route.variant,
                 "propensity": route.propensity, "session_id": f"s{n}"}  # fmt: skip
        found.append(InferenceRecorded(
            request_id=f"r{n}", key_id="k", training_consent=True, facts=facts, turn=TURN,
            recorded_at=200.0 + n, policy_version=0, replica="w", **about,
        ))  # fmt: skip
        found.append(LiveSampleJoined(
            sample_id=f"r{n}", request_ids=[f"r{n}"], turns=[TURN.summary], reward=reward,
            feedback_ids=[], policy_version=0, **about,
        ))  # fmt: skip
    return found


CONTROL = [moved(0, stable=3), chosen(), moved(1, stable=3, candidate=7), started()]
WEIGHTS = [published(3), published(7)]
FEEDBACK = feedback_stream()


def folded(events) -> tuple:
    fold = GateFold(CONFIG, "hidden_tests")
    for event in events:
        fold.apply(event)
    return fold.view(20), fold.candidates.channels, fold.candidates.newest


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_any_interleaving_of_the_streams_gives_the_same_view(rng):
    streams = [list(CONTROL), list(WEIGHTS), list(FEEDBACK)]
    mixed = []
    while any(streams):
        mixed.append(rng.choice([stream for stream in streams if stream]).pop(0))
    view, channels, newest = folded(mixed)
    assert (view, channels, newest) == folded([*CONTROL, *WEIGHTS, *FEEDBACK])
    assert sum(arm.num_users for arm in view.arms) == 30


def test_requests_of_an_earlier_experiment_change_nothing():
    before = folded([*CONTROL, *FEEDBACK])
    fold = GateFold(CONFIG, "hidden_tests")
    for event in [*CONTROL, *FEEDBACK]:
        fold.apply(event)
    later = CandidateChosen(number=1, policy_version=9, stable_version=3, at=900.0)
    fold.apply(later)
    assert fold.view(20).arms[0].num_users == 0
    for event in FEEDBACK:
        fold.apply(event)
    assert fold.view(20).arms[0].num_users == 0
    assert before[0].arms[0].num_users > 0
