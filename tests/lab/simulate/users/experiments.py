"""Do gates promote or roll back for nothing, and do they see what is worse? A simulation.

The gatekeeper's own experiment is fed with the events of simulated users: each with a taste, a
talkativeness, a share of sessions they rate and a number of sessions of their own, so that sessions
of one user are alike; and all drift, up or down, while users come and go. In A/A experiments both
arms are the same.
"""

import heapq
import math
import random
from typing import Any

import msgspec

from penstock.actors.gatekeeper.config import GatekeeperConfig, LiveTestConfig
from penstock.actors.gatekeeper.experiment import Experiment, users_needed
from penstock.gateway.arms import Arms
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, Decision, ExperimentStarted, GateState, ReplyFacts
from penstock.messages.rollout import StoredTurn, TurnSummary, VersionSpan

DAY_S = 86400.0
KEEP_RATE = 0.7
PLANTED = 0.05
_EVERY = 50
"""Sessions between two looks at the evidence."""
_TURN = StoredTurn(
    object_key="claims/0-turn",
    num_bytes=1,
    blake3="0" * 64,
    summary=TurnSummary(
        num_context=9, num_sampled=9, version_spans=[VersionSpan(policy_version=0, num_tokens=9)]
    ),
)


class Population(msgspec.Struct, frozen=True, kw_only=True):
    """What users are like."""

    num_users: int = 1000
    sessions_mean: float = 4.0
    """Sessions of a user; geometric, so that few have many."""
    taste_sd: float = 1.0
    """Of the log-odds of a kept reply, over users."""
    drift: float = 0.6
    """Of the log-odds, from the first day to the last; its sign is drawn."""
    rated_share: float = 0.3
    """Of the sessions, over all users; some rate all, many none."""
    days: float = 7.0
    delay_s: float = 3600.0
    """Median time from a reply to its rating; log-normal."""


class _User(msgspec.Struct, frozen=True):
    name: str
    taste: float
    tokens: float
    edits: float
    rates: float


class Ended(msgspec.Struct, frozen=True):
    """How one experiment ended."""

    decision: Decision | None
    """None: held to the end."""
    num_sessions: int
    num_users: int
    """Whose reward was in the test."""


def run_experiment(
    seed: int, config: GatekeeperConfig, population: Population, effect: float = 0.0
) -> Ended:
    """Run one experiment to its decision, or to its last session.

    Promotion is counted as soon as the test over users passes, whatever guards say.

    Args:
        seed: Of the users, and of their arms.
        config: The gatekeeper's.
        population: The users.
        effect: Points by which the candidate's replies are kept more often.

    """
    rng = random.Random(seed)
    experiment, arms = Experiment(0, config), Arms("stable")
    arms.started(_started(config, rng))
    sign = rng.choice((-1.0, 1.0))
    ratings: list[tuple[float, int, LiveSampleJoined]] = []
    num_sessions = 0
    for at, user in _sessions(rng, population):
        while ratings and ratings[0][0] <= at:
            experiment.add_sample(heapq.heappop(ratings)[2])
        num_sessions += 1
        route = arms.route(user.name, at)
        drift = sign * population.drift * at / (population.days * DAY_S)
        rate = 1.0 / (1.0 + math.exp(-(user.taste + drift)))
        if route.channel == Arm.CANDIDATE:
            rate = min(1.0, max(0.0, rate + effect))
        record = _record(rng, user, num_sessions, at, route.variant, route.propensity)
        experiment.add_record(record)
        if rng.random() < user.rates:
            due = at + population.delay_s * math.exp(rng.gauss(0.0, 1.0))
            sample = _sample(record, float(rng.random() < rate))
            heapq.heappush(ratings, (due, num_sessions, sample))
        if num_sessions % _EVERY == 0 and (decision := _decision(experiment)) is not None:
            return Ended(decision, num_sessions, _num_users(experiment))
    return Ended(None, num_sessions, _num_users(experiment))


