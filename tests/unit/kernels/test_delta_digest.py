"""The element sum: the same by any cut, by any path, and after any update."""

import numpy as np
import pytest

from penstock.kernels.digest import element_sum, run_element_sum

WORD = 1 << 64


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_run_sums_to_its_elements_and_to_its_cuts(dtype):
    high = np.iinfo(dtype).max
    values = np.random.default_rng(0).integers(0, high, 5000, dtype, endpoint=True)
    whole = run_element_sum(7, values)
    assert whole == element_sum(np.arange(7, 5007), values)
    parts = [run_element_sum(7 + at, values[at : at + 1234]) for at in range(0, 5000, 1234)]
    assert sum(parts) % WORD == whole


def test_an_update_changes_the_sum_by_its_elements():
    values = np.random.default_rng(1).integers(0, 1 << 16, (40, 50), np.uint16)
    before, places = run_element_sum(0, values), np.array([3, 700, 1999])
    old = values.reshape(-1)[places]
    new = old ^ np.uint16(1)
    values.reshape(-1)[places] = new
    change = element_sum(places, new) - element_sum(places, old)
    assert run_element_sum(0, values) == (before + change) % WORD


def test_swapped_elements_and_zeros_have_other_sums():
    pair = np.array([1, 2], np.uint16)
    assert run_element_sum(0, pair) != run_element_sum(0, pair[::-1].copy())
    assert run_element_sum(0, np.zeros(1, np.uint16)) != run_element_sum(1, np.zeros(1, np.uint16))
    assert run_element_sum(0, np.zeros(0, np.uint16)) == 0
