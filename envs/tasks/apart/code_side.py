"""The code under test, as the agent's user: serves requests of the tests, without seeing them.

Runs in the guest: `python3 -c TEXT modules FOLDER...` serves the modules of folders,
`python3 -c TEXT commands` runs commands. The other side trusts only plain values from here, because
the code under test may have changed everything in this process.
"""

import builtins
import importlib
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.envs.tasks.apart.pipe import Pipe

_OUTPUT_BYTES_MAX = 1 << 20


class _Callback:
    """A function of the tests, which is called on their side."""

    def __init__(self, pipe: Pipe, number: int) -> None:
        self.pipe, self.number = pipe, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.pipe.ask("call_back", number=self.number, args=args, kwargs=kwargs)


class CodeSide:
    """The objects of the code under test by number, and the operations on them."""

    def __init__(self, line: Any) -> None:
        self.pipe = Pipe(line, self)
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}

    def _hold(self, value: Any) -> int:
        # `_held` keeps the object alive, so that its id cannot be reused.
        number = self._numbers.setdefault(id(value), len(self._held))
        if number == len(self._held):
            self._held.append(value)
        return number

    def give(self, value: Any) -> Any:
        """Return a handle; for an exception class, with its bases."""
        if isinstance(value, _Callback):
            return {"yours": value.number}
        described = {"number": self._hold(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [self.pipe.pack(base) for base in value.__bases__]
            described |= {"name": value.__name__, "bases": bases}
        return described

    def take(self, described: Any) -> Any:
        """Return an object of this side, or a function of the tests."""
        if "mine" in described:
            return self._held[described["mine"]]
        return _Callback(self.pipe, described["number"])

    def describe_error(self, error: BaseException) -> Any:
        """Return class, arguments and text."""
        try:
            args = [self.pipe.pack(one) for one in error.args]
        except BaseException:
            args = []
        kind = self.pipe.pack(type(error))
        return {"class": kind, "args": args, "text": str(error), "number": self._hold(error)}

    def reraise(self, described: Any) -> None:
        """Raise for a function of the tests that raised."""
        raise RuntimeError(f"the test's function raised {described.get('text')}")

    def serve(self, message: dict[str, Any]) -> Any:
        """Run one request."""
        take = self.pipe.unpack
        fields = [take(value) for name, value in message.items() if name != "op"]
        return _OPERATIONS[message["op"]](*fields)


def _special(of: Any, name: str, args: list[Any]) -> Any:
    # Looked up on the type, as the language does.
    method = getattr(type(of), name, None)
    if method is None:
        raise TypeError(f"{type(of).__name__} has no {name}")
    return method(of, *args)


def _run(argv: list[str], folder: str) -> list[Any]:
    done = subprocess.run(
        argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return [done.returncode, done.stdout[:_OUTPUT_BYTES_MAX], done.stderr[:_OUTPUT_BYTES_MAX]]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "import": importlib.import_module,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "call": lambda of, args, kwargs: of(*args, **kwargs),
    "special": _special,
    "builtin": lambda name, args: getattr(builtins, name)(*args),
    "run": _run,
}


def main() -> None:
    """Serve the socket at descriptor 3."""
    what, *folders = sys.argv[1:]
    line = socket.socket(fileno=3).makefile("rwb")
    if what == "modules":
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(Path(folder).resolve()) for folder in folders]
    CodeSide(line).pipe.serve_all()


if __name__ == "__main__":
    main()
