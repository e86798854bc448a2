"""Stand-ins for objects of the code under test, on the tests' side.

Their attributes and methods work by requests over the socket. But they cannot be compared with
values, ordered, or subtracted: the code under test would answer yes to anything.
"""

import types
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.envs.tasks.apart.pipe import PipeError

_DIFFERENCES = ("sub", "rsub", "xor")
_OPERATORS = (
    *_DIFFERENCES,
    *("add", "radd", "mul", "rmul", "truediv", "floordiv", "mod", "pow", "divmod", "matmul"),
    *("and", "or", "lshift", "rshift"),
)
_FORWARDED = (
    *("len", "getitem", "setitem", "delitem", "next", "enter", "exit", "int", "float", "index"),
    *("neg", "invert", "abs", "round", *_OPERATORS),
)
_TELLING = ("__all__", "__version__")


class UndecidedError(TypeError):
    """Only the code under test could decide a comparison."""


class Handle:
    """Stand-in for an object of the code under test."""

    def __init__(self, side: Any, number: int) -> None:
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute."""
        return self._side.pipe.ask("get", of=self, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self._side.pipe.ask("set", of=self, name=name, value=value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute."""
        self._side.pipe.ask("delete", of=self, name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._side.pipe.ask("call", of=self, args=list(args), kwargs=kwargs)

    def __bool__(self) -> bool:
        """Request the truth value."""
        return self._builtin("bool") is True

    def __str__(self) -> str:
        """Request the text."""
        return str(self._builtin("str"))

    def __repr__(self) -> str:
        """Request the representation."""
        return str(self._builtin("repr"))

    def __iter__(self) -> Iterator[Any]:
        """Request the items."""
        found: Any = self._builtin("iter")
        return found if isinstance(found, Handle) else iter(found)  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        """Refuse to compare: the code under test would answer yes to anything."""
        if self is other:
            return True
        raise UndecidedError("objects of the code under test are compared by their values alone")

    def __hash__(self) -> int:
        """Return a hash that distinguishes handles."""
        return hash(self._number)

    def __instancecheck__(self, instance: object) -> bool:
        """Request whether an object is an instance of a class, both on the other side."""
        return isinstance(instance, Handle) and self._builtin("isinstance", instance) is True

    def _builtin(self, name: str, *before: Any) -> Any:
        return self._side.pipe.ask("builtin", name=name, args=[*before, self])


def _forward(name: str) -> Any:
    def special(self: Handle, *args: Any) -> Any:
        # An operator with a value of the tests would tell it to the code under test.
        has_test_value = name in _OPERATORS and not isinstance(args[0], Handle)
        if has_test_value and name in _DIFFERENCES:
            raise UndecidedError("the difference to a value of the tests is a comparison with it")
        answer = self._side.pipe.ask("special", of=self, name=f"__{name}__", args=list(args))
        if has_test_value and not isinstance(answer, Handle):
            raise UndecidedError("a value computed from one of the tests may be made to fit it")
        return answer

    return special


for _name in _FORWARDED:
    setattr(Handle, f"__{_name}__", _forward(_name))


class _ErrorKind(type):
    """Metaclass of stand-ins for exception classes, which `except` needs as real classes."""

    def __getattr__(cls, name: str) -> Any:
        handle = cls.__dict__.get("_handle")
        if handle is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(handle, name)


def _error_text(self: Any) -> str:
    return self.__dict__.get("_text", BaseException.__str__(self))


def _error_attribute(self: Any, name: str) -> Any:
    handle = self.__dict__.get("_instance")
    if handle is None or name.startswith("_"):
        raise AttributeError(name)
    return getattr(handle, name)


class CodeModule(types.ModuleType):
    """Stand-in for a module of the code under test."""

    def __getattr__(self, name: str) -> Any:
        """Request an attribute; those of the import system are local."""
        handle = self.__dict__.get("_handle")
        if handle is None or (name.startswith("__") and name not in _TELLING):
            raise AttributeError(name)
        return getattr(handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the other side; those of the import system are local."""
        if name.startswith("_") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_handle"], name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute on the other side."""
        delattr(self.__dict__["_handle"], name)


def error_class(name: str, handle: Handle, bases: Sequence[Any]) -> type:
    """Return the stand-in for an exception class; raises `PipeError` if it is not one."""
    known = tuple(one for one in bases if isinstance(one, type))
    if not any(issubclass(one, BaseException) for one in known):
        raise PipeError("no exception class")
    space = {
        "_handle": handle,
        "__str__": _error_text,
        "__getattr__": _error_attribute,
        "__init__": BaseException.__init__,
    }
    kinds = {type(one) for one in known} - {type}
    return (kinds.pop() if kinds else _ErrorKind)(name, known, space)
