"""Users' sessions for the trainer: what the gateway and the feedback join would have published."""

from collections.abc import Sequence

import msgspec
from tests.sealed import sealed_turn

from penstock.messages.base import Event
from penstock.messages.feedback import FeedbackRetracted, InferenceRecorded, LiveSampleJoined
from penstock.messages.rollout import Turn


def session_events(index: int, turns: Sequence[Turn], reward: float) -> list[Event]:
    """Return a session, its sample, and what becomes of its feedback."""
    version = turns[0].version_spans[0].policy_version
    recorded = [
        InferenceRecorded(
            request_id=f"q{index}-{place}",
            session_id=f"s{index}",
            key_id="k",
            training_consent=True,
            variant="main",
            propensity=1.0,
            turn=sealed_turn(turn, f"q{index}-{place}"),
            policy_version=version,
            replica="west",
        )
        for place, turn in enumerate(turns)
    ]
    joined = LiveSampleJoined(
        sample_id=f"q{index}-0",
        request_ids=[record.request_id for record in recorded],
        feedback_ids=[f"f{index}"],
        reward=reward,
        variant="main",
        propensity=1.0,
        policy_version=version,
        turns=[turn.summary for turn in turns],
    )
    return [*recorded, joined, *_later(index, joined)]


def _later(index: int, joined: LiveSampleJoined) -> list[Event]:
    if index % 9 == 0:  # All feedback is taken back.
        unrated = list(range(len(joined.turns)))
        return [
            FeedbackRetracted(feedback_id=f"f{index}", request_id=joined.sample_id),
            msgspec.structs.replace(
                joined, revision=1, reward=0.0, feedback_ids=[], unrated=unrated
            ),
        ]
    rewards = [n / 4 for n in range(1 + index // 3 % 2)]
    later = [
        msgspec.structs.replace(joined, revision=n + 1, reward=reward)
        for n, reward in enumerate(rewards)
    ]
    if len(joined.turns) > 1:
        later.append(
            msgspec.structs.replace(
                joined,
                revision=9,
                reward=0.5,
                turn_rewards=[0.5, *[0.0] * (len(joined.turns) - 2), -0.5],
            )
        )
    return list(later)
