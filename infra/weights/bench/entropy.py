"""The bound: how few bytes could say what changed, to one who holds the base."""

import numpy as np

from penstock.kernels.delta import Dtype
from penstock.kernels.delta.portable import ordered


def entropy_bound_bytes(base: np.ndarray, target: np.ndarray, kind: Dtype = Dtype.BF16) -> float:
    """Return the entropy of the mask and of the step, each given the base's exponent, in bytes.

    Args:
        base: [N] bit patterns.
        target: [N] bit patterns.
        kind: what they are.

    """
    traits = kind.traits
    shift, mask = base.dtype.type(traits.key_shift), base.dtype.type(traits.num_keys - 1)
    keys = ((base >> shift) & mask).astype(np.uint8)
    steps = ordered(target) - ordered(base) if traits.is_float else target - base
    bits = 0.0
    for key in np.unique(keys):
        _, counts = np.unique(steps[keys == key], return_counts=True)
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return bits / 8
