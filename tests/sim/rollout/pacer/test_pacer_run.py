"""Whole runs on the in-memory bus: pacer, workers, judge, machines, evaluator, a stand-in trainer.

The trainer is the real batcher with an empty step, and records the staleness of each group.
"""

import asyncio
import random
from typing import ClassVar

import pytest
from tests.sim.rollout.conftest import FINISH, GOOD_SCRIPT, LOOK, World, reported
from tests.sim.rollout.saving import SavingBackend

from penstock.actors.judge.reward import LengthPenaltyConfig
from penstock.actors.pacer.config import TreeConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.trainer.batching.audit import ManifestAudit
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.config import TrainerConfig
from penstock.envs.tasks.storage import hidden_tests_key
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.errors import ConfigError
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reward import EvalCompleted, EvalRequested, Outcome, Verdict
from penstock.messages.rollout import RolloutFinished, TurnSampled
from penstock.messages.task import CreditsChanged, GroupGranted, Purpose, Split
from penstock.messages.training import (
    BatchManifest,
    GroupEntry,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
)

GROUP_SIZE = 2
PER_BATCH = 2


def midtrained() -> MidtrainCompleted:
    return MidtrainCompleted(
        num_tokens=1, loss_first=2.0, loss_last=1.0, heldout_loss=1.0, heldout_perplexity=3.0,
        weights_digest="d", wall_s=1.0,
    )  # fmt: skip


def stepped(step: int) -> StepCompleted:
    return StepCompleted(
        step=step, policy_version=step, weights_digest="d", optimizer_digest="d", metrics={}
    )


def group_entry(index: int) -> GroupEntry:
    return GroupEntry(group_id=f"g{index}", group_index=index, task_id="t", samples=[])


class StandInTrainer(Actor):
    """Forms batches with the real batcher, learns nothing; its weights arrive later."""

    role = "trainer"
    follows: ClassVar[tuple[type[Event], ...]] = (
        TurnSampled,
        RolloutFinished,
        Verdict,
        CreditsChanged,
    )
    tick_s = 0.05

    def __init__(self, world: World, config: TrainerConfig) -> None:
        self.step = 0
        self.staleness_seen: list[int] = []
        self._world = world
        self._config = config
        self._batcher = Batcher(config)

    async def on_turn_sampled(self, event: TurnSampled, ctx: Context) -> Effects:
        self._batcher.add_turn(event)
        return ()

    async def on_rollout_finished(self, event: RolloutFinished, ctx: Context) -> Effects:
        self._batcher.add_rollout(event)
        return ()

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        self._batcher.add_verdict(event)
        return ()

    async def on_credits_changed(self, event: CreditsChanged, ctx: Context) -> Effects:
        self._batcher.add_credits(event)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        step = self.step + 1
        if step > self._config.steps_max or (manifest := self._batcher.propose(step)) is None:
            return ()
        self._batcher.commit(manifest)
        self.step = step
        for group in manifest.groups:
            spans = [span for sample in group.samples for span in sample.version_spans]
            oldest = min(span.policy_version for span in spans)
            self.staleness_seen.append(manifest.policy_version - oldest)
        ctx.spawn(f"weights {step}", self._ship(step, ctx))
        done = [RunFinished(reason="steps", step=step)] if step == self._config.steps_max else []
        return [manifest, stepped(step), *done]

    async def _ship(self, version: int, ctx: Context) -> None:
        await ctx.sleep(0.4)
        self._world.policy.policy_version = version
        await ctx.publish(reported(version))


def start_trainer(world: World, **settings: object) -> StandInTrainer:
    config = TrainerConfig(groups_per_batch=PER_BATCH, **settings)
    trainer = StandInTrainer(world, config)
    world.host(trainer)
    return trainer


async def start_run(world: World, *, group_size: int = GROUP_SIZE, **pacer: object) -> None:
    """Start all the rest; about half of the rollouts solve their task."""

    def script(session: str) -> list:
        is_good = random.Random(session).random() < 0.5
        return GOOD_SCRIPT if is_good else [[LOOK], [FINISH]]

    await world.put_tasks()
    world.policy.scripts = script
    world.host(world.policy)
    world.host_machines()
    world.host_worker()
    world.host_judge(length_penalty=LengthPenaltyConfig(scale=0.0))
    world.host_pacer(group_size=group_size, groups_per_batch=PER_BATCH, **pacer)
    world.host_evaluator(num_eval_tasks=3)
    await world.publish(midtrained(), reported(0))


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("staleness_max", [0, 1, 3])
def test_a_run_stays_within_its_staleness_and_ends(
    simulate, staleness_max: int, filters: bool
) -> None:
    async def scenario(world: World) -> None:
        trainer = start_trainer(
            world, steps_max=6, staleness_max=staleness_max, filter_zero_variance=filters
        )
        await start_run(world, steps_max=6, staleness_max=staleness_max)
        before, after = await world.wait_for(EvalCompleted, 2)
        assert [before.policy_version, after.policy_version] == [0, 6]
        assert before.num_tasks + before.num_masked == 3
        assert max(trainer.staleness_seen) <= staleness_max
        manifests = await world.read(BatchManifest)
        credits = (await world.read(CreditsChanged))[-1]
        assert credits.num_groups_discarded == sum(len(m.discarded) for m in manifests)
        assert credits.num_groups_granted <= 12 + credits.num_groups_discarded
        if not filters:
            assert (len(trainer.staleness_seen), credits.num_groups_discarded) == (12, 0)
        await world.check_ledger()

    simulate(scenario)


