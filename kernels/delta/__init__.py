"""Lossless deltas between two versions of a flat weight array.

`encode(base, target)` makes one self-describing payload; `decode(base, payload)` gives the changed
positions with their new values, to be written over the base: twice does no harm.
The byte layout stands in `container.py`, the coding of positions in `gaps.py`, of values in
`ulp.py`, the grouping by exponent in `classes.py`, all three together in `gap_ulp.py`, and the
choice among codecs in `codec.py`.
A slow reader written apart from all this, in plain Python, is `kernels/reference/delta.py`.

To add a codec: a member of `Codec`, an `_encode_*` and a `_decode_*` in `codec.py`, a case in the
reference.
"""

from penstock.kernels.delta.codec import Patch, apply, decode, encode, encode_with
from penstock.kernels.delta.container import checksum, read_header
from penstock.kernels.delta.header import Codec, Header

__all__ = [
    "Codec",
    "Header",
    "Patch",
    "apply",
    "checksum",
    "decode",
    "encode",
    "encode_with",
    "read_header",
]
