"""Constrained field types of settings and of messages.

A constraint on one field is part of its type and is checked wherever the settings are decoded.
What concerns several fields is checked in the struct's `__post_init__`, which raises `ConfigError`.
"""

import re
import sys
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

_INT_MAX = 2**53 - 1
"""Largest integer that every reader of JSON keeps."""
_FLOAT_MAX = sys.float_info.max
"""No setting is infinite."""
PositiveInt = Annotated[int, Meta(ge=1, le=_INT_MAX)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=_INT_MAX)]
NumThreads = Annotated[int, Meta(ge=1, le=1024)]
"""Of one process: threads, or tasks that are computed at once."""
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
PositiveFloat = Annotated[float, Meta(gt=0, le=_FLOAT_MAX)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]
AtLeastOne = Annotated[float, Meta(ge=1, le=_FLOAT_MAX)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]


REFERENCE = r"[A-Za-z_]\w{0,63}(?:\.[A-Za-z_]\w{0,63}){0,15}:[A-Za-z_]\w{0,63}"
"""`module:name`: own code (`references.py`)."""


def one_of(choices: Iterable[str]) -> Meta:
    """Return the constraint of a string with a fixed list of values, which its error names."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))})\Z")


def one_of_or_own(choices: Iterable[str]) -> Meta:
    """Return the constraint of a string that is one of these, or names own code."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))}|{REFERENCE})\Z")
