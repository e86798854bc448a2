"""Fences untrusted text in a judge's prompt: escaped, bounded, delimited by a nonce. Pure.

The nonce has 128 random bits and is drawn per call, after the text was written. Its author cannot
close the fence, and a forged fence is only more text inside.
"""

import re
import secrets

_NOT_PLAIN = re.compile(r"[^ -~\n\t]")
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible letters and marks: joiners, fillers, variation selectors. The category of all other
invisible or reordering characters is not printable already."""


def new_nonce() -> str:
    """Return 128 random bits, in hex."""
    return secrets.token_hex(16)


def neutral(text: str) -> str:
    """Return the text with every invisible character escaped."""
    return _NOT_PLAIN.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    char = found[0]
    is_seen = char.isprintable() and not _UNSEEN.match(char)
    return char if is_seen else f"\\u{{{ord(char):x}}}"


def bounded(text: str, chars_max: int) -> str:
    """Return a text of about `chars_max` characters at most, cut in the middle."""
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
