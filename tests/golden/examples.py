"""One example of every message, made from its fields' types alone."""

from typing import Any

import msgspec
import numpy as np

from penstock.messages.base import Array, Message

_info = msgspec.inspect


def example(message_type: type[Message]) -> Message:
    """Return the same message every time; every field differs from its default where it can."""
    return _value(_info.type_info(message_type), message_type.__name__)


SCALARS = {
    _info.BoolType: lambda name: True,
    _info.IntType: len,
    _info.FloatType: lambda name: len(name) + 0.5,
    _info.StrType: str,
    _info.BytesType: lambda name: name.encode() + b"\x00\xff",
}


def _value(info: _info.Type, name: str) -> Any:
    if isinstance(info, _info.FloatType) and info.le is not None:
        return min(info.le / 2, len(name) + 0.5)
    if type(info) in SCALARS:
        return SCALARS[type(info)](name)
    match info:
        case _info.EnumType(cls=cls):
            return list(cls)[-1]
        case _info.UnionType(types=types):
            return _value(next(t for t in types if not isinstance(t, _info.NoneType)), name)
        case _info.ListType(item_type=item):
            return [_value(item, name)]
        case _info.VarTupleType(item_type=item):
            return (_value(item, name),) * 2
        case _info.TupleType(item_types=items):
            return tuple(_value(item, name) for item in items)
        case _info.DictType(key_type=key, value_type=value):
            return {_value(key, name): _value(value, name)}
        case _info.StructType(cls=cls) if cls is Array:
            values = np.arange(len(name), dtype="<i4")
            return Array(dtype="int32", shape=values.shape, data=values.tobytes())
        case _info.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _value(field.type, field.name) for field in fields})
    raise NotImplementedError(f"{name}: {info}")