def simulate_experiments(num_experiments: int, seed: int = 0) -> dict[str, Any]:
    """Return the share of false decisions among A/A experiments, and how a planted drop fares."""
    config, population = GatekeeperConfig(), Population()
    same = [run_experiment(seed + i, config, population) for i in range(num_experiments)]
    ends = [one.decision for one in same]
    num_false = sum(end is not None for end in ends)
    single = msgspec.structs.replace(config, test=LiveTestConfig(sessions_per_user=1))
    needed = math.ceil(users_needed(PLANTED, KEEP_RATE * (1.0 - KEEP_RATE), 0.5, 0.025))
    crowd = Population(num_users=needed, sessions_mean=1.0, rated_share=1.0)
    num_planted = max(1, num_experiments // 20)
    planted = [run_experiment(seed + i, single, crowd, effect=-PLANTED) for i in range(num_planted)]
    caught = [one for one in planted if one.decision is Decision.ROLLED_BACK]
    return {
        "num_experiments": num_experiments,
        "aa_false_decisions": num_false / num_experiments,
        "aa_false_promotions": ends.count(Decision.PROMOTED) / num_experiments,
        "aa_false_rollbacks": ends.count(Decision.ROLLED_BACK) / num_experiments,
        "aa_users_mean": sum(one.num_users for one in same) / num_experiments,
        "planted_points": -100.0 * PLANTED,
        "planted_sessions_by_power": needed,
        "planted_num": num_planted,
        "planted_rolled_back": len(caught) / num_planted,
        "planted_sessions_p50": sorted(one.num_sessions for one in planted)[num_planted // 2],
    }


def _started(config: GatekeeperConfig, rng: random.Random) -> ExperimentStarted:
    return ExperimentStarted(
        number=0,
        policy_version=1,
        stable_version=0,
        share=config.test.share,
        salt=f"{rng.getrandbits(64):x}",
        sticky_s=config.test.sticky_s,
        at=0.0,
    )


def _sessions(rng: random.Random, population: Population) -> list[tuple[float, _User]]:
    """Return all sessions of all users, in the order of time."""
    found: list[tuple[float, int, _User]] = []
    middle = math.log(KEEP_RATE / (1.0 - KEEP_RATE))
    for index in range(population.num_users):
        taste = rng.gauss(middle, population.taste_sd) if population.taste_sd else middle
        spread = min(population.rated_share, 1.0 - population.rated_share)
        user = _User(
            name=f"u-{index}",
            taste=taste,
            tokens=math.exp(rng.gauss(5.0, 0.7)),
            edits=rng.betavariate(2.0, 2.0),
            rates=population.rated_share + rng.uniform(-spread, spread),
        )
        first = rng.uniform(0.0, population.days * DAY_S)
        num = 1
        while rng.random() > 1.0 / population.sessions_mean:
            num += 1
        for _ in range(num):
            found.append((first, len(found), user))
            first += rng.expovariate(1.0 / (6.0 * 3600.0))
    return [(at, user) for at, _, user in sorted(found, key=lambda one: one[:2])]


def _record(
    rng: random.Random, user: _User, index: int, at: float, variant: str, propensity: float
) -> InferenceRecorded:
    is_edit = rng.random() < user.edits
    facts = ReplyFacts(
        num_tokens=int(user.tokens * math.exp(rng.gauss(0.0, 0.3))),
        is_invalid=rng.random() < 0.02,
        is_question=not is_edit and rng.random() < 0.1,
        num_calls=1,
        tools={"edit_file" if is_edit else "read_file": 1},
    )
    return InferenceRecorded(
        request_id=f"r{index}",
        session_id=f"s{index}",
        key_id="k",
        tenant="t",
        user=user.name,
        training_consent=True,
        variant=variant,
        propensity=propensity,
        facts=facts,
        recorded_at=at,
        turn=_TURN,
        policy_version=0,
        replica="r",
    )


def _sample(record: InferenceRecorded, reward: float) -> LiveSampleJoined:
    return LiveSampleJoined(
        sample_id=record.request_id,
        request_ids=[record.request_id],
        turns=[_TURN.summary],
        reward=reward,
        feedback_ids=[],
        user=record.user,
        variant=record.variant,
        propensity=record.propensity,
        policy_version=0,
    )


def _decision(experiment: Experiment) -> Decision | None:
    gates = {gate.name: gate.state for gate in experiment.gates()}
    if GateState.REJECTED in gates.values():
        return Decision.ROLLED_BACK
    return Decision.PROMOTED if gates["users"] is GateState.PASSED else None


def _num_users(experiment: Experiment) -> int:
    return sum(one.rewards.num for one in experiment.estimates.values())
