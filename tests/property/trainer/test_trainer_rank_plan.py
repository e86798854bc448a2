"""Every pass is computed once, in the order of one process, by any number of ranks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.trainer.batching.cuts import micro_batches, planned_sequences
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.ranks.plan import read_samples, rounds
from penstock.actors.trainer.ranks.world import RankEnvironment
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Outcome
from penstock.messages.rollout import VersionSpan
from penstock.messages.training import SampleEntry


@given(num_passes=st.integers(0, 40), num_ranks=st.integers(1, 12))
def test_every_pass_counts_once_and_in_order(num_passes, num_ranks):
    plan = list(rounds(num_passes, num_ranks))
    order = [turn.index(rank) for turn in plan for rank in range(num_ranks) if turn.is_active(rank)]
    assert order == list(range(num_passes))


@given(num_passes=st.integers(1, 40), num_ranks=st.integers(1, 12))
def test_no_rank_is_ever_without_a_pass_to_take_part_with(num_passes, num_ranks):
    for turn in rounds(num_passes, num_ranks):
        assert 1 <= turn.num_active <= num_ranks
        assert all(0 <= turn.index(rank) < num_passes for rank in range(num_ranks))


@st.composite
def samples(draw):
    lengths = draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), max_size=12))
    return [
        SampleEntry(
            rollout_id=f"r{index}",
            outcome=Outcome.SOLVED,
            reward=1.0,
            advantage=1.0,
            version_spans=[
                VersionSpan(policy_version=version, num_tokens=1)
                for version in sorted(draw(st.sets(st.integers(0, 3), min_size=1)))
            ],
            num_inputs=each,
        )
        for index, each in enumerate(lengths)
    ]


@given(batch=samples(), num_ranks=st.integers(1, 6), pairs_max=st.sampled_from([0, 2500]))
def test_a_rank_reads_what_it_computes_in_any_cut_of_the_batch(batch, num_ranks, pairs_max):
    kept, bounds = (0, 2), (100, pairs_max)
    read = [
        {one.rollout_id for one in read_samples(batch, kept, bounds, rank, num_ranks)}
        for rank in range(num_ranks)
    ]
    assert set().union(*read) == {sample.rollout_id for sample in batch}
    plan = planned_sequences(batch)
    for chosen in (plan, *([one for one in plan if v in one.sampled_by] for v in kept)):
        passes = micro_batches(chosen, *bounds)
        for turn in rounds(len(passes), num_ranks):
            for rank in range(num_ranks):
                assert {one.rollout_id for one in passes[turn.index(rank)]} <= read[rank]


@given(batch=samples(), pairs_max=st.integers(0, 5000))
def test_a_pass_attends_within_its_bound(batch, pairs_max):
    plan = planned_sequences(batch)
    passes = micro_batches(plan, 100, pairs_max)
    assert [one for part in passes for one in part] == plan
    for part in passes:
        costs = [one.num_inputs**2 // 2 for one in part]
        assert len(part) == 1 or not pairs_max or sum(costs) <= pairs_max
    assert pairs_max or passes == micro_batches(plan, 100)


def test_ranks_divide_a_long_batch_and_read_all_of_one_without_lengths():
    spans = [VersionSpan(policy_version=0, num_tokens=1)]
    batch = [
        SampleEntry(rollout_id=f"r{index}", outcome=Outcome.SOLVED, reward=1.0, advantage=1.0,
                    version_spans=spans, num_inputs=[1000])
        for index in range(32)
    ]  # fmt: skip
    counts = [len(read_samples(batch, (), (2000, 0), rank, 4)) for rank in range(4)]
    assert counts == [8, 9, 9, 9], "a quarter each, and the first, under the reference"
    earlier = [*batch[:-1], msgspec.structs.replace(batch[-1], num_inputs=[])]
    assert len(read_samples(earlier, (), (2000, 0), 3, 4)) == 32


TORCHRUN = {
    "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "PENSTOCK_RANKS_SECRET": "s" * 32,
}  # fmt: skip


def test_a_rank_knows_its_place_from_what_torchrun_sets():
    found = RankEnvironment.of(TORCHRUN)
    assert (found.rank, found.num_ranks, found.local_rank) == (1, 2, 0)
    assert "sss" not in repr(found)
    far = RankEnvironment.of(TORCHRUN | {"MASTER_ADDR": "h"}, ["h"])
    assert far.rank == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "2"}, "RANK: expected a number below WORLD_SIZE 2, got 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a number, got 'two'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: expected what torchrun sets, it is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: expected what torchrun sets, it is not set"),
        ({"MASTER_ADDR": "h"}, "expected TLS for an address off this machine"),
        ({"PENSTOCK_RANKS_SECRET": "short"}, "expected 32 characters or more"),
        ({"PENSTOCK_RANKS_SECRET": None}, "expected 32 characters or more"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: expected at most 65535, got 65536"),
    ],
)
def test_what_torchrun_would_not_set_is_an_error_that_names_it(changes, expected):
    environment = {k: v for k, v in (TORCHRUN | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=expected):
        RankEnvironment.of(environment)


def test_a_step_is_bounded_by_what_blocking_work_may_take():
    """A longer bound would have no effect: the actor's own ends the step."""
    assert msgspec.convert({"step_s_max": 60}, RanksConfig).step_s_max == 60.0
    with pytest.raises(msgspec.ValidationError, match=r"<= 1800.0 - at `\$\.step_s_max`"):
        msgspec.convert({"step_s_max": 7200}, RanksConfig)
