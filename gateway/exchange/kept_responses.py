"""Conversations of recent responses, which clients continue with `previous_response_id`.

Kept in memory only, within bounds: after a restart, or at another gateway, a client gets 404 and
sends the whole input.
"""

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.actors.runtime.fair_table import FairTable
from penstock.gateway.conversation import (
    INSTRUCTIONS,
    NUM_MESSAGES_MAX,
    LiveRequest,
    RequestMessage,
    call_id,
)
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.exchange.choice import Choice
from penstock.gateway.exchange.sessions import SESSION_S_MAX, UserKey

KEPT_CHARS_MAX = 64 * 1024 * 1024
"""Maximum characters of all kept conversations together."""


class KeptResponse(msgspec.Struct, frozen=True):
    """A conversation up to and including a response, without instructions."""

    messages: tuple[RequestMessage, ...]
    at: float
    """Monotonic time of the response."""

    @property
    def num_chars(self) -> int:
        """Characters of all messages."""
        arguments = (call.arguments for one in self.messages for call in one.calls)
        num_texts = sum(len(one.text) for one in self.messages)
        return num_texts + sum(len(msgspec.json.encode(one)) for one in arguments)


class KeptResponses:
    """The conversations of recent responses of all users."""

    def __init__(self) -> None:
        self._kept: FairTable[tuple[UserKey, str], KeptResponse] = FairTable(
            KEPT_CHARS_MAX, lambda key, _: key[0][0], weight=lambda kept: kept.num_chars
        )

    def put(self, owner: UserKey, conversation: LiveRequest, reply: Choice, now: float) -> None:
        """Keep a conversation with its reply.

        Args:
            owner: Tenant and user.
            conversation: The request, with the messages that it continued.
            reply: The complete reply.
            now: Monotonic time in seconds.

        """
        # Instructions apply to one request only, as in OpenAI's service.
        asked = [one for one in conversation.messages if one.place != INSTRUCTIONS]
        named = [
            msgspec.structs.replace(call, call_id=call_id(reply.request_id, index))
            for index, call in enumerate(reply.sent_calls)
        ]
        turn = RequestMessage(role=Role.ASSISTANT, text=reply.text, calls=tuple(named))
        self._kept[owner, reply.request_id] = KeptResponse((*asked, turn), now)
        for key, kept in self._kept.oldest():
            if now - kept.at > SESSION_S_MAX:
                del self._kept[key]

    def extended(self, owner: UserKey, conversation: LiveRequest, now: float) -> LiveRequest:
        """Return a request with the messages of the response that it continues, if any.

        Raises:
            ApiError: 404, the response is not kept; 400, there are too many messages.

        """
        if not conversation.continues:
            return conversation
        kept = self._kept.get((owner, conversation.continues))
        if kept is None or now - kept.at > SESSION_S_MAX:
            text = f"no response {conversation.continues!r} is kept here; send the whole input"
            raise ApiError(404, "previous_response_not_found", text, "previous_response_id")
        new = conversation.messages
        # None, too: items of an input may all be ones that the policy does not read.
        start = sum(one.place == INSTRUCTIONS for one in new[:1])
        messages = (*new[:start], *kept.messages, *new[start:])
        if len(messages) > NUM_MESSAGES_MAX:
            text = f"expected at most {NUM_MESSAGES_MAX} messages with the previous response's"
            raise invalid(text, "previous_response_id")
        return msgspec.structs.replace(conversation, messages=messages)

    def forget(self, owner: UserKey) -> None:
        """Forget the responses of a user."""
        for key in [key for key in self._kept if key[0] == owner]:
            del self._kept[key]
