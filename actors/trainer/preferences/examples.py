"""Pairs and labels as token ids, and the object of the store that holds those before RL."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_with

PREFERENCES_KEY = "preferences/train"
PREFERENCES_HELDOUT_KEY = "preferences/heldout"


@dataclass(frozen=True, kw_only=True)
class PreferenceReply:
    """A reply after its context.

    Shapes: P tokens before, n of the reply.
    """

    context_ids: np.ndarray
    """[P] int64, P > 0."""
    reply_ids: np.ndarray
    """[n] int64: what the assistant wrote, and between its turns what tools returned."""
    is_target: np.ndarray
    """bool [n]: whose probability counts; one of them at least."""

    @property
    def num_tokens(self) -> int:
        """P + n."""
        return self.context_ids.size + self.reply_ids.size

    def after(self, context_ids: np.ndarray, tokens_max: int) -> "PreferenceReply":
        """Return this reply after another context, cut to what then fits."""
        room = max(tokens_max - context_ids.size, 1)
        return PreferenceReply(
            context_ids=context_ids,
            reply_ids=self.reply_ids[:room],
            is_target=self.is_target[:room],
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceLogprobs:
    """What a reference policy gives the replies of an example: sums over their tokens."""

    chosen: float = 0.0
    rejected: float = 0.0
    unrelated: float = 0.0
    """Of a label: `unrelated_replies`."""

    def of(self, example: "PreferenceExample") -> list[float]:
        """Return those of its replies, in their order."""
        given = ((self.chosen, example.chosen), (self.rejected, example.rejected))
        return [value for value, reply in given if reply is not None]


@dataclass(frozen=True, kw_only=True)
class PreferenceExample:
    """A pair, or a label, which has one of the two replies."""

    chosen: PreferenceReply | None
    rejected: PreferenceReply | None
    weight: float = 1.0
    """Of a label."""
    reference: ReferenceLogprobs = ReferenceLogprobs()

    @property
    def is_pair(self) -> bool:
        """Whether there are two replies to one context."""
        return self.chosen is not None and self.rejected is not None

    @property
    def is_desirable(self) -> bool:
        """Of a label."""
        return self.rejected is None

    @property
    def replies(self) -> list[PreferenceReply]:
        """The chosen one first."""
        return [reply for reply in (self.chosen, self.rejected) if reply is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens that a pass reads, a shared context once."""
        first, *others = self.replies
        return first.num_tokens + sum(other.reply_ids.size for other in others)

    def with_reference(
        self, chosen: float, rejected: float, unrelated: float
    ) -> "PreferenceExample":
        """Return it with what a reference policy gives its replies."""
        return replace(
            self,
            reference=ReferenceLogprobs(chosen=chosen, rejected=rejected, unrelated=unrelated),
        )


def unrelated_replies(
    labels: Sequence[PreferenceExample], tokens_max: int
) -> list[PreferenceReply]:
    """Return each label's context with the reply of the one before, the first with the last's.

    Nothing where a single label has no other: KTO's KL term is 0 then.
    """
    if len(labels) < 2:
        return []
    own = [label.replies[0] for label in labels]
    shifted = [own[-1], *own[:-1]]
    return [
        other.after(reply.context_ids, tokens_max)
        for reply, other in zip(own, shifted, strict=True)
    ]


def check_example(example: PreferenceExample, vocab_size: int, tokens_max: int) -> None:
    """Refuse what a policy cannot read.

    Raises:
        CodecError: Says what was expected.

    """
    for reply in example.replies:
        if not reply.context_ids.size or not reply.is_target.any():
            raise CodecError("expected a context and a reply of at least one token")
        if reply.num_tokens > tokens_max:
            text = f"{reply.num_tokens} tokens with its context, more than {tokens_max}"
            raise CodecError(f"a reply of {text}")
        for ids in (reply.context_ids, reply.reply_ids):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise CodecError(f"token ids: expected 0 to {vocab_size - 1}")
    if example.is_pair:
        chosen, rejected = example.replies
        if np.array_equal(chosen.reply_ids, rejected.reply_ids):
            raise CodecError("expected two replies that differ")


class StoredReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reply in the store."""

    token_ids: list[int]
    targets: list[bool]


class StoredExample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An example in the store."""

    context: list[int]
    chosen: StoredReply | None = None
    rejected: StoredReply | None = None
    weight: float = 1.0


_decoder = msgspec.msgpack.Decoder(list[StoredExample])


def encode_examples(examples: Sequence[StoredExample]) -> bytes:
    """Pack for the object store."""
    return msgspec.msgpack.encode(examples)


def decode_examples(data: bytes, vocab_size: int, tokens_max: int) -> list[PreferenceExample]:
    """Unpack and check.

    Raises:
        CorruptDataError: Not such an object, or not one for this policy.

    """
    try:
        stored: list[StoredExample] = parse_with(_decoder, data, "preferences")
        found = [example_of(one) for one in stored]
        for example in found:
            check_example(example, vocab_size, tokens_max)
    except CodecError as error:
        raise CorruptDataError(str(error)) from error
    return found


def example_of(stored: StoredExample) -> PreferenceExample:
    """Return a stored example as arrays.

    Raises:
        CodecError: It has no reply, or one with another number of targets than tokens.

    """
    if stored.chosen is None and stored.rejected is None:
        raise CodecError("expected a reply")
    context = np.array(stored.context, np.int64)
    return PreferenceExample(
        chosen=_reply(context, stored.chosen),
        rejected=_reply(context, stored.rejected),
        weight=stored.weight,
    )


def _reply(context: np.ndarray, stored: StoredReply | None) -> PreferenceReply | None:
    if stored is None:
        return None
    if len(stored.targets) != len(stored.token_ids):
        raise CodecError("targets: expected one for each token")
    return PreferenceReply(
        context_ids=context,
        reply_ids=np.array(stored.token_ids, np.int64),
        is_target=np.array(stored.targets, bool),
    )
