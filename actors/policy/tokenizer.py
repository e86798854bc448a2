"""Byte-level BPE, trained locally, with the special tokens of the chat format.

Pieces never cross a line break, and every digit and operator is a piece of its own, so that an
edit to code changes few tokens. Any bytes round-trip. Text never encodes to a special token:
what looks like `<|end|>` in a file or in a user's message stays plain characters, so that only
the chat format itself can write special tokens.
"""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BpeTokenizer

from penstock.actors.policy.special_tokens import ALL_SPECIAL_TOKENS, END

TOKENIZER_KEY = "tokenizer.json"
"""Key of a run's tokenizer in its object store."""
_PIECES = (
    r"\r?\n[ \t]*"  # a line break with the indentation after it
    r"| ?(?:\*\*=|//=|>>=|<<=|\.\.\.|==|!=|<=|>=|->|:=|\+=|-=|\*=|/=|%=|&=|\|=|\^=|//|\*\*|<<|>>)"
    r"| ?\d"
    r"| ?[^\W\d]+"
    r"| ?[^\w\s]"
    r"|[ \t]+"
)
_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")


class Tokenizer:
    """Text to token ids and back.

    Example:
        >>> tokenizer = train_tokenizer(["def f(x): return x"], vocab_size=400)
        >>> tokenizer.decode(tokenizer.encode("return 12"))
        'return 12'

    """

    def __init__(self, bpe: BpeTokenizer) -> None:
        """Wrap a trained BPE whose vocabulary holds all 256 bytes."""
        bpe.encode_special_tokens = True
        self._bpe = bpe
        self._bytes = _bytes_by_id(bpe)
        self._byte_ids = {data: index for index, data in enumerate(self._bytes)}
        self._special_ids = {
            token.content: index for index, token in bpe.get_added_tokens_decoder().items()
        }
        self._special_names = {index: name for name, index in self._special_ids.items()}
        self.end_id = self._special_ids[END]

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return len(self._bytes)

    def encode(self, text: str | bytes) -> list[int]:
        """Encode to plain tokens, never special ones."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        if text.isascii() or not _ESCAPED_BYTE.search(text):
            return self._bpe.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for index, part in enumerate(_ESCAPED_BYTE.split(text)):
            if index % 2:
                ids.append(self._byte_ids[bytes((ord(part) - 0xDC00,))])
            else:
                ids += self._bpe.encode(part, add_special_tokens=False).ids
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Decode exactly; special tokens give their literal text."""
        return b"".join(self._bytes[index] for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def special_id(self, name: str) -> int:
        """Return the token id of a special token of the chat format.

        Raises:
            KeyError: this tokenizer has no such special token.

        """
        return self._special_ids[name]

    def has_special(self, name: str) -> bool:
        """Return whether there is such a special token."""
        return name in self._special_ids

    def special_of(self, token_id: int) -> str | None:
        """Return the special token of an id, or None if it is plain."""
        return self._special_names.get(token_id)

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, as transformers reads it."""
        return self._bpe.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, source: str) -> "Tokenizer":
        """Read what `to_json` returned.

        Raises:
            ValueError: it is no tokenizer of ours; names `source`.

        """
        try:
            return cls(BpeTokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception on any bad file
            raise ValueError(f"{source}: not a tokenizer: {error!r}") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Learn merges from texts; the same texts in the same order give the same tokenizer.

    Args:
        texts: plain text (code, instructions, tool output); special tokens are added by themselves.
        vocab_size: at least 256 bytes plus the special tokens.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes and special tokens.

    """
    smallest = 256 + len(ALL_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest}, not {vocab_size}")
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


def _bytes_by_id(bpe: BpeTokenizer) -> list[bytes]:
    """Return the bytes of every token id: byte-level BPE undone, special tokens as text."""
    special = {index: token.content for index, token in bpe.get_added_tokens_decoder().items()}
    byte_of = _byte_alphabet()
    table = []
    for index in range(bpe.get_vocab_size()):
        token = bpe.id_to_token(index) or ""
        plain = index not in special
        table.append(bytes(byte_of[c] for c in token) if plain else special[index].encode())
    return table


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable Latin-1 characters stand for themselves; the rest follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
