import numpy as np
import pytest

from penstock.kernels.arrays import from_array, to_array
from penstock.messages.base import Array


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 2), (2, 0, 4)])
def test_round_trip(dtype, shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    packed = to_array(values)
    assert (packed.dtype, packed.shape) == (dtype, shape)
    back = from_array(packed)
    assert back.dtype == values.dtype and np.array_equal(back, values)
    assert not back.flags.writeable


def test_strided_and_big_endian_arrays_travel_little_endian():
    values = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    packed = to_array(values)
    assert packed.data == np.ascontiguousarray(values).astype("<i4").tobytes()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (("int32", (3,), b"\0" * 8), "takes 12 bytes, got 8"),
        (("int32", (-1,), b""), "sizes >= 0"),
        (("object", (1,), b"\0" * 8), "expected one of uint8"),
    ],
)
def test_a_bad_array_is_refused(array, message):
    with pytest.raises(ValueError, match=message):
        Array(dtype=array[0], shape=array[1], data=array[2])


def test_a_dtype_that_does_not_travel_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        to_array(np.zeros(2, np.complex64))
