"""Constrained field types of settings and of messages.

A constraint on one field is part of its type and is checked wherever the settings are decoded.
What concerns several fields is checked in the struct's `__post_init__`, which raises `ConfigError`.
"""

import re
import sys
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]
_FLOAT_MAX = sys.float_info.max
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
FinitePositive = Annotated[float, Meta(gt=0, le=_FLOAT_MAX)]
FiniteNonNegative = Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]


def one_of(choices: Iterable[str]) -> Meta:
    """Return the constraint of a string with a fixed list of values, which its error names."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))})\Z")
