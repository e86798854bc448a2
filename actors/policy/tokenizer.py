"""BPE tokenizers of bytes, trained here or taken from a published model.

In a tokenizer trained here, pieces never cross a line break, and every digit and operator is a
separate piece, so that an edit to code changes few tokens. Any bytes round-trip. Text never encodes
to a special token: what looks like `<|end|>` in a file or a user's message stays plain characters,
so only the chat format itself can write special tokens. A published model's added tokens, like
`<tool_call>`, are treated as special whether or not its `tokenizer.json` marks them as such.

Published tokenizers are byte-level, as GPT-2's, or SentencePiece-like: spaces are `▁`, and what the
vocabulary lacks are bytes like `<0x0A>`. The latter put a space before a text; here they do not,
since a conversation is encoded in parts. A vocabulary may lack control bytes, which no text of its
training had: they are encoded as U+FFFD.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BpeTokenizer

from penstock.actors.policy.special_tokens import ALL_SPECIAL_TOKENS
from penstock.messages.errors import CodecError, PenstockError

TOKENIZER_KEY = "tokenizer.json"
"""Key of a run's tokenizer in its object store."""
_PIECES = (
    r"\r?\n[ \t]*"  # a line break with the indentation after it
    r'|"""'
    r"| ?(?:\*\*=|//=|>>=|<<=|\.\.\.|==|!=|<=|>=|->|:=|\+=|-=|\*=|/=|%=|&=|\|=|\^=|//|\*\*|<<|>>)"
    r"| ?\d"
    r"| ?[^\W\d]+"
    r"| ?[^\w\s]"
    r"|[ \t]+"
)
_CHAT_KEY = "penstock_chat"
"""Key of the chat template in a run's tokenizer; `tokenizer.json` itself has no place for one."""
_NUM_IDS_MAX = 1 << 22
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NO_TOKEN = _REPLACEMENT.encode()
"""Bytes that an id without a token decodes to; a model may have more ids than its tokenizer."""
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")


class ChatTemplate(NamedTuple):
    """The chat template of a model's folder."""

    template: str
    tokens: dict[str, str]
    """Names that the template uses for tokens, such as `bos_token`, and what they stand for."""


class UntokenizableError(PenstockError, ValueError):
    """A text that a tokenizer cannot encode."""


class Tokenizer:
    """Text to token ids and back.

    Example:
        >>> tokenizer = train_tokenizer(["def f(x): return x"], vocab_size=400)
        >>> tokenizer.decode(tokenizer.encode("return 12"))
        'return 12'

    """

    def __init__(self, bpe: BpeTokenizer, chat: ChatTemplate | None = None) -> None:
        """Wrap a BPE tokenizer.

        Raises:
            ValueError: Its vocabulary is not one of bytes, or lacks a printable character of ASCII.

        """
        # Despite its name, this makes special tokens in a text encode as plain characters.
        bpe.encode_special_tokens = True
        bpe.no_truncation()
        bpe.no_padding()
        self._bpe = bpe
        self.chat = chat
        """Chat template of the model's folder; None if it has none."""
        self._bytes = _bytes_by_id(bpe)
        self._special_names = {
            index: token.content for index, token in bpe.get_added_tokens_decoder().items()
        }
        self._special_ids = {name: index for index, name in self._special_names.items()}
        self._byte_ids = {
            data: index
            for index, data in enumerate(self._bytes)
            if index not in self._special_names
        }
        missing = {byte for byte in range(256) if bytes((byte,)) not in self._byte_ids}
        if needed := sorted(missing.intersection((*b"\n", *range(0x20, 0x7F), *NO_TOKEN))):
            raise ValueError(f"not a BPE of bytes: no token for the byte {needed[0]:#04x}")
        self._missing = frozenset(missing)
        """Bytes that the vocabulary cannot express."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including special tokens: the largest id plus one."""
        return len(self._bytes)

    @property
    def token_bytes_max(self) -> int:
        """Length of the longest token in bytes; N bytes need N / token_bytes_max tokens or more."""
        return max(map(len, self._bytes))

    def encode(self, text: str | bytes) -> list[int]:
        """Encode to plain tokens, never special ones.

        Raises:
            UntokenizableError: The tokenizer, which may be a stranger's, fails on this text.

        """
        # Bytes that are not UTF-8 become lone surrogates, which are encoded as single bytes below.
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        if text.isascii() or not _ESCAPED_BYTE.search(text):
            return self._encode(text)
        ids: list[int] = []
        for index, part in enumerate(_ESCAPED_BYTE.split(text)):
            byte_id = self._byte_ids.get(bytes((ord(part) - 0xDC00,))) if index % 2 else None
            ids += (
                self._encode(_REPLACEMENT if index % 2 else part) if byte_id is None else [byte_id]
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        # The library would drop what the vocabulary lacks without a word.
        if self._missing and not self._missing.isdisjoint(text.encode()):
            text = "".join(
                _REPLACEMENT if not self._missing.isdisjoint(each.encode()) else each
                for each in text
            )
        try:
            return self._bpe.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            # The library panics, past `Exception`, where a model's regular expression takes more
            # steps on a text than it allows.
            if type(error).__name__ != "PanicException":
                raise
            reason = f"the model's tokenizer does not take this text: {str(error)[:200]}"
            raise UntokenizableError(reason) from error

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Decode to the exact bytes; special tokens give their text, ids without a token U+FFFD."""
        return b"".join(self.bytes_of(index) for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def special_id(self, name: str) -> int:
        """Return the id of a special token.

        Raises:
            KeyError: This tokenizer has no such special token.

        """
        return self._special_ids[name]

    def has_special(self, name: str) -> bool:
        """Return whether the tokenizer has this special token."""
        return name in self._special_ids

    def special_of(self, token_id: int) -> str | None:
        """Return the name of a special token by id, or None if the token is plain."""
        return self._special_names.get(token_id)

    @property
    def special_names(self) -> Collection[str]:
        """Names of all special tokens."""
        return self._special_ids.keys()

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one id, or those of U+FFFD if it has no token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else NO_TOKEN

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` that transformers can read."""
        return self._bpe.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, source: str) -> "Tokenizer":
        """Create a tokenizer from the content of a `tokenizer.json`.

        Raises:
            CodecError: It is not a BPE tokenizer of bytes; the text names `source`.

        """
        try:
            table = json.loads(text)
            chat = table.pop(_CHAT_KEY, None)
            bpe = BpeTokenizer.from_str(json.dumps(_adapted(table)))
            return cls(bpe, None if chat is None else ChatTemplate(**chat))
        # The library raises a bare Exception for any bad file, or panics.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CodecError(f"{source}: not a tokenizer of bytes: {error!r}") from error


