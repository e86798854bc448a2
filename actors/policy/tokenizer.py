"""Byte-level BPE tokenizers, trained here or taken from a published model.

In a tokenizer trained here, pieces never cross a line break, and every digit and operator is a
separate piece, so that an edit to code changes few tokens. Any bytes round-trip. Text never encodes
to a special token: what looks like `<|end|>` in a file or a user's message stays plain characters,
so only the chat format itself can write special tokens. A published model's added tokens, like
`<tool_call>`, are treated as special whether or not its `tokenizer.json` marks them as such.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence

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
_NUM_IDS_MAX = 1 << 22
NO_TOKEN = "\N{REPLACEMENT CHARACTER}".encode()
"""Bytes that an id without a token decodes to; a model may have more ids than its tokenizer."""
_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")


class UntokenizableError(PenstockError, ValueError):
    """A text that a tokenizer cannot encode."""


class Tokenizer:
    """Text to token ids and back.

    Example:
        >>> tokenizer = train_tokenizer(["def f(x): return x"], vocab_size=400)
        >>> tokenizer.decode(tokenizer.encode("return 12"))
        'return 12'

    """

    def __init__(self, bpe: BpeTokenizer) -> None:
        """Wrap a BPE tokenizer.

        Raises:
            ValueError: It is not byte-level, or its vocabulary lacks a byte.

        """
        # Despite its name, this makes special tokens in a text encode as plain characters.
        bpe.encode_special_tokens = True
        bpe.no_truncation()
        bpe.no_padding()
        self._bpe = bpe
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
        for byte in range(256):
            if bytes((byte,)) not in self._byte_ids:
                raise ValueError(f"not a byte-level BPE: no token for the byte {byte:#04x}")

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
            return self._plain_ids(text)
        ids: list[int] = []
        for index, part in enumerate(_ESCAPED_BYTE.split(text)):
            if index % 2:
                ids.append(self._byte_ids[bytes((ord(part) - 0xDC00,))])
            else:
                ids += self._plain_ids(part)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
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
            CodecError: It is not a byte-level BPE tokenizer; the text names `source`.

        """
        try:
            return cls(BpeTokenizer.from_str(_all_special(text)))
        # The library raises a bare Exception for any bad file, or panics.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CodecError(f"{source}: not a byte-level tokenizer: {error!r}") from error


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


def _all_special(text: str) -> str:
    """Mark all added tokens of a `tokenizer.json` as special, so that no text encodes to one."""
    table = json.loads(text)
    added = table.get("added_tokens") or []
    if all(token.get("special") for token in added):
        return text
    return json.dumps(table | {"added_tokens": [token | {"special": True} for token in added]})


def _bytes_by_id(bpe: BpeTokenizer) -> list[bytes]:
    """Return the bytes of every token id, with special tokens as their text."""
    byte_of = _byte_alphabet()
    vocabulary = bpe.get_vocab()
    # Checked first: one huge id in a malicious file would allocate a huge table.
    num_ids = max(vocabulary.values(), default=-1) + 1
    if num_ids > _NUM_IDS_MAX:
        raise ValueError(f"token ids go up to {num_ids - 1}, expected at most {_NUM_IDS_MAX - 1}")
    table = [NO_TOKEN] * num_ids
    special = {index: token.content for index, token in bpe.get_added_tokens_decoder().items()}
    for token, index in vocabulary.items():
        if index in special:
            table[index] = special[index].encode()
        elif all(character in byte_of for character in token):
            table[index] = bytes(byte_of[character] for character in token)
        else:
            raise ValueError(f"not a byte-level BPE: the vocabulary contains {token!r}")
    return table


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet represents.

    Printable Latin-1 characters represent themselves; all other bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
