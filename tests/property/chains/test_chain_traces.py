"""Chains as traces for fine-tuning, and as judges read them."""

import msgspec
import pytest
from tests.chains import CHAT, INSTRUCTION, TOOLS, ids_of
from tests.property.chains.test_segments import chain_of

from penstock.actors.judge.submission import final_message
from penstock.actors.policy.summaries import SummaryMode
from penstock.infra.corpora.traces import read_traces
from penstock.infra.export.traces import traces_of
from penstock.messages.reading.trajectories import segments
from penstock.messages.rollout import EpisodeEnd

TURNS = [("a" * 30, "b" * 30, "thinking\nSummary: code 17")] * 9


@pytest.mark.parametrize("mode", list(SummaryMode))
def test_each_segment_is_a_trace_of_the_tokens_that_it_was(mode, tmp_path):
    chain = chain_of(TURNS, mode, 3)
    found = traces_of(CHAT, INSTRUCTION, chain.turns)
    parts = segments(chain.turns)
    assert len(found) == len(parts) == 3
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(trace) + b"\n" for trace in found))
    read = read_traces(str(path), "model.traces", CHAT, TOOLS, 10**6)
    for part, (ids, weights) in zip(parts, read, strict=True):
        assert ids == [i for turn in part for side in ids_of(turn) for i in side]
        assert sum(weights) == sum(len(ids_of(turn)[1]) for turn in part)


def test_a_summary_is_no_final_message():
    chain = chain_of(TURNS, SummaryMode.TRAINED, 3)
    at = next(index for index, turn in enumerate(chain.turns) if turn.is_summary)
    assert final_message(chain.turns[: at + 1], CHAT) == ""
    assert chain.conversation.end is not EpisodeEnd.FINISHED
