"""Reader of the message inside a dead letter."""

from typing import TypeVar

from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.codec import decode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError
from penstock.messages.reading.claims import fetch

M = TypeVar("M", bound=Message)


async def read_rejected(store: ObjectStore, event: MessageRejected, kind: type[M]) -> M | None:
    """Return the rejected message, or None if it cannot be read or is of another type.

    Raises:
        StoreUnreachableError: The message lies in the store, which did not answer.

    """
    try:
        data = event.data if event.claim is None else await fetch(store, event.claim)
        message = decode(data)
    except CodecError:
        return None
    return message if isinstance(message, kind) else None
