"""Sampled tokens by kind, counted from recorded turns by the chat format's markup."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.judge.judges import LengthMeter
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.token_kinds import TokenCounts, TokenKinds
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Lengths
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    ToolCall,
    Turn,
)
from penstock.messages.task import Purpose, Split, Task, TaskStep

CHAT = PenstockChat(train_tokenizer(["look at m.py, then edit it. done"] * 4, vocab_size=320))
REQUEST = "then edit it"
LOOK = ToolCall(name="read_file", arguments={"path": "m.py"})
OTHER = ToolCall(name="search_web", arguments={"query": "m.py"})
NEXT = "edit m.py"
TASK = Task(task_id="t", category="c", split=Split.TRAIN, instruction="look", files={})
STEPS = msgspec.structs.replace(TASK, steps=[TaskStep(instruction=NEXT)])


class Marked:
    """A tokenizer with the markup of published models: one id per name."""

    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")

    def has_special(self, name: str) -> bool:
        return name in self.names

    def special_id(self, name: str) -> int:
        return self.names.index(name)


def make_turn(context: list[int], sampled: list[int], calls=(), parse_error: str = "") -> Turn:
    return Turn(
        context_ids=to_array(np.asarray(context, np.int32)),
        token_ids=to_array(np.asarray(sampled, np.int32)),
        behavior_logprobs=to_array(np.zeros(len(sampled), np.float32)),
        version_spans=[],
        stop_reason=StopReason.STOP,
        calls=list(calls),
        parse_error=parse_error,
    )


def measured(turns: list[Turn], *step_ends: int) -> Lengths:
    rollout = RolloutFinished(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0, task_id="t",
        purpose=Purpose.TRAIN, category="c", end=EpisodeEnd.FINISHED, files=EpisodeFiles(),
        turns=[turn.summary for turn in turns], num_calls=sum(len(turn.calls) for turn in turns),
        step_ends=list(step_ends),
    )  # fmt: skip
    return LengthMeter(CHAT, REQUEST).measure(rollout, turns, STEPS if step_ends else TASK)


def test_an_episode_by_hand() -> None:
    text, call = CHAT.tokenizer.encode("look at"), CHAT.render_turn("", [LOOK])[:-1]
    answer, end = CHAT.tokenizer.encode("done"), list(CHAT.stop_ids)
    turns = [
        make_turn([1] * 50, [*text, *call, *end], [LOOK]),
        make_turn([1] * 7, [*answer, *end]),
    ]
    assert measured(turns) == Lengths(
        thinking=len(text) + 1, call=len(call), output=7, final=len(answer) + 1, num_calls=1,
        num_turns=2,
    )  # fmt: skip


def test_what_asks_for_a_summary_is_no_output_of_a_tool() -> None:
    request, returned = CHAT.tokenizer.encode(REQUEST), CHAT.tokenizer.encode("look at m.py")
    asked = msgspec.structs.replace(make_turn([*returned, *request], [5]), is_summary=True)
    turns = [make_turn([1] * 50, [5], [LOOK]), asked]
    assert measured(turns).output == len(returned)
    plain = msgspec.structs.replace(asked, is_summary=False)
    assert measured([turns[0], plain]).output == len(returned) + len(request)


@pytest.mark.parametrize("has_call", [True, False])
def test_what_asks_for_the_next_step_is_no_output_of_a_tool(has_call) -> None:
    """A step ends with a call, whose result comes before the instruction, or with an answer."""
    asked, request = CHAT.tokenizer.encode(NEXT), CHAT.tokenizer.encode(REQUEST)
    returned = CHAT.tokenizer.encode("look at m.py") * has_call
    first = make_turn([1] * 50, [5], [LOOK] * has_call)
    turns = [first, make_turn([*returned, *asked], [5], [LOOK]), make_turn([1] * 7, [5])]
    assert measured(turns, 0).output == len(returned) + 7
    assert measured(turns).output == len(returned) + len(asked) + 7
    closing = msgspec.structs.replace(make_turn([*returned, *request], [5]), is_summary=True)
    assert measured([first, closing], 0).output == len(returned)
    begun = msgspec.structs.replace(turns[1], starts_segment=True)
    assert measured([first, begun, turns[2]], 0).output == 7


def test_calls_of_any_name_count_as_calls() -> None:
    for calls in ([OTHER], [LOOK, OTHER]):
        sampled = CHAT.render_turn("", calls)
        found = measured([make_turn([1], sampled, calls)])
        assert (found.call, found.thinking, found.final) == (len(sampled) - 1, 1, 0)


def test_a_turn_that_does_not_parse_has_no_final_message() -> None:
    cut = CHAT.render_turn("", [LOOK])[:-2]
    found = measured([make_turn([1], cut, parse_error="unfinished")])
    assert (found.call, found.thinking, found.final) == (len(cut), 0, 0)


@given(st.lists(st.integers(0, 319), min_size=1, max_size=40), st.booleans(), st.booleans())
def test_every_sampled_token_is_of_one_kind(ids, has_calls, is_broken) -> None:
    turn = make_turn([1, 2], ids, [LOOK] * has_calls, "bad" * is_broken)
    found = measured([turn])
    assert found.thinking + found.call + found.final == len(ids)


@pytest.mark.parametrize(
    ("context", "sampled", "is_final", "expected"),
    [
        ([], [0, 9, 1, 8, 8], True, TokenCounts(thinking=3, final=2)),
        ([7, 0], [9, 1, 8], True, TokenCounts(thinking=2, final=1)),
        ([0, 7, 1], [9, 8], True, TokenCounts(final=2)),
        ([], [0, 9, 1, 2, 9, 3, 8], False, TokenCounts(thinking=4, call=3)),
        ([], [2, 9, 9], False, TokenCounts(call=3)),
        ([], [0, 2, 3, 9], False, TokenCounts(thinking=4)),
    ],
)
def test_markup_of_published_models(context, sampled, is_final, expected) -> None:
    tokenizer: Tokenizer = Marked()  # pyright: ignore[reportAssignmentType]
    assert TokenKinds(tokenizer).count(sampled, context, is_final=is_final) == expected


def test_a_format_without_tokens_for_calls_counts_turns_with_calls_as_calls() -> None:
    class Plain(Marked):
        names = ("<think>", "</think>")

    tokenizer: Tokenizer = Plain()  # pyright: ignore[reportAssignmentType]
    kinds = TokenKinds(tokenizer)
    assert kinds.count([0, 9, 1, 5], [], is_final=False) == TokenCounts(thinking=3, call=1)


def test_what_a_later_segment_reads_again_costs_nothing_more() -> None:
    call, summary = CHAT.render_turn("", [LOOK]), CHAT.render_turn("Summary: done")
    asked = CHAT.tokenizer.encode(REQUEST)
    turns = [
        make_turn([1] * 50, call, [LOOK]),
        msgspec.structs.replace(make_turn([1] * 9 + asked, summary), is_summary=True),
        msgspec.structs.replace(make_turn([1] * 60, call, [LOOK]), starts_segment=True),
        make_turn([1] * 7, CHAT.render_turn("done")),
    ]
    found = measured(turns)
    assert (found.output, found.num_turns, found.num_calls) == (9 + 7, 4, 2)
    assert found.thinking == len(summary) + 2
    assert found.final == len(CHAT.render_turn("done"))
