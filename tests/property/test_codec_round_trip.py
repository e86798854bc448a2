"""Every message survives the wire, for all values of its fields."""

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.messages.base import Array
from penstock.messages.codec import MESSAGES, decode, encode
from penstock.messages.errors import CodecError

_info = msgspec.inspect


SCALARS = {
    _info.NoneType: lambda _: st.none(),
    _info.BoolType: lambda _: st.booleans(),
    _info.StrType: lambda info: st.text(min_size=info.min_length or 0, max_size=8),
    _info.BytesType: lambda info: st.binary(min_size=info.min_length or 0, max_size=8),
}


def values(info: _info.Type) -> st.SearchStrategy[Any]:
    if isinstance(info, _info.IntType):
        low = -(2**63) if info.ge is None else info.ge
        return st.integers(low, 2**64 - 1 if info.le is None else info.le)
    if isinstance(info, _info.FloatType):
        low, is_open = (info.ge, False) if info.gt is None else (info.gt, True)
        return st.floats(low, info.le, allow_nan=False, exclude_min=is_open)
    if type(info) in SCALARS:
        return SCALARS[type(info)](info)
    match info:
        case _info.StructType(cls=cls) if cls is Array:
            return st.binary(max_size=8).map(
                lambda data: Array(dtype="uint8", shape=(len(data),), data=data)
            )
        case _info.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case _info.UnionType(types=types):
            return st.one_of(*map(values, types))
        case _info.ListType(item_type=item):
            return st.lists(values(item), max_size=2)
        case _info.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case _info.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case _info.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case _info.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise NotImplementedError(info)


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda m: m.__name__)
def test_round_trip(message_type):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(values(_info.type_info(message_type)))
    def check(message):
        data = encode(message)
        assert decode(data) == message
        assert msgpack.unpackb(data, strict_map_key=False)["type"] == message_type.__name__

    check()


@given(st.binary(max_size=64))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_bytes_decode_or_raise_a_codec_error(data):
    try:
        message = decode(data)
    except CodecError:
        return
    assert type(message) in MESSAGES
