"""Runs with every kind of objective: killed, resumed, replayed to the same bits."""

import pytest
from tests.sealed import open_vault

from penstock.actors.monitor.fold import RunFold
from penstock.actors.trainer.config import KlConfig, LossConfig
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reading.ledger import Ledger
from penstock.messages.rollout import TurnSampled
from penstock.messages.training import BatchManifest, StepCompleted

SETTINGS = {
    "several passes, past versions, k3": {
        "num_passes": 2,
        "versions_kept": 2,
        "loss": LossConfig(
            name="decoupled_ppo",
            correction="icepop",
            ratio_low=0.0,
            ratio_high=50.0,
            entropy_bonus=0.01,
            kl=KlConfig(where="loss", coefficient=0.1),
        ),
    },
    "k1 in the reward, geometric": {
        "versions_kept": 1,
        "loss": LossConfig(
            correction="geometric",
            geometric_low=0.0,
            geometric_high=50.0,
            kl=KlConfig(where="reward", coefficient=0.1),
        ),
    },
    "gspo, rejection": {
        "num_passes": 2,
        "loss": LossConfig(
            name="gspo", correction="none", rejection="token_k1", rejection_low=0.2,
            rejection_high=5.0, clip_low=0.5, clip_high=5.0,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
async def test_killed_it_recovers_and_replays(make_world, name):
    world = make_world(1, steps_max=4, **SETTINGS[name])
    world.log.num_until_kill = 5
    num_kills = await world.run()
    assert num_kills == 1
    steps = world.log.of(StepCompleted)
    assert [event.step for event in steps] == list(range(1, world.config.steps_max + 1))
    assert len({event.weights_digest for event in steps}) > 2, "something was trained"
    assert any(event.metrics["masked_fraction"] < 1 for event in steps)
    ledger = Ledger()
    for event in world.log.of(TurnSampled):
        ledger.add_turn(event)
    for event in world.log.of(LiveSampleJoined):
        ledger.add_live(event)
    for event in world.log.of(BatchManifest):
        ledger.add_manifest(event)
    assert ledger.violations == []
    log = ReplayLog(
        deliveries=world.log.follow(), last=world.log.last, store=world.store, opener=open_vault()
    )
    report = await replay(log, world.policy, world.config)
    assert (report.first_difference, report.identical) == ("", True)
    assert report.weights_digest == steps[-1].weights_digest


async def test_every_metric_of_a_step_reaches_whoever_looks(make_world):
    world = make_world(1, steps_max=3)
    await world.run()
    for event in world.log.of(StepCompleted):
        fold = RunFold()
        fold.apply(event, 0.0)
        (point,) = fold.state(0.0).steps
        assert point.metrics == pytest.approx(event.metrics, rel=1e-5)


async def test_every_step_records_its_figures(make_world):
    world = make_world(1, steps_max=3)
    await world.run()
    trained = [event.metrics for event in world.log.of(StepCompleted) if event.staleness_tokens]
    names = {
        *("entropy", "kl_reference", "kl_reference_k3", "grad_norm", "grad_norm_max"),
        *("grad_clipped", "clipped_fraction", "ratio_mean", "ratio_min", "ratio_max", "ratio_ess"),
        *(
            f"mismatch_{part}_{figure}"
            for part in ("engine", "staleness")
            for figure in ("k1", "k3", "chi2")
        ),
    }
    assert trained
    assert all(names <= metrics.keys() for metrics in trained)
