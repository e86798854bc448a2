"""What changed between two versions of a flat array, and writing it over the old one."""

import numpy as np


def find_changes(base: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare bits [N] -> ascending positions int32 [C] and the target's bits there [C]."""
    positions = np.flatnonzero(base != target).astype(np.int32)
    return positions, target[positions]


def write_changes(bits: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
    """Overwrite bits [N] at positions [C], in place."""
    bits[positions] = values
