"""Replies of every request service: done, or failed and how."""

from enum import StrEnum

from penstock.messages.base import Message


class RemoteErrorKind(StrEnum):
    """How a remote failure is to be treated."""

    INVALID = "invalid"
    BUSY = "busy"
    FAILED = "failed"
    GONE = "gone"


class RemoteError(Message, frozen=True, kw_only=True):
    """Any server -> its requester: the request failed, and how."""

    kind: RemoteErrorKind
    error: str


class Ack(Message, frozen=True, kw_only=True):
    """Done, with nothing to tell."""
