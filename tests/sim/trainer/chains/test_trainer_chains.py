"""Runs over chains of segments, of rollouts and of users' sessions: kills, ledger, replay."""

import msgspec
import numpy as np
import pytest
import torch
from tests.sim.trainer.conftest import POLICY, World, make_turn, small_config
from tests.sim.trainer.sessions import session_events
from tests.sim.trainer.test_trainer_run import check_run, ledger_of, replayed

from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.kernels.arrays import from_array, to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.rollout import RolloutFinished
from penstock.messages.training import BatchManifest, StepCompleted


class ChainWorld(World):
    """Every other turn is a summary, and the turn after it begins a segment."""

    is_withheld = False

    def turn(self, version, before=()):
        if before and before[-1].is_summary:
            first = make_turn(self.numpy, version, ())
            return msgspec.structs.replace(first, starts_segment=True)
        start = max((i for i, turn in enumerate(before) if turn.starts_segment), default=0)
        turn = make_turn(self.numpy, version, before[start:])
        return self._summary(turn) if len(before) - start == 1 else turn

    def _summary(self, turn):
        return msgspec.structs.replace(turn, is_summary=True, is_withheld=self.is_withheld)

    def _live(self, index, version):
        """Two requests, the second of which sums the first up, and one in a new context."""
        first = self.turn(version)
        past = np.concatenate([from_array(first.context_ids), from_array(first.token_ids)])
        later = self.turn(version)
        context = np.concatenate([past, from_array(later.context_ids)]).astype(np.int32)
        shape = (context.size + later.token_ids.shape[0] - 1, POLICY.num_hidden_layers, 2)
        routes = torch.zeros(shape, dtype=torch.int16)
        routes[..., 1] = 1
        sealed = seal_routes(routes, num_experts=POLICY.num_experts, policy_version=version)
        summary = msgspec.structs.replace(
            self._summary(later), context_ids=to_array(context), route_segments=[sealed]
        )
        after = msgspec.structs.replace(self.turn(version), starts_segment=True)
        reward = self.random.choice([1.0, 0.0])
        return session_events(index, [first, summary, after], reward)


@pytest.mark.parametrize(("is_withheld", "kill_after"), [(False, None), (False, 6), (True, 3)])
async def test_chains_are_trained_once_and_replayed_alike(is_withheld, kill_after):
    world = ChainWorld(5, small_config(steps_max=4))
    world.is_withheld = is_withheld
    if kill_after is not None:
        world.log.num_until_kill = kill_after
    assert await world.run() == (kill_after is not None)
    check_run(world)
    report = await replayed(world)
    assert (report.first_difference, report.identical) == ("", True)
    total = ledger_of(world).totals()
    trained = sum(event.metrics["tokens_trained"] for event in world.log.of(StepCompleted))
    counts = {
        event.rollout_id if isinstance(event, RolloutFinished) else event.sample_id: sum(
            turn.num_sampled for turn in event.turns if not turn.is_withheld
        )
        for kind in (RolloutFinished, LiveSampleJoined)
        for event in world.log.of(kind)
    }
    taken = [s.rollout_id for event in world.log.of(BatchManifest) for s in trained_samples(event)]
    assert trained == sum(counts[name] for name in taken) > 0
    assert total.trained == sum(counts[name] for name in set(taken))
    assert (total.withheld > 0) == is_withheld


async def test_a_skipped_steps_withheld_tokens_stay_withheld():
    world = ChainWorld(5, small_config(steps_max=4))
    world.is_withheld = True
    await world.run()
    ledger = ledger_of(world)
    for step in world.log.of(StepCompleted):
        ledger.add_step(msgspec.structs.replace(step, skipped="the loss is nan"))
    total = ledger.totals()
    assert (total.trained, ledger.violations) == (0, [])
    assert total.withheld > 0 and total.skipped > 0
