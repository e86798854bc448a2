"""What a function template is: code with slots, the kinds of its parameters, its names."""

import random
from collections.abc import Callable
from dataclasses import dataclass

_WORDS = ("ab", "box", "Cat", "dune", "elk", "fog", "Gnu", "hat", "ink", "jar", "a.b", "level")


@dataclass(frozen=True)
class Template:
    """A short function in the manner of the standard library.

    `$f` is the function's name; every other `$slot` is a variable or a word of a variant.

    Example:
        >>> params = {"xs": "ints", "n": "small"}
        >>> Template("rotate", ("rotate",), params, "return $xs[$n:] + $xs[:$n]").family
        'rotate'

    """

    family: str
    """Unique name; the split and the log speak of it."""
    verbs: tuple[str, ...]
    """First words of `$f`."""
    params: dict[str, str]
    """Parameter slot -> kind, a key of `KINDS`, in the order of the signature."""
    body: str
    """Docstring and statements, unindented."""
    variants: tuple[dict[str, str], ...] = ({},)
    """Words that change the docstring and the code together: the docstring decides."""
    local_slots: tuple[str, ...] = ()
    """Slots of variables that are no parameters."""


def _integers(rng: random.Random) -> list[int]:
    return [rng.randint(-5, 9) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6)))]


def _some_integers(rng: random.Random) -> list[int]:
    return [rng.randint(-5, 9) for _ in range(rng.randint(1, 6))]


def _sorted_integers(rng: random.Random) -> list[int]:
    return sorted(rng.randint(0, 9) for _ in range(rng.randint(0, 7)))


def _words(rng: random.Random) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, 5))]


def _text(rng: random.Random) -> str:
    text = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(0, 4)))
    return rng.choice(("", "  ", " ")) + text + rng.choice(("", " ", "  "))


def _dotted(rng: random.Random) -> str:
    return ".".join(rng.choice(("a", "bc", "tar", "x", "")) for _ in range(rng.randint(1, 4)))


KINDS: dict[str, Callable[[random.Random], object]] = {
    "int": lambda rng: rng.randint(-9, 20),
    "natural": lambda rng: rng.randint(0, 30),
    "small": lambda rng: rng.randint(1, 4),
    "width": lambda rng: rng.randint(3, 12),
    "year": lambda rng: rng.choice((1900, 1996, 2000, 2023, 2024, 2100)),
    "channel": lambda rng: rng.choice((0, 1, 50, 128, 254, 255)),
    "ints": _integers,
    "some": _some_integers,
    "sorted": _sorted_integers,
    "words": _words,
    "text": _text,
    "dotted": _dotted,
    "word": lambda rng: rng.choice(_WORDS),
    "letters": lambda rng: rng.choice(("a", "e", "g", "b", ".", "l", "at", "le", "C")),
    "dash": lambda rng: rng.choice(("-", ", ", "/", "")),
}
"""Kind of a parameter -> how one value is drawn; several draws make the test cases."""
