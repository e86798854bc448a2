"""Assigns requests to sessions, and the requests of a session to chains.

```
 request ──session named by header or body─────────────────────────▶ that session
    └─ its messages begin like an earlier conversation of the user ─▶ that conversation's session
    └─ otherwise ─▶ a new session, named after the request
```
Messages are compared loosely: system messages, white space, the order of keys and the ids of calls
do not matter, nor does the text of a turn that makes calls. Tokens then show whether the context
really begins with what was sampled. Requests whose contexts extend one another token by token form
one *chain*, named after the first of them; a request that changes or drops an earlier turn starts
another chain.

Everything is kept in memory, within bounds: after a restart, conversations get new sessions.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from penstock.actors.policy.chat.format import Role
from penstock.actors.runtime.fair_table import FairTable
from penstock.gateway.conversation import Call, RequestMessage

SESSION_S_MAX = 24 * 3600.0
"""Seconds without a request after which a session is forgotten."""
NUM_SESSIONS_MAX = 16_384
"""Maximum sessions in memory."""
NUM_OWNER_MARKS_MAX = 1024
"""Maximum replies per user by which a conversation is recognized; the oldest are forgotten."""
NUM_OWNERS_MAX = 16_384
"""Maximum users whose conversations are recognized."""
NUM_TIPS_MAX = 8
"""Maximum chains of a session that can still be extended."""

_WHITE_SPACE = b" \t\n\r\v\f"
Ids = npt.NDArray[np.int32]
UserKey = tuple[str, str]
"""Tenant and user."""


class PrefixKind(StrEnum):
    """Relation of a context to the tokens sampled earlier in its session."""

    EXACT = "exact"
    """The context begins with all tokens of an earlier turn, exactly as they were sampled."""
    CHANGED = "changed"
    """The session is known, but a turn came back changed or the conversation branched."""
    UNKNOWN = "unknown"
    """The request has assistant turns that this gateway does not know."""


class Thread:
    """The conversation of one request, and the session that it belongs to."""

    def __init__(self, owner: UserKey, messages: Sequence[RequestMessage]) -> None:
        """Hash the messages.

        Args:
            owner: Tenant and user of the conversation.
            messages: All messages of the request.

        """
        self.owner = owner
        self.name = ""
        """Name of the session, as clients use it in feedback."""
        self.marks: list[bytes] = []
        """Digests of the conversation up to each assistant turn, in order."""
        self._digest = blake3()
        for message in messages:
            # Agents put dates and open files into system messages, which change on every turn.
            if message.role is not Role.SYSTEM:
                self._digest.update(_normalized(message.role, message.text, message.calls))
            if message.role is Role.ASSISTANT:
                self.marks.append(self._digest.digest())

    @property
    def digest(self) -> bytes:
        """Digest of all messages, in the loose form in which they are compared."""
        return self._digest.digest()

    def mark_after(self, text: str, calls: Sequence[Call]) -> bytes:
        """Return the mark that the conversation has once it includes a reply."""
        after = self._digest.copy()
        after.update(_normalized(Role.ASSISTANT, text, calls))
        return after.digest()


class _Tip(msgspec.Struct, frozen=True):
    """The end of a chain: the context and reply of its last turn, hashed together."""

    num_tokens: int
    digest: bytes


class _Session(msgspec.Struct):
    used_at: float
    tips: dict[str, _Tip] = {}
    """Tips by chain, least recently extended first."""


class Sessions:
    """Recent conversations of all users, recognized by their messages and sampled tokens."""

    def __init__(self) -> None:
        self._marks: FairTable[UserKey, OrderedDict[bytes, tuple[str, float]]] = FairTable(
            NUM_OWNERS_MAX, lambda key, _: key[0]
        )
        self._sessions: FairTable[tuple[UserKey, str], _Session] = FairTable(
            NUM_SESSIONS_MAX, lambda key, _: key[0][0]
        )
        """Sessions by user and name."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        owner: UserKey,
        messages: Sequence[RequestMessage],
        *,
        named: str,
        new: str,
        now: float,
    ) -> Thread:
        """Return the thread of a request, assigned to its session.

        Args:
            owner: Tenant and user of the request.
            messages: Messages of the request.
            named: Session that the client names; empty if it names none.
            new: Name to give to a session that begins with this request.
            now: Monotonic time in seconds.

        """
        thread = Thread(owner, messages)
        known = self._marks.get(owner, OrderedDict())
        # From the newest turn back: conversations that begin alike differ in later turns.
        found = next((known[mark] for mark in reversed(thread.marks) if mark in known), None)
        is_fresh = found is not None and now - found[1] <= SESSION_S_MAX
        thread.name = named or (found[0] if found is not None and is_fresh else new)
        return thread

    def settle(  # noqa: PLR0913 - the reply and its place in the session are independent
        self,
        thread: Thread,
        request_id: str,
        context_ids: Sequence[int],
        token_ids: Sequence[int],
        now: float,
        *,
        continues: str = "",
    ) -> tuple[str, PrefixKind | None]:
        """Add the tokens of a reply to its session.

        Args:
            thread: Thread of the request.
            request_id: Id of the reply; names the chain if a new one begins.
            context_ids: [C], token ids of the prompt.
            token_ids: [T], token ids of the reply.
            now: Monotonic time in seconds.
            continues: Chain to continue if the context extends none, because a summary replaced
                its first messages; empty otherwise.

        Returns:
            The chain of the reply, and how its context relates to earlier turns (None for the
            first request of a conversation).

        """
        key = thread.owner, thread.name
        session = self._sessions.get(key) or _Session(used_at=now)
        session.used_at = now
        self._sessions[key] = session
        ids = np.asarray([*context_ids, *token_ids], dtype=np.int32)
        kind = PrefixKind.CHANGED if session.tips else PrefixKind.UNKNOWN
        chain = _extended(session.tips, ids[: len(context_ids)])
        if chain is not None:
            kind = PrefixKind.EXACT
            del session.tips[chain]
        elif continues:
            session.tips.pop(continues, None)
        # Removed above and added here, so that the chain comes last and is forgotten last.
        chain = chain or continues or request_id
        session.tips[chain] = _Tip(len(ids), _digest(ids))
        if len(session.tips) > NUM_TIPS_MAX:
            del session.tips[next(iter(session.tips))]
        self._expire(now)
        return chain, kind if thread.marks else None

    def remember(self, thread: Thread, text: str, calls: Sequence[Call], now: float) -> None:
        """Remember a reply, so that a request that continues after it finds the session."""
        marks = self._marks[thread.owner] = self._marks.get(thread.owner) or OrderedDict()
        mark = thread.mark_after(text, calls)
        marks[mark] = (thread.name, now)
        marks.move_to_end(mark)
        if len(marks) > NUM_OWNER_MARKS_MAX:
            marks.popitem(last=False)

    def forget(self, owner: UserKey) -> None:
        """Forget the sessions of a user."""
        self._marks.pop(owner, None)
        for key in [key for key in self._sessions if key[0] == owner]:
            del self._sessions[key]

    def _expire(self, now: float) -> None:
        """Forget old sessions and marks, the oldest of each tenant."""
        # One per tenant and call: each call adds one, so this keeps up, and no request has to wait.
        for key, session in self._sessions.oldest():
            if now - session.used_at > SESSION_S_MAX:
                del self._sessions[key]
        for owner, marks in self._marks.oldest():
            if now - next(reversed(marks.values()))[1] > SESSION_S_MAX:
                del self._marks[owner]


def _extended(tips: Mapping[str, _Tip], context: Ids) -> str | None:
    """Return the longest chain that a context extends; None if it extends none."""
    by_length = sorted(tips.items(), key=lambda item: item[1].num_tokens, reverse=True)
    for chain, tip in by_length:
        if tip.num_tokens <= len(context) and _digest(context[: tip.num_tokens]) == tip.digest:
            return chain
    return None


def _digest(ids: Ids) -> bytes:
    return blake3(ids.tobytes()).digest()


def _normalized(role: Role, text: str, calls: Sequence[Call]) -> bytes:
    """Return a message without the differences that clients introduce unintentionally."""
    if calls:
        # Without call ids, which clients may invent, and without the text next to the calls.
        plain_calls = [(call.name, call.arguments) for call in calls]
        return msgspec.json.encode((role, plain_calls), order="deterministic")
    # One pass over the bytes: this runs on the event loop, and messages may have megabytes.
    plain = text.encode("utf-8", "surrogatepass").translate(None, _WHITE_SPACE)
    return b"%b %d:%b" % (role.encode(), len(plain), plain)
