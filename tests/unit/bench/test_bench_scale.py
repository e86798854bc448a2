"""The payload bench at a fraction of its size: the same promises hold."""

from tests.lab.bench.scale_payload import GROUP_SIZE, SAMPLED_TOKENS, measure_payload
from tests.lab.bench.scale_replicas import measure_prefix_reuse

NUM_TURNS = 4


async def test_turns_are_stored_once_and_collected():
    figures = await measure_payload(GROUP_SIZE, NUM_TURNS)
    assert figures["event_share"] <= 0.01
    assert figures["stored_copies"] <= 1.1
    num_tokens = GROUP_SIZE * NUM_TURNS * SAMPLED_TOKENS
    assert figures["tokens_read"] == figures["tokens_imported"] == num_tokens
    assert figures["objects_left"] == 0


async def test_four_replicas_reuse_what_one_would():
    figures = await measure_prefix_reuse(num_groups=2)
    assert figures["cached_share_1_replica"] > 0.5
    assert figures["prefix_reuse_4_replicas"] >= 0.95
