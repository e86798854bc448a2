"""Lossless deltas between two versions of a flat weight array.

`encode(base, target)` makes one self-describing payload; `decode(base, payload)` gives the changed
positions with their new values, to be written over the base with `apply_into`: twice does no harm.
`apply` makes the target itself, in memory that it is given or new, and proves it. `compose` joins
patches, `fold` payloads; `encode_many` and `decode_many` work on many arrays at once, on several
threads.

Arrays are bit patterns, as unsigned integers of their element size; `Dtype` says what they hold.

The byte layout stands in `container.py` and `docs/weight-format.md`, the kinds of elements in
`dtypes.py`, the coding of numbers in `rice.py`, of values in `ulp.py`, the grouping by exponent in
`classes.py`, all three together in `portable.py` (numpy) and `delta.c` (compiled; the same bytes),
and the choice among codecs in `predict.py` and `codec.py`. Memory that a thread works in is kept
from call to call by `scratch.py`; checks are taken along the way, by the chunks of `checks.py`, so
that an array is read from memory once. A slow reader written apart from all this, in plain
Python, is `tests/golden/delta_reader.py`.

To add a codec: a member of `Codec`, its coding beside `portable.py` or `planes.py`, its predicted
size in `predict.py`, a case in the reference. To add a kind of elements: a row in `dtypes.py`.
"""

from penstock.kernels.delta.codec import apply, decode, encode, encode_with, fold
from penstock.kernels.delta.container import checksum, read_header
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import Codec, Header
from penstock.kernels.delta.many import decode_many, encode_many
from penstock.kernels.delta.patches import Patch, apply_into, compose

__all__ = [
    "Codec",
    "Dtype",
    "Header",
    "Patch",
    "apply",
    "apply_into",
    "checksum",
    "compose",
    "decode",
    "decode_many",
    "encode",
    "encode_many",
    "encode_with",
    "fold",
    "read_header",
]