def with_chat(text: str, chat: ChatTemplate) -> str:
    """Return the content of a `tokenizer.json` with a chat template in it, as runs store it."""
    return json.dumps(json.loads(text) | {_CHAT_KEY: chat._asdict()}, ensure_ascii=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Train a tokenizer; the same texts in the same order give the same result.

    Args:
        texts: Plain texts (code, instructions, tool output) without special tokens, which are
            added to the vocabulary automatically.
        vocab_size: Number of ids, at least 256 plus the number of special tokens.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes and special tokens.

    """
    smallest = 256 + len(ALL_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size: expected at least {smallest}, got {vocab_size}")
    bpe = BpeTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(ALL_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return Tokenizer(bpe)


def _adapted(table: dict[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer.json` whose added tokens are special and that puts no space before texts.

    If an added token were not special, a text could encode to it.
    """
    added = [token | {"special": True} for token in table.get("added_tokens") or []]
    steps = {name: _without_prefix(table.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return table | steps | {"added_tokens": added}


def _without_prefix(step: Any) -> Any:
    """Return a step of normalization or splitting without the space that it puts before a text."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    if step.get("type") == "Metaspace":
        return step | {"prepend_scheme": "never"}
    for inner in ("normalizers", "pretokenizers"):
        if isinstance(parts := step.get(inner), list):
            return step | {inner: [one for part in parts if (one := _without_prefix(part))]}
    return step


def _bytes_by_id(bpe: BpeTokenizer) -> list[bytes]:
    """Return the bytes of every token id, with special tokens as their text."""
    byte_of = _byte_alphabet()
    vocabulary = bpe.get_vocab()
    has_fallback = bool(getattr(bpe.model, "byte_fallback", False))
    # Checked first: one huge id in a malicious file would allocate a huge table.
    num_ids = max(vocabulary.values(), default=-1) + 1
    if num_ids > _NUM_IDS_MAX:
        raise ValueError(f"token ids go up to {num_ids - 1}, expected at most {_NUM_IDS_MAX - 1}")
    table = [NO_TOKEN] * num_ids
    special = {index: token.content for index, token in bpe.get_added_tokens_decoder().items()}
    for token, index in vocabulary.items():
        if index in special:
            table[index] = special[index].encode()
        elif has_fallback:
            byte = _FALLBACK_BYTE.fullmatch(token)
            table[index] = bytes((int(byte[1], 16),)) if byte else _spaced(token)
        elif all(character in byte_of for character in token):
            table[index] = bytes(byte_of[character] for character in token)
        else:
            raise ValueError(f"not a BPE of bytes: the vocabulary contains {token!r}")
    return table


def _spaced(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet represents.

    Printable Latin-1 characters represent themselves; all other bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
