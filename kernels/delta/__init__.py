"""Lossless deltas between two versions of a flat weight array.

`encode(base, target)` makes one self-describing payload; `decode(base, payload)` returns the
changed positions with their new values, to be written over the base: writing twice does no harm.
`apply` returns the target itself, in given memory or new, and verifies it.

Arrays are bit patterns, as unsigned integers of their element size; `Dtype` names what they hold.

```
 codec.py ─┬─▶ compiled.py    marks and steps: c/delta.c, or portable.py (the same bytes)
           └─▶ container.py   the byte layout; header.py has its fields, dtypes.py the element types
```
The layout is documented in `docs/weight-format.md`. An array is read from memory once: its checks
are computed chunk by chunk while it is coded.

To add a codec: a member of `Codec`, its coding in `portable.py` and `c/`, its predicted size in
`codec.py`, a case in the tests' slow reader. To add an element type: a row in `dtypes.py`.
"""

from penstock.kernels.delta.arrays import Patch, check_of
from penstock.kernels.delta.codec import apply, decode, encode, encode_with
from penstock.kernels.delta.container import checksum, read_header
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import Codec, Header

__all__ = [
    "Codec",
    "Dtype",
    "Header",
    "Patch",
    "apply",
    "check_of",
    "checksum",
    "decode",
    "encode",
    "encode_with",
    "read_header",
]
