"""Every event lists the objects that it needs, so that a collector can work by reachability."""

from typing import Any

import msgspec
import pytest
from tests.golden.examples import example

from penstock.messages.base import Claim, Event
from penstock.messages.codec import EVENTS, decode, encode
from penstock.messages.control import MessageRejected


def named(value: Any) -> set[str]:
    """Return every object key anywhere inside a value."""
    if isinstance(value, dict):
        own = {value["object_key"]} if "object_key" in value else set()
        return own.union(*map(named, value.values()))
    return set().union(*map(named, value)) if isinstance(value, list | tuple) else set()


def with_claims(event: Event) -> Event:
    """Return the event with each of its parts in the store."""
    stored = {
        name: part.stored(Claim(object_key=f"claims/1-{name}", num_bytes=1, blake3="0" * 64))
        for name, part in event.parts.items()
    }
    return msgspec.structs.replace(event, **stored)


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda kind: kind.__name__)
def test_an_event_lists_every_object_that_it_names(event_type):
    for event in (example(event_type), with_claims(example(event_type))):
        assert set(event.object_keys()) == named(msgspec.to_builtins(event))
        assert decode(encode(event)) == event


def test_large_parts_are_those_of_turns_and_files():
    found = {kind.__name__: sorted(example(kind).parts) for kind in EVENTS if example(kind).parts}
    assert found == {
        "TurnSampled": ["turn"],
        "InferenceRecorded": ["turn"],
        "EpisodeStepEnded": ["files"],
        "RolloutFinished": ["files"],
        "SetUpRecorded": ["files"],
        "TinkerAnswered": ["body"],
        "TinkerCalled": ["body"],
        "TinkerKept": ["state"],
        "TinkerSaved": ["state"],
    }


def test_a_dead_letter_names_the_object_of_what_it_rejects():
    claim = Claim(object_key="claims/1-a", num_bytes=1, blake3="0" * 64)
    letter = MessageRejected(
        source_stream="tasks", source_sequence=1, source_subject="x", actor="a", cause="c",
        data=b"", claim=claim,
    )  # fmt: skip
    assert letter.object_keys() == ["claims/1-a"]
