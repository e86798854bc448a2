"""The gatekeeper: what becomes stable, what never does, and that nobody decides twice."""

import asyncio
import io
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.sim.gates.world import CONFIG, NUM_TASKS, World, good, lossy, published, simulate

from penstock.infra.commands.experiment import ExperimentReport, read_experiment, render
from penstock.infra.config.file import load_config
from penstock.messages.gates import (
    Arm,
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    GateEvaluated,
    ReplyFacts,
)
from penstock.messages.generation import ChannelMoved


async def stable_version(world: World) -> int:
    return (await world.read(ChannelMoved))[-1].channels["stable"]


async def settled(world: World) -> ExperimentDecided:
    """Return the first decision, and let what follows from it happen."""
    decided = await world.wait_for(ExperimentDecided)
    await asyncio.sleep(10.0)
    return decided


async def candidate(world: World) -> ExperimentStarted:
    """Start a gatekeeper at version 0, and publish version 1."""
    world.gatekeeper()
    await world.wait_for(ChannelMoved)
    await world.publish(published(1))
    return await world.wait_for(ExperimentStarted)


def short_and_liked(arm: Arm, rng: random.Random) -> tuple[ReplyFacts, float | None]:
    """D5: live feedback drove replies to 1-3 tokens, and users' signals liked it."""
    facts, reward = good(arm, rng)
    if arm is Arm.CANDIDATE:
        return msgspec.structs.replace(facts, num_tokens=rng.randint(1, 3)), 1.0
    return facts, reward


def broken_and_unjudged(arm: Arm, rng: random.Random) -> tuple[ReplyFacts, float | None]:
    """Hack 1: calls that break leave the accounts, so that what is judged looks good."""
    facts, reward = good(arm, rng)
    if arm is Arm.CANDIDATE and rng.random() < 0.5:
        return ReplyFacts(num_tokens=60, num_calls=1, is_invalid=True), None
    return facts, reward


def asking(arm: Arm, rng: random.Random) -> tuple[ReplyFacts, float | None]:
    """Hack 2: a clarifying question instead of a risky edit is never rejected."""
    facts, reward = good(arm, rng)
    if arm is Arm.CANDIDATE and rng.random() < 0.6:
        return ReplyFacts(num_tokens=60, is_question=True), 1.0
    return facts, reward


def worse(arm: Arm, rng: random.Random) -> tuple[ReplyFacts, float | None]:
    facts, _ = good(arm, rng)
    return facts, float(rng.random() < (0.3 if arm is Arm.CANDIDATE else 0.8))


def test_a_better_version_is_promoted_and_then_the_newest_one_is_the_candidate() -> None:
    async def scenario(world: World) -> None:
        started = await candidate(world)
        assert (started.policy_version, started.stable_version) == (1, 0)
        await world.publish(published(2), published(3))
        await world.users(good, number=0)
        decided = await settled(world)
        assert decided.decision is Decision.PROMOTED, decided.reason
        chosen = await world.wait_for(CandidateChosen, 2)
        assert (chosen.policy_version, chosen.stable_version) == (3, 1)
        assert await stable_version(world) == 1
        assert {gate.state.value for gate in decided.gates} == {"passed"}

    simulate(scenario)


@pytest.mark.parametrize(
    ("behavior", "guards"),
    [
        (short_and_liked, {"reply_length"}),
        (broken_and_unjudged, {"invalid_calls"}),
        (asking, {"question_rate", "edit_rate"}),
        (worse, {"users"}),
    ],
)
def test_collapse_both_hacks_and_worse_versions_are_rolled_back(behavior, guards) -> None:
    async def scenario(world: World) -> None:
        await candidate(world)
        assert {world.arms.route(f"u{i}", 0.0).channel for i in range(50)} == {*Arm}
        await world.users(behavior, number=0)
        decided = await settled(world)
        assert decided.decision is Decision.ROLLED_BACK
        assert decided.reason.partition(":")[0] in guards
        assert {move.channels["stable"] for move in await world.read(ChannelMoved)} == {0}
        assert {world.arms.route(f"u{i}", 0.0).channel for i in range(50)} == {"stable"}

    simulate(scenario)


def test_what_a_guard_blocks_is_held_however_much_users_like_it() -> None:
    # Promotion is refused as soon as the difference shows, long before it is proven.
    async def scenario(world: World) -> None:
        await candidate(world)
        await world.users(short_and_liked, number=0, times=5)
        assert await world.read(ExperimentDecided) == []
        assert await stable_version(world) == 0
        view = (await world.read(GateEvaluated))[-1].view
        assert view.evidence_better > 1e6
        assert view.blocked_by.startswith("reply_length")

    simulate(scenario, config=msgspec.structs.replace(CONFIG, guard_alpha=1e-300))


def test_a_version_that_solves_fewer_tasks_meets_no_user() -> None:
    async def scenario(world: World) -> None:
        world.gatekeeper()
        await world.wait_for(ChannelMoved)
        await world.publish(published(1))
        decided = await settled(world)
        assert decided.decision is Decision.ROLLED_BACK
        assert decided.reason.startswith("offline: 20 tasks, 0 gained, 6 lost")
        assert await world.read(ExperimentStarted) == []
        assert await stable_version(world) == 0

    simulate(scenario, solved={1: NUM_TASKS - 6})


