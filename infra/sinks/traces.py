"""Traces of episodes: a span per rollout, per turn and per tool call.

```
rollout  ├──────────────────────────────────────────────┤ RolloutFinished
turn 0   ├────────┤ TurnSampled stored
call 0.0          ├─────┤ call_s
turn 1                  ├──────────┤
```
A turn's span is its sampling and what it waits for; its calls follow. Ids are hashes of names in
the log, so that a span that is sent twice is the same span.
"""

import hashlib

import msgspec

from penstock.messages.bus import Bus, Delivery
from penstock.messages.rollout import RolloutFinished, TurnSampled


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of an episode."""

    name: str
    """`rollout`, `turn`, or `call` and the tool's name."""
    trace_id: bytes
    """16 bytes, one per rollout."""
    span_id: bytes
    """8 bytes."""
    parent_id: bytes = b""
    """Empty: the root."""
    start_s: float
    """Unix seconds, like `end_s`."""
    end_s: float
    attributes: dict[str, str | int]
    is_failed: bool = False


async def spans_of(bus: Bus, delivery: Delivery) -> list[TraceSpan]:
    """Return the spans of a finished rollout, the root first; none for other events.

    Turns that a branch shares with its trunk are spans of the trunk alone. The times of turns are
    read from the log, one by one.
    """
    event = delivery.event
    if not isinstance(event, RolloutFinished):
        return []
    end_s = delivery.stored_at
    start_s = end_s - event.wall_s
    root = TraceSpan(
        name="rollout",
        trace_id=_hash(event.rollout_id, 16),
        span_id=_hash(event.rollout_id, 8),
        start_s=start_s,
        end_s=end_s,
        attributes={
            "penstock.rollout_id": event.rollout_id,
            "penstock.group_id": event.group_id,
            "penstock.task_id": event.task_id,
            "penstock.purpose": str(event.purpose),
            "penstock.end": str(event.end),
            "penstock.num_turns": len(event.turns),
            "penstock.error": event.error,
        },
        is_failed=bool(event.error),
    )
    spans, begun_s = [root], start_s
    for index in range(event.num_trunk_turns, len(event.turns)):
        stored = await bus.last(TurnSampled, event.turn_key(index))
        if stored is None:  # Its place in the log is another message's.
            continue
        ended_s = min(max(stored.stored_at, begun_s), end_s)
        turn = _turn(event, index, root, begun_s, ended_s)
        calls = _calls(event, index, turn)
        spans += [turn, *calls]
        begun_s = max([ended_s, *(call.end_s for call in calls)])
    return spans


def _turn(
    event: RolloutFinished, index: int, root: TraceSpan, start_s: float, end_s: float
) -> TraceSpan:
    summary = event.turns[index]
    versions = [span.policy_version for span in summary.version_spans]
    return TraceSpan(
        name="turn",
        trace_id=root.trace_id,
        span_id=_hash(event.turn_key(index), 8),
        parent_id=root.span_id,
        start_s=start_s,
        end_s=end_s,
        attributes={
            "penstock.turn": index,
            "penstock.num_context": summary.num_context,
            "penstock.num_sampled": summary.num_sampled,
            "penstock.policy_version_min": min(versions, default=-1),
            "penstock.policy_version_max": max(versions, default=-1),
        },
    )


def _calls(event: RolloutFinished, index: int, turn: TraceSpan) -> list[TraceSpan]:
    """Return the calls of a turn; a log of an earlier version holds no times of them."""
    names = event.tool_names[index] if index < len(event.tool_names) else []
    seconds = event.call_s[index] if index < len(event.call_s) else []
    return [
        TraceSpan(
            name=f"call {name}",
            trace_id=turn.trace_id,
            span_id=_hash(f"{event.turn_key(index)}.{number}", 8),
            parent_id=turn.span_id,
            start_s=turn.end_s,
            end_s=turn.end_s + (seconds[number] if number < len(seconds) else 0.0),
            attributes={"penstock.turn": index, "penstock.call": number, "penstock.tool": name},
        )
        for number, name in enumerate(names)
    ]


def _hash(name: str, num_bytes: int) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=num_bytes).digest()
