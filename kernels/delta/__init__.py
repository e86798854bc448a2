"""Lossless deltas between two versions of a flat array of weights.

`encode(base, target)` returns a self-describing payload. `decode(base, payload)` returns the
changed positions and their new values, to be written over the base; writing them twice is
harmless. `apply` returns the target itself, verified, in given or new memory.

Arrays hold bit patterns as unsigned integers of the element size; `Dtype` names their type.

```
 codec.py                   choice of codec and of exponent classes
     ├─────▶ compiled.py    marks and steps: c/delta.c, or portable.py (same bytes)
     └─────▶ container.py   byte layout; header.py has its fields, dtypes.py the element types
```
`docs/weight-format.md` documents the layout. Arrays are read from memory only once: checksums are
computed chunk by chunk while the array is coded.

To add a codec, add a member of `Codec`, its coding in `portable.py` and `c/`, its predicted size in
`codec.py`, and a case in the slow reader of the tests. To add an element type, add a row in
`dtypes.py`.
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
