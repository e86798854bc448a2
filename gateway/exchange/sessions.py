"""Which session a request belongs to where its client names none, and which chain of it.

```
 request ──named by header or body──────────────────────────────▶ that session
    └─ its messages begin like a conversation that this user had ─▶ that conversation's session
    └─ else ─▶ a new session, named after the request
```
Messages are compared loosely: system messages, white space, the order of keys and ids of calls do
not matter, nor does what a turn says beside its calls. Whether the context really begins with what
was sampled is then seen in its tokens: a session's requests whose contexts extend one another are
one *chain*, named after its first; a client that sent a turn back changed, or branched off,
starts another.

Bounded, and in memory: a gateway that starts again finds new sessions.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import Call, Said

SESSION_S_MAX = 24 * 3600.0
"""A session that nobody uses for so long is forgotten."""
NUM_SESSIONS_MAX = 16_384
NUM_OWNER_MARKS_MAX = 1024
"""Replies of one user by which a conversation is found again; the oldest are forgotten."""
NUM_OWNERS_MAX = 16_384
NUM_TIPS_MAX = 8
"""Segments of one session that may still be extended."""

_WHITE_SPACE = b" \t\n\r\v\f"
Ids = npt.NDArray[np.int32]
UserKey = tuple[str, str]
"""Tenant and user."""


class PrefixKind(StrEnum):
    """How a request that continues a conversation fits what was sampled in it."""

    EXACT = "exact"
    """Its context begins with all tokens of the turn before, as they were sampled."""
    CHANGED = "changed"
    """Of a known session, but some turn came back changed, or the conversation branched off."""
    UNKNOWN = "unknown"
    """It has turns of an assistant that this gateway does not know."""


class Thread:
    """One request's conversation, and the session that it was found to be of."""

    def __init__(self, owner: UserKey, messages: Sequence[Said]) -> None:
        """Read the messages.

        Args:
            owner: Whose conversation it is.
            messages: All that the client sent.

        """
        self.owner = owner
        self.name = ""
        """As clients name it in feedback."""
        self.marks: list[bytes] = []
        """One per turn of the assistant, in order: digests of all up to it."""
        self._digest = blake3()
        for message in messages:
            if message.role is not Role.SYSTEM:
                self._digest.update(_said(message.role, message.text, message.calls))
            if message.role is Role.ASSISTANT:
                self.marks.append(self._digest.digest())

    @property
    def digest(self) -> bytes:
        """Of all messages."""
        return self._digest.digest()

    def mark_after(self, text: str, calls: Sequence[Call]) -> bytes:
        """Return the mark of this conversation with a reply."""
        after = self._digest.copy()
        after.update(_said(Role.ASSISTANT, text, calls))
        return after.digest()


class _Tip(msgspec.Struct, frozen=True):
    """The end of a chain: its last turn's context and reply together."""

    num_tokens: int
    digest: bytes


class _Session(msgspec.Struct):
    used_at: float
    tips: dict[str, _Tip] = {}
    """By chain; the one extended last comes last."""


class Sessions:
    """Conversations of recent users, by what they said and what was sampled."""

    def __init__(self) -> None:
        self._marks: OrderedDict[UserKey, OrderedDict[bytes, tuple[str, float]]] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        """By tenant and name; the one used last comes last."""

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, owner: UserKey, messages: Sequence[Said], *, named: str, new: str, now: float
    ) -> Thread:
        """Return a request's thread.

        Args:
            owner: Tenant and user.
            messages: Of the request.
            named: The session that the client names, or the empty string.
            new: Name of a session that begins here.
            now: Seconds, of a clock that only goes forward.

        """
        thread = Thread(owner, messages)
        known = self._marks.get(owner, OrderedDict())
        found = next((known[mark] for mark in reversed(thread.marks) if mark in known), None)
        is_fresh = found is not None and now - found[1] <= SESSION_S_MAX
        thread.name = named or (found[0] if found is not None and is_fresh else new)
        return thread

    def settle(  # noqa: PLR0913 - a reply, and where it belongs
        self,
        thread: Thread,
        request_id: str,
        context_ids: Sequence[int],
        token_ids: Sequence[int],
        now: float,
        *,
        continues: str = "",
    ) -> tuple[str, PrefixKind | None]:
        """Note a reply's tokens; return its chain, and how it fits (None: nothing went before).

        Args:
            thread: The request's.
            request_id: The reply's.
            context_ids: [C], the prompt.
            token_ids: [T], the reply.
            now: Seconds, as `open` has it.
            continues: The chain that it belongs to although a summary stands for what went before.

        """
        key = thread.owner[0], thread.name
        session = self._sessions.setdefault(key, _Session(used_at=now))
        session.used_at = now
        self._sessions.move_to_end(key)
        ids = np.asarray([*context_ids, *token_ids], dtype=np.int32)
        kind = PrefixKind.CHANGED if session.tips else PrefixKind.UNKNOWN
        chain = _extended(session.tips, ids[: len(context_ids)])
        if chain is not None:
            kind = PrefixKind.EXACT
            del session.tips[chain]
        elif continues:
            session.tips.pop(continues, None)
        chain = chain or continues or request_id
        session.tips[chain] = _Tip(len(ids), _digest(ids))
        if len(session.tips) > NUM_TIPS_MAX:
            del session.tips[next(iter(session.tips))]
        self._expire(now)
        return chain, kind if thread.marks else None

    def remember(self, thread: Thread, text: str, calls: Sequence[Call], now: float) -> None:
        """Find the thread's session where a conversation continues after this reply."""
        marks = self._marks.setdefault(thread.owner, OrderedDict())
        self._marks.move_to_end(thread.owner)
        mark = thread.mark_after(text, calls)
        marks[mark] = (thread.name, now)
        marks.move_to_end(mark)
        if len(marks) > NUM_OWNER_MARKS_MAX:
            marks.popitem(last=False)
        if len(self._marks) > NUM_OWNERS_MAX:
            self._marks.popitem(last=False)

    def _expire(self, now: float) -> None:
        """Forget what is old, the oldest first; a few at a time, so that no request waits."""
        for _ in range(4):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or (
                len(self._sessions) <= NUM_SESSIONS_MAX and now - oldest.used_at <= SESSION_S_MAX
            ):
                break
            self._sessions.popitem(last=False)
        owner, marks = next(iter(self._marks.items()), (None, None))
        if owner and marks and now - next(reversed(marks.values()))[1] > SESSION_S_MAX:
            del self._marks[owner]


def _extended(tips: Mapping[str, _Tip], context: Ids) -> str | None:
    """Return the chain whose end a context begins with, the longest; None if there is none."""
    by_length = sorted(tips.items(), key=lambda item: item[1].num_tokens, reverse=True)
    for chain, tip in by_length:
        if tip.num_tokens <= len(context) and _digest(context[: tip.num_tokens]) == tip.digest:
            return chain
    return None


def _digest(ids: Ids) -> bytes:
    return blake3(ids.tobytes()).digest()


def _said(role: Role, text: str, calls: Sequence[Call]) -> bytes:
    """Return one message so that what clients change without meaning it makes no difference.

    In one pass over the bytes: this runs on the loop, and messages may have megabytes.
    """
    if calls:
        told = [(call.name, call.arguments) for call in calls]
        return msgspec.json.encode((role, told), order="deterministic")
    plain = text.encode("utf-8", "surrogatepass").translate(None, _WHITE_SPACE)
    return b"%b %d:%b" % (role.encode(), len(plain), plain)