@pytest.mark.parametrize("filters", [False, True])
def test_a_synchronous_run_grants_batch_by_batch(simulate, filters: bool) -> None:
    async def scenario(world: World) -> None:
        trainer = start_trainer(world, steps_max=3, staleness_max=4, filter_zero_variance=filters)
        await start_run(world, steps_max=3, staleness_max=4, synchronous=True)
        await world.wait_for(EvalCompleted, 2)
        assert set(trainer.staleness_seen) == {0}

    simulate(scenario)


@pytest.mark.parametrize("trunk_turns", [1, 2])
def test_a_run_of_trees_accounts_for_every_token_and_credits_trunks(
    simulate, tmp_path, trunk_turns: int
) -> None:
    async def scenario(world: World) -> None:
        world.backend = SavingBackend()
        config = TrainerConfig(groups_per_batch=PER_BATCH, steps_max=3, staleness_max=1)
        trainer = StandInTrainer(world, config)
        world.host(trainer)
        tree = TreeConfig(trunk_turns=trunk_turns, branches=3)
        await start_run(world, group_size=6, steps_max=3, staleness_max=1, tree=tree)
        await world.wait_for(EvalCompleted, 2)
        assert max(trainer.staleness_seen) <= 1
        await world.check_ledger()
        ledger, audit = Ledger(), ManifestAudit(config)
        for turn in await world.read(TurnSampled):
            ledger.add_turn(turn)
        for verdict in await world.read(Verdict):
            audit.add_verdict(verdict)
        ends = {end.rollout_id: end for end in await world.read(RolloutFinished)}
        for end in ends.values():
            audit.add_rollout(end.event)
        manifests = await world.read(BatchManifest)
        for manifest in manifests:
            ledger.add_manifest(manifest)
            assert list(audit.differences(manifest)) == []
        assert ledger.balanced and ledger.totals().trained > 0
        samples = [sample for m in manifests for group in m.groups for sample in group.samples]
        trunks = [sample.trunk for sample in samples if sample.trunk]
        shared = {end.trunk.rollout_id for end in ends.values() if end.trunk}
        assert {trunk.branches[0] for trunk in trunks} <= shared and trunks
        assert any(trunk.advantage for trunk in trunks)
        for trunk in trunks:
            turns = ends[trunk.branches[0]].turns[:trunk_turns]
            assert trunk.num_tokens == sum(turn.token_ids.shape[0] for turn in turns)

    simulate(scenario)


