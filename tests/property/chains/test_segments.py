"""Any chain of segments: each token counted once, and trained in the context it was drawn in."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chains import (
    INSTRUCTION,
    POLICY,
    Chain,
    branched,
    call,
    conversation,
    ids_of,
    play,
    say,
    take,
)

from penstock.actors.policy.summaries import SummaryConfig, SummaryMode
from penstock.actors.trainer.sequences import check_trajectory, rollout_sequences
from penstock.kernels.arrays import from_array
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reading.trajectories import own_turns
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd, tokens_by_version
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

WORDS = st.text("abc ", min_size=1, max_size=40)
SUMMARIES = st.one_of(
    st.builds("{}\nSummary: {}".format, WORDS, st.text("abc", min_size=1, max_size=60)),
    st.sampled_from(["", "Summary:", "no mark", "Summary: " + "a b c " * 40]),
)
MODES = st.sampled_from(list(SummaryMode))
TURNS = st.lists(st.tuples(WORDS, WORDS, SUMMARIES), min_size=1, max_size=14)


def sample_of(turns, outcome: Outcome = Outcome.SOLVED) -> SampleEntry:
    spans = [span for turn in turns for span in turn.version_spans]
    return SampleEntry(
        rollout_id="r", outcome=outcome, reward=1.0, advantage=0.25, version_spans=spans
    )


def chain_of(turns, mode: SummaryMode, segments_max: int, num_tokens_max: int = 4000) -> Chain:
    summary = SummaryConfig(mode=mode, trigger=0.5, num_tokens_max=60, request="Sum up.")
    talk = conversation(
        summary, num_segments_max=segments_max, window_tokens_max=260, num_turns_max=12,
        num_tokens_max=num_tokens_max,
    )  # fmt: skip
    chain = Chain(conversation=talk)
    for words, result, text in turns:
        if talk.end is not None:
            break
        take(chain, say(text) if talk.is_summary else call(words), [result])
    return chain


@settings(max_examples=30, deadline=None)
@given(TURNS, MODES, st.integers(1, 4), st.integers(150, 900))
def test_sequences_are_what_the_sampler_saw(turns, mode, segments_max, num_tokens_max):
    chain = chain_of(turns, mode, segments_max, num_tokens_max)
    if not chain.turns:
        return
    check_trajectory("r", chain.turns, POLICY)
    sequences = rollout_sequences(sample_of(chain.turns), chain.turns, POLICY)
    assert len(sequences) == chain.finished().num_segments <= segments_max
    assert all(sequence.num_inputs <= 260 for sequence in sequences)
    check_exact(chain, sequences, 0)
    drawn = sum(len(seen.sampled) for seen in chain.seen)
    assert sum(sequence.is_trained.size for sequence in sequences) == drawn
    new = sum(len(seen.sampled) for seen in chain.seen)
    new += sum(len(ids_of(turn)[0]) for turn in chain.turns if not turn.starts_segment)
    assert new <= num_tokens_max


def check_exact(chain: Chain, sequences, first: int) -> None:
    """Compare each turn's part of its sequence with the request that it answered."""
    left = iter(sequences)
    sequence, draws = next(left), 0
    for turn, seen in zip(chain.turns[first:], chain.seen[first:], strict=True):
        if draws == len(sequence.draws):
            sequence, draws = next(left), 0
        draw = sequence.draws[draws]
        draws += 1
        end = draw.start + len(seen.sampled)
        assert sequence.token_ids[:end].tolist() == seen.context + seen.sampled
        trained = [] if turn.is_withheld else list(range(len(seen.sampled)))
        assert draw.at.tolist() == trained
    assert next(left, None) is None
    for each in sequences:
        positions = np.concatenate([draw.start + draw.at for draw in each.draws])
        assert each.sampled_at.tolist() == positions.tolist()
        assert set(each.advantages.tolist()) <= {0.25}


@settings(max_examples=20, deadline=None)
@given(TURNS, MODES, st.data())
def test_a_worker_that_takes_over_anywhere_continues_alike(turns, mode, data):
    chain = chain_of(turns, mode, 4)
    num_stored = data.draw(st.integers(0, len(chain.turns)))
    summary = chain.conversation._summary
    other = conversation(
        summary, num_segments_max=4, window_tokens_max=260, num_turns_max=12, num_tokens_max=4000
    )
    stored = [msgspec.msgpack.decode(msgspec.msgpack.encode(t), type=type(t)) for t in chain.turns]
    for turn, results in zip(stored[:num_stored], chain.observations, strict=False):
        play(other, turn, results)
    if num_stored == len(chain.turns):
        assert other.end is chain.conversation.end
        assert other.token_ids == chain.conversation.token_ids
        return
    seen = chain.seen[num_stored]
    assert (other.token_ids, other.is_summary) == (seen.context, seen.is_summary)
    assert other.num_tokens_next_max == seen.room
    assert other.starts_segment == stored[num_stored].starts_segment