def test_below_the_quality_bar_nothing_is_tried_on_users() -> None:
    async def scenario(world: World) -> None:
        world.gatekeeper()
        await world.wait_for(ChannelMoved)
        await world.publish(published(1))
        decided = await world.wait_for(ExperimentDecided, within_s=400.0)
        assert decided.decision is Decision.EXPIRED
        assert decided.reason == "quality_bar: version 1: 0.35 of 20 tasks, expected 0.4"
        assert await world.read(ExperimentStarted) == []

    hurried = msgspec.structs.replace(CONFIG, prepare_s_max=200.0)
    simulate(scenario, solved={0: 7, 1: 7}, config=hurried)


def test_a_channel_moved_by_hand_ends_the_experiment_and_counts() -> None:
    async def scenario(world: World) -> None:
        await candidate(world)
        await world.publish(published(2))
        number = len(await world.read(ChannelMoved))
        channels = {"stable": 2, "candidate": 1}
        await world.publish(
            ChannelMoved(number=number, channel="stable", policy_version=2, channels=channels)
        )
        decided = await settled(world)
        assert decided.decision is Decision.ABANDONED
        assert await stable_version(world) == 2
        await world.publish(published(3))
        chosen = await world.wait_for(CandidateChosen, 2)
        assert (chosen.policy_version, chosen.stable_version) == (3, 2)

    simulate(scenario)


RISE = [(1, good, "promoted")]
RISE_FALL_RISE = [*RISE, (2, short_and_liked, "rolled_back"), (3, good, "promoted")]


@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (0, RISE),
        *(pytest.param(seed, RISE_FALL_RISE, marks=pytest.mark.slow) for seed in range(10)),
    ],
)
def test_two_gatekeepers_that_are_killed_again_and_again_decide_once(seed, story) -> None:
    async def chaos(world: World) -> None:
        rng = random.Random(seed)
        running = [world.gatekeeper(), world.gatekeeper()]
        while True:
            await asyncio.sleep(rng.uniform(3.0, 30.0))
            running.pop(rng.randrange(2)).cancel()
            running.append(world.gatekeeper())

    async def scenario(world: World) -> None:
        world.server.faults = lossy()
        killing = asyncio.create_task(chaos(world))
        await world.wait_for(ChannelMoved)
        for version, behavior, _ in story:
            await world.publish(published(version))
            await world.wait_for(ExperimentStarted, version)
            await world.users(behavior, number=version - 1)
            await world.wait_for(ExperimentDecided, version)
        await asyncio.sleep(60.0)
        killing.cancel()
        decided = await world.read(ExperimentDecided)
        assert [one.decision.value for one in decided] == [ends for _, _, ends in story]
        moves = await world.read(ChannelMoved)
        assert [move.number for move in moves] == list(range(len(moves)))
        made = Counter((move.channel, move.policy_version) for move in moves)
        promoted = [version for version, _, ends in story if ends == "promoted"]
        assert made == Counter(
            [("stable", version) for version in (0, *promoted)]
            + [("candidate", version) for version, _, _ in story]
        )

    simulate(scenario)


def test_a_promotion_whose_channel_was_not_moved_is_made_up_for() -> None:
    async def scenario(world: World) -> None:
        running = world.gatekeeper()
        await world.wait_for(ChannelMoved)
        await world.publish(published(1))
        await world.wait_for(ExperimentStarted)
        running.cancel()
        decided = ExperimentDecided(
            number=0, decision=Decision.PROMOTED, policy_version=1, stable_version=0,
            reason="every gate passed", at=0.0,
        )  # fmt: skip
        await world.publish(decided)
        world.gatekeeper()
        moved = await world.wait_for(ChannelMoved, 3)
        assert (moved.channel, moved.policy_version, moved.candidate_number) == ("stable", 1, 0)

    simulate(scenario)


def test_a_gatekeeper_reads_the_whole_log_before_it_decides() -> None:
    # Half a log looks like a promotion; the whole one does not.
    async def scenario(world: World) -> None:
        running = world.gatekeeper()
        await world.wait_for(ChannelMoved)
        await world.publish(published(1))
        await world.wait_for(ExperimentStarted)
        running.cancel()
        await world.users(good, number=0, num=100, times=1)
        await world.users(worse, number=0, num=100, times=6)
        world.gatekeeper()
        decided = await settled(world)
        assert decided.decision is Decision.ROLLED_BACK

    simulate(scenario)


def test_penstock_experiment_reports_what_the_gatekeeper_sees() -> None:
    config = msgspec.structs.replace(
        load_config(Path("examples/quickstart/config.toml")), gatekeeper=CONFIG
    )

    async def report(world: World) -> ExperimentReport:
        return await read_experiment(world.bus, world.store, config, effect=0.02)

    def shown(found: ExperimentReport) -> str:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(render(found))
        return console.export_text()

    async def scenario(world: World) -> None:
        assert "no version has been a candidate yet" in shown(await report(world))
        await candidate(world)
        assert "looks once needs 9,803 per arm" in shown(await report(world)), "at a reward of 0.5"
        await world.users(good, number=0, num=15, times=2)
        found = await report(world)
        assert found.channels == {"stable": 0, "candidate": 1}
        assert (found.candidate.phase, found.candidate.share) == ("arms", 0.5)
        assert sum(arm.num_users for arm in found.candidate.arms) == 30
        better, other = (arm.snips for arm in reversed(found.candidate.arms))
        assert better > other
        assert found.candidate.num_sessions_missing > 10_000
        assert found.candidate.blocked_by in shown(found)
        assert "days at the traffic so far" in shown(found)
        await world.users(good, number=0)
        await settled(world)
        found = await report(world)
        assert found.candidate.phase == "promoted"
        assert [one.decision for one in found.decided] == [Decision.PROMOTED]
        assert "every gate passed" in shown(found)

    simulate(scenario)