def test_training_waits_for_the_baseline(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_pacer(group_size=1, groups_per_batch=1, staleness_max=0)
        world.host_evaluator(num_eval_tasks=2)
        await world.publish(midtrained(), reported())
        commands = await world.wait_for_commands(2)
        await asyncio.sleep(5.0)
        assert {command.purpose for command in commands} == {Purpose.EVAL}
        assert len(world.commands()) == 2
        await world.publish(
            EvalCompleted(eval_id="v0", policy_version=0, num_solved=0, num_tasks=2)
        )
        commands = await world.wait_for_commands(3)
        assert commands[-1].rollout_id == "g0-m0"

    simulate(scenario)


def test_training_comes_before_an_evaluation_beside_it(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_pacer(
            group_size=1, groups_per_batch=1, staleness_max=0, await_baseline=False,
        )  # fmt: skip
        world.host_evaluator(num_eval_tasks=2)
        await world.publish(midtrained(), reported(0, "east", serves=[Purpose.EVAL]))
        await asyncio.sleep(2.0)
        assert world.commands() == []
        await world.publish(reported(0, "west", serves=[Purpose.TRAIN]))
        commands = await world.wait_for_commands(3)
        purposes = [command.purpose for command in commands]
        assert purposes == [Purpose.TRAIN, Purpose.EVAL, Purpose.EVAL]

    simulate(scenario)


def test_grants_wait_for_the_slowest_replica(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_pacer(
            group_size=1, groups_per_batch=1, staleness_max=0, await_baseline=False,
        )  # fmt: skip
        await world.publish(midtrained(), reported(0), reported(0, "east"))
        await world.wait_for_commands(1)
        await world.publish(stepped(1), reported(1))
        await asyncio.sleep(2.0)
        assert len(world.commands()) == 1
        await world.publish(reported(1, "east"))
        await world.wait_for_commands(2)

    simulate(scenario)


def test_a_restarted_pacer_grants_nothing_twice_and_goes_on(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        settings = {
            "group_size": 2, "groups_per_batch": 2, "staleness_max": 1, "await_baseline": False,
        }  # fmt: skip
        pacer = world.host_pacer(**settings)
        await world.publish(midtrained(), reported())
        await world.wait_for_commands(8)
        await pacer.kill()
        await asyncio.sleep(2000.0)  # beyond the window in which the stream knows its own ids
        world.host_pacer(**settings)
        await asyncio.sleep(2.0)
        assert len(world.commands()) == 8
        batch = [group_entry(0), group_entry(1)]
        await world.publish(
            BatchManifest(step=1, policy_version=0, groups=batch), stepped(1), reported(1)
        )
        commands = await world.wait_for_commands(12)
        assert [c.rollout_id for c in commands[8:]] == ["g4-m0", "g4-m1", "g5-m0", "g5-m1"]
        assert len({command.rollout_id for command in commands}) == 12

    simulate(scenario)


@pytest.mark.parametrize(("rewards", "is_skipped"), [([1.0, 1.0], True), ([1.0, 0.9], False)])
def test_tasks_that_all_rollouts_solved_alike_are_skipped_where_they_are_trained_too(
    simulate, rewards: list[float], is_skipped: bool
) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_pacer(
            group_size=2, groups_per_batch=2, staleness_max=1, await_baseline=False,
            revisit_share=1.0,
        )  # fmt: skip
        await world.publish(midtrained(), reported())
        await world.wait_for_commands(8)
        samples = [
            SampleEntry(rollout_id=f"m{member}", outcome=Outcome.SOLVED, reward=reward,
                        advantage=0.0, version_spans=[])
            for member, reward in enumerate(rewards)
        ]  # fmt: skip
        groups = [
            GroupEntry(group_id=f"g{one.group_index}", group_index=one.group_index,
                       task_id=one.task_id, samples=samples, num_judged=2, num_solved=2)
            for one in (await world.read(GroupGranted))[:2]
        ]  # fmt: skip
        await world.publish(
            BatchManifest(step=1, policy_version=0, groups=groups), stepped(1), reported(1)
        )
        await world.wait_for_commands(12)
        granted = await world.read(GroupGranted)
        assert (granted[-1].num_skipped > 0) is is_skipped

    simulate(scenario)


def test_no_grant_after_the_end_and_the_final_evaluation_still_runs(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_pacer(group_size=1, groups_per_batch=1, await_baseline=False)
        await world.publish(RunFinished(reason="solved", step=0))
        await asyncio.sleep(1.0)
        await world.publish(
            midtrained(), reported(), EvalRequested(eval_id="v9", policy_version=9, num_tasks=4)
        )
        commands = await world.wait_for_commands(4)
        await asyncio.sleep(2.0)
        assert len(world.commands()) == 4
        assert {command.purpose for command in commands} == {Purpose.EVAL}

    simulate(scenario)


def test_a_category_that_does_not_exist_stops_the_pacer_with_the_choices(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        pacer = world.host_pacer(await_baseline=False, category_weights={"expert": 1.0})
        await world.publish(midtrained(), reported())
        with pytest.raises(ConfigError, match=r"expert.*operator"):
            await asyncio.wait_for(pacer.task, 10.0)

    simulate(scenario)


def test_an_evaluation_that_misses_verdicts_ends_at_its_deadline(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        evaluator = world.host_evaluator(num_eval_tasks=3, eval_deadline_s=60.0)
        await world.publish(midtrained(), reported())
        [completed] = await world.wait_for(EvalCompleted, 1)
        assert (completed.num_tasks, completed.num_masked) == (0, 3)
        await evaluator.kill()
        world.host_evaluator(num_eval_tasks=3, eval_deadline_s=60.0)
        await asyncio.sleep(200.0)
        assert len(await world.read(EvalCompleted)) == 1
        assert len(await world.read(EvalRequested)) == 1

    simulate(scenario)


def test_faults_of_the_bus_change_no_account(simulate) -> None:
    async def scenario(world: World) -> None:
        world.set_faults(
            lose_receipt=0.05, lose_delivery=0.05, duplicate_delivery=0.1, reorder_delivery=0.3,
            lose_ack=0.05, lose_request=0.01, lose_reply=0.01, latency_s_max=0.01,
        )  # fmt: skip
        trainer = start_trainer(world, steps_max=4, staleness_max=1, filter_zero_variance=False)
        await start_run(world, steps_max=4, staleness_max=1)
        await world.wait_for(EvalCompleted, 2)
        assert max(trainer.staleness_seen) <= 1
        await asyncio.sleep(60.0)
        await world.check_ledger()
        verdicts = await world.read(Verdict)
        assert len({verdict.rollout_id for verdict in verdicts}) == len(verdicts)

    simulate(scenario)


def test_pacer_and_evaluator_work_without_the_hidden_tests(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        for split in Split:
            await world.store.delete(hidden_tests_key(split))
        world.host_pacer(await_baseline=False, groups_per_batch=2, group_size=2)
        world.host_evaluator(num_eval_tasks=3)
        await world.publish(midtrained(), reported(0))
        [requested] = await world.wait_for(EvalRequested, 1)
        assert requested.num_tasks == 3
        await world.wait_for(CreditsChanged, 1)
        purposes = [command.purpose for command in world.commands()]
        assert purposes.count(Purpose.EVAL) == 3 and Purpose.TRAIN in purposes

    simulate(scenario)
