"""What a log says of one candidate."""

from penstock.messages.base import Event
from penstock.messages.gates import (
    Arm,
    ArmView,
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    ExperimentView,
    Gate,
    GateEvaluated,
    GateState,
)
from penstock.messages.generation import ChannelMoved


def moved(number: int, **channels: int) -> ChannelMoved:
    name = list(channels)[-1]
    return ChannelMoved(
        number=number, channel=name, policy_version=channels[name], channels=channels
    )


def chosen() -> CandidateChosen:
    return CandidateChosen(number=0, policy_version=7, stable_version=3, at=100.0)


def started() -> ExperimentStarted:
    return ExperimentStarted(
        number=0, policy_version=7, stable_version=3, share=0.5, salt="s", sticky_s=1e5, at=101.0
    )


def evaluated() -> GateEvaluated:
    gates = [
        Gate(name="quality_bar", state=GateState.PASSED, words="version 3: 0.61 of 64 tasks",
             value=0.61, bound=0.25),
        Gate(name="offline", state=GateState.PASSED, words="64 tasks, 5 gained, 2 lost",
             value=0.66, baseline=0.61, bound=0.02, num_candidate=64, num_stable=64),
        Gate(name="kl", state=GateState.PASSED, words="0.013, bound 0.05", value=0.013, bound=0.05),
        Gate(name="reply_length", state=GateState.FAILED, words="4.1, stable 6.2, bound 1",
             value=4.1, baseline=6.2, bound=1.0, num_candidate=410, num_stable=402),
        Gate(name="question_rate", state=GateState.WAITING,
             words="0.09, stable 0.08, bound 0.05; 12 of 200 users per arm",
             value=0.09, baseline=0.08, bound=0.05),
        Gate(name="users", state=GateState.WAITING,
             words="no significant difference yet: reward 0.712, stable 0.701"),
    ]  # fmt: skip
    arms = [
        ArmView(arm=Arm.STABLE, policy_version=3, num_users=402, num_sessions=1203,
                reward_mean=0.7012, ips=0.6980, snips=0.7012, doubly_robust=0.7009),
        ArmView(arm=Arm.CANDIDATE, policy_version=7, num_users=410, num_sessions=1244,
                reward_mean=0.7121, ips=0.7210, snips=0.7121, doubly_robust=0.7118),
    ]  # fmt: skip
    view = ExperimentView(
        number=0, policy_version=7, stable_version=3, phase="arms", gates=gates, arms=arms,
        blocked_by="reply_length: 4.1, stable 6.2, bound 1", difference=0.0109,
        difference_low=-0.081, difference_high=0.102, evidence_better=1.31, evidence_worse=0.22,
        share=0.5, num_sessions_missing=24_311, seconds_missing=2.1e6,
    )  # fmt: skip
    return GateEvaluated(view=view)


def decided() -> ExperimentDecided:
    return ExperimentDecided(
        number=0, decision=Decision.ROLLED_BACK, policy_version=7, stable_version=3,
        reason="reply_length: 2, stable 6", at=150.0,
    )  # fmt: skip


def gate_story() -> list[Event]:
    """A candidate whose users are divided."""
    moves = [moved(0, stable=3), moved(1, stable=3, candidate=7)]
    return [moves[0], chosen(), moves[1], started(), evaluated()]