@settings(max_examples=20, deadline=None)
@given(TURNS, MODES, st.data())
def test_a_branch_trains_its_own_turns_in_the_trunks_last_segment(turns, mode, data):
    chain = chain_of(turns, mode, 4)
    if not chain.turns:
        return
    shared = data.draw(st.integers(0, len(chain.turns) - 1))
    event, all_turns = branched(chain, shared)
    own = own_turns(event, all_turns)
    check_trajectory("b", own, POLICY)
    check_exact(chain, rollout_sequences(sample_of(own), own, POLICY), shared)


@settings(max_examples=20, deadline=None)
@given(TURNS, MODES, st.sampled_from([Outcome.SOLVED, Outcome.FILTERED]), st.booleans())
def test_the_ledger_counts_each_token_once(turns, mode, outcome, is_late):
    chain = chain_of(turns, mode, 4)
    entry = sample_of(chain.turns, outcome)
    group = GroupEntry(group_id="g", group_index=0, task_id="t", samples=[entry])
    manifest = BatchManifest(step=1, policy_version=0, groups=[group])
    ledger, events = Ledger(), chain.events()
    for event in events[: len(events) // 2] if is_late else events:
        ledger.add_turn(event)
    ledger.add_manifest(manifest)
    for event in events:
        ledger.add_turn(event)
    assert ledger.balanced, ledger.violations
    total = ledger.totals()
    withheld = sum(len(ids_of(turn)[1]) for turn in chain.turns if turn.is_withheld)
    generated = sum(tokens_by_version(entry.version_spans).values())
    assert total.generated == generated and total.in_flight == 0
    if outcome.is_trained:
        trained = sum(s.sampled_at.size for s in rollout_sequences(entry, chain.turns, POLICY))
        assert (total.trained, total.withheld) == (trained, withheld)
        assert trained + withheld == generated
    else:
        assert (total.filtered, total.withheld) == (generated, 0)


@pytest.mark.parametrize("mode", list(SummaryMode))
def test_a_segment_begins_with_the_task_and_what_was_kept(mode):
    turns = [("a" * 30, "b" * 30, "thinking aloud\nSummary: code 17\nleft: c")] * 9
    chain = chain_of(turns, mode, 3)
    starts = [turn for turn in chain.turns if turn.starts_segment]
    summaries = [turn for turn in chain.turns if turn.is_summary]
    assert len(starts) == 2
    asked = mode is not SummaryMode.NONE
    assert len(summaries) == 2 * asked
    assert [turn.is_withheld for turn in summaries] == [mode is SummaryMode.MASKED] * 2 * asked
    for count, turn in enumerate(starts, 1):
        text = chain.conversation._chat.tokenizer.decode(from_array(turn.context_ids).tolist())
        assert INSTRUCTION in text and "thinking aloud" not in text
        assert (f"Summary {count}:\ncode 17\nleft: c" in text) == asked


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", EpisodeEnd.POLICY_ERROR),
        ("Summary:   ", EpisodeEnd.POLICY_ERROR),
        ("I forgot the mark", EpisodeEnd.POLICY_ERROR),
        ("Summary: " + "a b c " * 60, EpisodeEnd.TOKEN_LIMIT),
    ],
)
@pytest.mark.parametrize("mode", [SummaryMode.TRAINED, SummaryMode.MASKED])
def test_a_summary_that_is_none_ends_the_episode_as_the_policys(text, end, mode):
    chain = chain_of([("a" * 30, "b" * 30, text)] * 9, mode, 3)
    assert chain.conversation.end is end
    last = chain.turns[-1]
    assert last.is_summary and last.parse_error and not last.calls


def test_a_call_in_a_summary_is_no_summary_and_is_not_run():
    summary = SummaryConfig(trigger=0.5, num_tokens_max=60, request="Sum up.")
    talk = conversation(summary, num_segments_max=2, window_tokens_max=260)
    chain = Chain(conversation=talk)
    while not talk.is_summary:
        take(chain, call("a" * 20), ["b" * 20])
    turn = take(chain, call("a"))
    assert talk.end is EpisodeEnd.POLICY_ERROR
    assert not turn.calls and "no call" in turn.parse_error
