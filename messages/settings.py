"""Constrained field types of settings; every table of a configuration is made of them.

A constraint on one field is part of its type and is checked wherever the settings are decoded.
What concerns several fields is checked in the struct's `__post_init__`, which raises `ConfigError`.
"""

import re
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]


def one_of(choices: Iterable[str]) -> Meta:
    """Return the constraint of a string with a fixed list of values, which its error names."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))})\Z")
