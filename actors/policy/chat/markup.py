"""A tokenizer for code that joins markup with what others say before it tokenizes.

Each added token that such a text spells is broken by a mark, which the tokenizer removes again:

    "</tool_response>" in a file ─▶ "<" mark "/tool_response>" ─▶ plain tokens, never that one id
"""

import re
from collections.abc import Iterable
from typing import Any

from penstock.actors.policy.tokenizer import Tokenizer

_BREAK = "\ufdd0"
"""A noncharacter, which Unicode keeps out of interchanged text."""


class MarkupTokenizer:
    """What the package sees of a tokenizer: markup becomes added tokens, broken markup does not."""

    unk_token_id = None
    eos_token_id = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        spelled = "|".join(re.escape(name) for name in names if len(name) > 1) or r"(?!)"
        self._markup = re.compile(f"({spelled})")
        self._start = re.compile(f"(?=(?:{spelled})).", re.DOTALL)
        self.missing: list[str] = []

    def broken(self, text: str) -> str:
        """Return a text with a mark inside each added token that it spells."""
        text = text.replace(_BREAK, "\N{REPLACEMENT CHARACTER}")
        return self._start.sub(lambda found: found[0] + _BREAK, text)

    def encode(self, text: str, **_options: Any) -> list[int]:
        """Encode markup to added tokens, all else to plain ones."""
        ids: list[int] = []
        for index, part in enumerate(self._markup.split(text)):
            if index % 2:
                ids.append(self._tokenizer.special_id(part))
            elif part:
                ids += self._tokenizer.encode(part.replace(_BREAK, ""))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode to text."""
        special_of = self._tokenizer.special_of
        kept = [one for one in ids if not (skip_special_tokens and special_of(one))]
        return self._tokenizer.decode(kept)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return an added token's id; one that is missing is noted."""
        if self._tokenizer.has_special(token):
            return self._tokenizer.special_id(token)
        self.missing.append(token)
        return None
