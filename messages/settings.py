"""Field types with constraints, for settings and messages.

The constraint on a single field is part of its type and is checked on decoding. Constraints across
fields are checked in the struct's `__post_init__`, which raises `ConfigError`.
"""

import re
import sys
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

# Largest integer that every JSON reader represents exactly.
_INT_MAX = 2**53 - 1
# Largest finite float: no setting may be infinite.
_FLOAT_MAX = sys.float_info.max
PositiveInt = Annotated[int, Meta(ge=1, le=_INT_MAX)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=_INT_MAX)]
NumThreads = Annotated[int, Meta(ge=1, le=1024)]
"""Number of threads or concurrent tasks of one process."""
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
PositiveFloat = Annotated[float, Meta(gt=0, le=_FLOAT_MAX)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]
AtLeastOne = Annotated[float, Meta(ge=1, le=_FLOAT_MAX)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]


REFERENCE = r"[A-Za-z_]\w{0,63}(?:\.[A-Za-z_]\w{0,63}){0,15}:[A-Za-z_]\w{0,63}"
"""Pattern of `module:name`, which refers to user code (`reading/references.py`)."""


def one_of(choices: Iterable[str]) -> Meta:
    """Return the constraint that a string is one of the choices, which its error lists."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))})\Z")


def one_of_or_own(choices: Iterable[str]) -> Meta:
    """Return the constraint that a string is one of the choices or refers to user code."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))}|{REFERENCE})\Z")
