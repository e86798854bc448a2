"""The same log with another loss, estimator or reward, as far as it can tell."""

import msgspec
import pytest
from tests.sealed import open_vault

from penstock.actors.trainer.batching.audit import counts
from penstock.actors.trainer.config import LossConfig, OptimizerConfig
from penstock.actors.trainer.counterfactual.what_if import WhatIf, ess_of, replay_what_if
from penstock.actors.trainer.objective.advantages import grpo
from penstock.actors.trainer.replay import ReplayLog
from penstock.messages.errors import CorruptDataError
from penstock.messages.reward import Verdict
from penstock.messages.training import BatchManifest, StepCompleted


def same(config):
    return config


def with_fields(**fields):
    return lambda config: msgspec.structs.replace(config, **fields)


async def asked(world, what_if):
    log = ReplayLog(
        deliveries=world.log.follow(),
        last=world.log.last,
        store=world.store,
        opener=open_vault(),
    )
    steps = []
    policy = world.trainer()._policy_config
    learner, report = await replay_what_if(
        log, policy, world.config, what_if, on_step=lambda _, result: steps.append(result)
    )
    assert report.weights_digest == learner.weights_digest()
    assert (report.steps, report.steps_compared) == (len(steps), 0)
    return report, steps


@pytest.fixture
async def world(make_world):
    found = make_world()
    await found.run()
    return found


async def test_nothing_different_gives_the_run_s_own_bits(world):
    report, steps = await asked(world, WhatIf(change=same, reward=lambda verdict: verdict.reward))
    recorded = world.log.of(StepCompleted)
    assert report.weights_digest == recorded[-1].weights_digest
    assert [ess_of(step.metrics) for step in steps] == [ess_of(e.metrics) for e in recorded]
    assert report.ended == ""


@pytest.mark.parametrize(
    "change",
    [
        with_fields(loss=LossConfig(correction="none")),
        with_fields(loss=LossConfig(name="ppo_clip", correction="none")),
        with_fields(estimator="grpo"),
    ],
)
async def test_another_loss_or_estimator_gives_another_policy(world, change):
    report, _ = await asked(world, WhatIf(change=change, ess_min=0.0))
    assert report.steps == 6
    assert report.weights_digest != world.log.of(StepCompleted)[-1].weights_digest


async def test_another_estimator_is_what_a_run_with_it_would_have_credited(world, monkeypatch):
    seen = []
    take = "penstock.actors.trainer.engines.local.train_step"
    from penstock.actors.trainer.step import train_step

    def spy(learner, manifest, *rest):
        seen.append(manifest)
        return train_step(learner, manifest, *rest)

    monkeypatch.setattr(take, spy)
    await asked(world, WhatIf(change=with_fields(estimator="grpo"), ess_min=0.0))
    assert [m.step for m in seen] == [1, 2, 3, 4, 5, 6]
    for manifest in seen:
        for group in manifest.groups:
            counted = [sample for sample in group.samples if counts(sample)]
            expected = grpo([sample.reward for sample in counted])
            assert [sample.advantage for sample in counted] == expected


async def test_other_rewards_are_of_the_verdicts(world):
    def halved(verdict):
        return verdict.components["tests"] / 2

    report, steps = await asked(world, WhatIf(change=same, reward=halved, ess_min=0.0))
    assert steps[0].metrics["loss"] == pytest.approx(
        world.log.of(StepCompleted)[0].metrics["loss"] / 2, rel=0.5
    )
    assert report.weights_digest != world.log.of(StepCompleted)[-1].weights_digest
    world.log.deliveries = [d for d in world.log.deliveries if not isinstance(d.event, Verdict)]
    with pytest.raises(CorruptDataError, match="the log has no verdict"):
        await asked(world, WhatIf(change=same, reward=halved))


async def test_it_ends_before_the_step_whose_tokens_say_too_little(world):
    recorded = world.log.of(StepCompleted)
    # At another first step the policy is the run's; from the second on it depends on the what-if.
    values = [ess_of(step.metrics) for step in recorded]
    assert 0.3 < min(values) < 1.0
    _, all_steps = await asked(world, WhatIf(change=same, ess_min=0.0))
    bound = sorted(values)[1]
    first = next(i for i, value in enumerate(values) if value < bound)
    report, steps = await asked(world, WhatIf(change=same, ess_min=bound))
    assert len(steps) == first
    told = f"before step {first + 1}: the effective sample size of its tokens is"
    assert report.ended.startswith(told)
    digests = ["", *(step.weights_digest for step in all_steps)]
    if first:
        assert report.weights_digest == digests[first]


async def test_by_default_it_ends_where_less_than_three_tenths_are_left(world):
    leap = with_fields(optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=1))
    _, all_steps = await asked(world, WhatIf(change=leap, ess_min=0.0))
    values = [ess_of(step.metrics) for step in all_steps]
    first = next(i for i, value in enumerate(values) if value < 0.3)
    assert first > 1 and values[first] > 0.25, "another bound would end elsewhere"
    report, steps = await asked(world, WhatIf(change=leap))
    assert [ess_of(step.metrics) for step in steps] == values[:first]
    assert f"before step {first + 1}: " in report.ended and "below 0.3: " in report.ended


async def test_the_run_stays_as_it_is(world):
    before = dict(world.store.objects)
    num_events = len(world.log.deliveries)
    await asked(world, WhatIf(change=with_fields(estimator="rloo")))
    assert world.store.objects == before and len(world.log.deliveries) == num_events
    assert world.log.of(BatchManifest)


def test_the_sample_size_of_older_records_follows_from_their_other_figures():
    log_ratios = [0.3, -0.2, 0.5, 0.0]
    from math import exp

    ratios = [exp(value) for value in log_ratios]
    n = len(ratios)
    expected = sum(ratios) ** 2 / (n * sum(r * r for r in ratios))
    metrics = {
        "mismatch_k1": -sum(log_ratios) / n,
        "mismatch_k3": sum(r - 1 - v for r, v in zip(ratios, log_ratios, strict=True)) / n,
        "mismatch_chi2": sum(r * r for r in ratios) / n - 1,
    }
    assert ess_of(metrics) == pytest.approx(expected)
    assert ess_of(metrics | {"ratio_ess": 0.5}) == 0.5
