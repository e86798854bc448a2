"""The payload bench at a fraction of its size: the same promises hold."""

from penstock.infra.bench.scale_payload import GROUP_SIZE, SAMPLED_TOKENS, measure_payload

NUM_TURNS = 4


async def test_turns_are_stored_once_and_collected():
    figures = await measure_payload(GROUP_SIZE, NUM_TURNS)
    assert figures["event_share"] <= 0.02  # Its few kilobytes of files are inline.
    assert figures["stored_copies"] <= 1.1
    num_tokens = GROUP_SIZE * NUM_TURNS * SAMPLED_TOKENS
    assert figures["tokens_read"] == figures["tokens_imported"] == num_tokens
    assert figures["objects_left"] == 0
