"""Pairs and labels as token ids, and their encoding in the store for the phase before RL."""

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
    """A reply of n tokens after a context of P tokens."""

    context_ids: np.ndarray
    """[P] int64, P > 0."""
    reply_ids: np.ndarray
    """[n] int64: the assistant's turns, and between them the results of tools."""
    is_target: np.ndarray
    """bool [n]: tokens whose probability counts; at least one is True."""

    @property
    def num_tokens(self) -> int:
        """P + n."""
        return self.context_ids.size + self.reply_ids.size

    def after(self, context_ids: np.ndarray, tokens_max: int) -> "PreferenceReply":
        """Return this reply after another context, truncated to `tokens_max` in all."""
        # At least one token, because a reply without tokens has no log-probability.
        room = max(tokens_max - context_ids.size, 1)
        return PreferenceReply(
            context_ids=context_ids,
            reply_ids=self.reply_ids[:room],
            is_target=self.is_target[:room],
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceLogprobs:
    """Log-probabilities under the reference policy, summed over each reply's tokens."""

    chosen: float = 0.0
    rejected: float = 0.0
    unrelated: float = 0.0
    """Sum of a label's unrelated reply; see `unrelated_replies`."""

    def of(self, example: "PreferenceExample") -> list[float]:
        """Return the sums of an example's replies, in their order."""
        given = ((self.chosen, example.chosen), (self.rejected, example.rejected))
        return [value for value, reply in given if reply is not None]


@dataclass(frozen=True, kw_only=True)
class PreferenceExample:
    """A pair with both replies, or a label with one of them."""

    chosen: PreferenceReply | None
    rejected: PreferenceReply | None
    weight: float = 1.0
    """Weight of a label; 1 for pairs."""
    reference: ReferenceLogprobs = ReferenceLogprobs()

    @property
    def is_pair(self) -> bool:
        """Whether there are two replies to one context."""
        return self.chosen is not None and self.rejected is not None

    @property
    def is_desirable(self) -> bool:
        """Whether a label's reply is a desirable one."""
        return self.rejected is None

    @property
    def replies(self) -> list[PreferenceReply]:
        """One or two replies, the chosen one first."""
        return [reply for reply in (self.chosen, self.rejected) if reply is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward pass, with the shared context counted once."""
        first, *others = self.replies
        return first.num_tokens + sum(other.reply_ids.size for other in others)

    def with_reference(
        self, chosen: float, rejected: float, unrelated: float
    ) -> "PreferenceExample":
        """Return a copy with the reference policy's log-probabilities."""
        return replace(
            self,
            reference=ReferenceLogprobs(chosen=chosen, rejected=rejected, unrelated=unrelated),
        )


def unrelated_replies(
    labels: Sequence[PreferenceExample], tokens_max: int
) -> list[PreferenceReply]:
    """Return each label's context with the previous label's reply, cyclically.

    The list is empty for fewer than two labels, whose KL term is 0.
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
    """Check that a policy can read an example.

    Raises:
        CodecError: The example is empty, too long, or has unknown token ids or equal replies.

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
        # Equal replies have a constant loss and no gradient.
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
    """Encode examples for the object store."""
    return msgspec.msgpack.encode(examples)


def decode_examples(data: bytes, vocab_size: int, tokens_max: int) -> list[PreferenceExample]:
    """Decode and check examples of the object store.

    Raises:
        CorruptDataError: The object is damaged or does not fit this policy.

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
        CodecError: There is no reply, or its numbers of targets and tokens differ.

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
