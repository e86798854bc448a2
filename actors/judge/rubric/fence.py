"""Untrusted text in a judge's prompt: neutral, bounded, and fenced by what nobody can guess. Pure.

A fence bears 128 random bits that are drawn for each call, after the text was written: whoever
wrote it cannot close the fence, and a fence of its own is only more text inside.
"""

import re
import secrets

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""What a reader does not see or sees elsewhere: controls but tab and newline, marks that reorder
text, characters without width, variation selectors, tags, lone surrogates."""


def new_nonce() -> str:
    """Return 128 random bits, in hex."""
    return secrets.token_hex(16)


def neutral(text: str) -> str:
    """Return text in which every character can be seen, escaped where it could not."""
    return _UNSEEN.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)


def bounded(text: str, chars_max: int) -> str:
    """Return a text of about `chars_max` characters at most; a longer one loses its middle."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"


def fenced(title: str, text: str, nonce: str, chars_max: int) -> str:
    """Return a section of a prompt that holds untrusted text."""
    inside = bounded(neutral(text), chars_max)
    assert nonce not in inside, "nobody guesses 128 bits"
    return f"<<<{nonce} {title}>>>\n{inside}\n<<<{nonce} end of {title}>>>"
