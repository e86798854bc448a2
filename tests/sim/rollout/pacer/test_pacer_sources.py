"""Mixes of sources, several evaluation sets, and what a restarted pacer knows of its grants."""

import random
from collections import Counter, defaultdict

import msgspec
from tests.sim.rollout.conftest import (
    FINISH,
    GOOD_SCRIPT,
    LOOK,
    World,
    make_hidden,
    make_task,
    reported,
)
from tests.sim.rollout.pacer.test_pacer_run import midtrained, start_trainer, stepped

from penstock.actors.evaluator.schedule import EvalSetConfig
from penstock.actors.judge.reward import LengthPenaltyConfig
from penstock.actors.pacer.actor import Pacer
from penstock.actors.pacer.config import PacerConfig
from penstock.messages.control import RunFinished
from penstock.messages.reward import EvalCompleted, EvalRequested, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import GroupGranted, Split
from penstock.messages.training import BatchManifest, GroupEntry


async def put_mix(world: World, num: int = 12) -> None:
    """Put tasks of two sources: each task of `easy` is solved, of `hard` about half."""
    for split in Split:
        tasks = [
            msgspec.structs.replace(
                make_task(f"{source}-{split}-{n}", split), source=source, category=f"c{n % 2}"
            )
            for source in ("easy", "hard")
            for n in range(num)
        ]
        await world.put_split(tasks, [make_hidden(task.task_id) for task in tasks])


def test_a_crash_between_a_grant_and_its_commands_changes_no_task(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks(num_train=8)
        settings = {"group_size": 2, "groups_per_batch": 2, "staleness_max": 0}
        other = [GroupGranted(group_index=n, task_id=f"train-{7 - n}") for n in range(2)]
        await world.publish(*other)
        world.host_pacer(await_baseline=False, **settings)
        await world.publish(midtrained(), reported())
        commands = await world.wait_for_commands(4)
        assert [c.task.task_id for c in commands] == ["train-7"] * 2 + ["train-6"] * 2
        assert await world.read(GroupGranted) == other

    simulate(scenario)


def test_grants_before_a_restart_count_as_attempts_after_it(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks(num_train=6)
        settings = {
            "group_size": 1, "groups_per_batch": 2, "staleness_max": 0, "await_baseline": False,
        }  # fmt: skip
        pacer = world.host_pacer(**settings)
        await world.publish(midtrained(), reported())
        for step in (1, 2, 3):
            first = 2 * (step - 1)
            commands = await world.wait_for_commands(2 * step)
            if step == 2:
                await pacer.kill()
                world.host_pacer(**settings)
            groups = [
                GroupEntry(group_id=f"g{n}", group_index=n, task_id=commands[n].task.task_id,
                           samples=[], num_judged=1)
                for n in (first, first + 1)
            ]  # fmt: skip
            manifest = BatchManifest(step=step, policy_version=step - 1, groups=groups)
            await world.publish(manifest, stepped(step), reported(step))
        granted = await world.wait_for(GroupGranted, 8)
        assert len({one.task_id for one in granted[:6]}) == 6
        assert [one.attempt for one in granted] == [0] * 6 + [1] * 2

    simulate(scenario)


SETS = (
    EvalSetConfig(name="sampled", num_tasks=4, num_samples=4, sources=["hard"]),
    EvalSetConfig(name="greedy", num_tasks=8, temperature=0.0, every_steps=2),
)


def test_a_run_of_two_sources_is_evaluated_on_two_sets(simulate) -> None:
    async def scenario(world: World) -> None:
        await put_mix(world)
        world.policy.scripts = lambda session: (
            GOOD_SCRIPT if random.Random(session).random() < 0.5 else [[LOOK], [FINISH]]
        )
        trainer = start_trainer(world, steps_max=4, staleness_max=1)
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        world.host_judge(length_penalty=LengthPenaltyConfig(scale=0.0))
        pacer = PacerConfig(
            group_size=4, groups_per_batch=2, staleness_max=1, steps_max=4, eval_temperature=1.0
        )
        world.host(Pacer(pacer, {"easy": 1.0, "hard": 3.0}))
        world.host_evaluator(sets=SETS)
        await world.publish(midtrained(), reported(0))
        await world.wait_for(RunFinished, 1)
        completed = await world.wait_for(EvalCompleted, 5)
        assert trainer.step == 4
        ids = [one.eval_id for one in completed]
        assert ids[:3] == ["v0-sampled", "v0-greedy", "v2-greedy"]
        assert sorted(ids[3:]) == ["v4-greedy", "v4-sampled"]
        assert {one.eval_set: one.is_main for one in completed} == {
            "sampled": True, "greedy": False,
        }  # fmt: skip
        asked = {one.eval_id: one for one in await world.read(EvalRequested)}
        assert [asked[name].num_attempts for name in ids[:3]] == [16, 8, 8]
        for one in completed:
            check_estimates(one, await world.read(Verdict))
        ends = [one.event for one in await world.read(RolloutFinished)]
        first = [end for end in ends if end.group_id == "v0-sampled"]
        assert {end.source for end in first} == {"hard"}
        assert set(Counter(end.task_id for end in first).values()) == {4}
        asked_of = [(r.session_id, r.sampling) for r in world.policy.requests]
        temperatures = defaultdict(set)
        for session, sampling in asked_of:
            temperatures[session.rpartition("-")[0]].add(sampling.temperature)
        assert temperatures["ev0-sampled"] == {1.0} and temperatures["ev0-greedy"] == {0.0}
        sessions = [session for session, _ in asked_of]
        trained = [n for n, session in enumerate(sessions) if session.startswith("g")]
        baseline = [n for n, session in enumerate(sessions) if session.startswith("ev0")]
        assert max(baseline) < trained[0], "training waits for the baseline on every set"

    simulate(scenario)


def check_estimates(completed: EvalCompleted, verdicts: list[Verdict]) -> None:
    """Count again, from the verdicts."""
    own = [v for v in verdicts if v.group_id == completed.eval_id and not v.outcome.is_masked]
    of = [
        v for v in own
        if v.policy_version == v.policy_version_max == completed.policy_version
    ]  # fmt: skip
    assert completed.num_tasks == len(of)
    by_source: dict[str, list[bool]] = defaultdict(list)
    for verdict in of:
        by_source[verdict.source].append(verdict.outcome == "solved")
    expected = {source: sum(each) / len(each) for source, each in by_source.items()}
    assert completed.pass_rate_by_source == expected
    if of and completed.num_samples == 4:
        assert set(completed.pass_at_k) <= {1, 2, 4}
        rates = [completed.pass_at_k[k] for k in sorted(completed.pass_at_k)]
        assert rates == sorted(rates)
