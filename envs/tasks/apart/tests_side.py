"""Runs the tests of a commit as the verifier's user, with stand-ins for the code under test.

Runs in the guest: `python3 FILE tests.json`. The tests import the code as usual and get stand-ins
that send requests to `code_side.py`. Values come as copies, so that every comparison happens in
this process. An object that cannot be copied is a handle: its attributes and methods work, but it
cannot be compared.
"""

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import os
import socket
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.envs.tasks.apart.pipe import Pipe, PipeError
from penstock.envs.tasks.apart.stand_ins import CodeModule, Handle, UndecidedError, error_class

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class TestsSide(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins by number, and the import hook for modules of the code under test."""

    def __init__(self, line: Any, names: list[str], local: list[str], tree: Path) -> None:
        """Create the side.

        Args:
            line: File over the socket.
            names: Top-level modules of the code under test.
            local: Modules below them that belong to the tests.
            tree: Folder of the tests' modules.

        """
        self.pipe = Pipe(line, self)
        self._names, self._local, self._tree = frozenset(names), frozenset(local), tree
        self._handles: dict[int, Any] = {}
        self._functions: list[Any] = []

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the code under test."""
        if fullname.partition(".")[0] not in self._names or fullname in self._local:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        places = (self._tree, self._tree / "src")
        spec.submodule_search_locations = [
            str(one.joinpath(*fullname.split("."))) for one in places
        ]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> CodeModule:
        """Return the stand-in."""
        handle = self.pipe.ask("import", name=spec.name)
        module = CodeModule(spec.name)
        module.__dict__["_handle"] = handle
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has run on the other side."""

    def give(self, value: Any) -> Any:
        """Return the handle of a stand-in, or of a function for callbacks."""
        if isinstance(value, Handle):
            return {"mine": value._number}
        handle = getattr(value, "__dict__", {}).get("_handle")
        if isinstance(handle, Handle):
            return {"mine": handle._number}
        if not isinstance(value, _FUNCTIONS):
            raise UndecidedError(f"{type(value).__name__} cannot leave the tests")
        self._functions.append(value)
        return {"number": len(self._functions) - 1}

    def take(self, described: Any) -> Any:
        """Return the stand-in of a handle, or a function of these tests."""
        if "yours" in described:
            return self._functions[described["yours"]]
        number = described["number"]
        if number not in self._handles:
            handle = Handle(self, number)
            self._handles[number] = handle
            if "bases" in described:
                bases = [self.pipe.unpack(base) for base in described["bases"]]
                self._handles[number] = error_class(str(described["name"]), handle, bases)
        return self._handles[number]

    def describe_error(self, error: BaseException) -> Any:
        """Return only the text: the code under test gets no objects of the tests."""
        return {"text": str(error)}

    def reraise(self, described: Any) -> None:
        """Raise what the code under test raised."""
        kind = self.pipe.unpack(described["class"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise PipeError("raised what is no exception")
        args = [self.pipe.unpack(one) for one in described["args"]]
        if kind.__module__ == builtins.__name__:
            try:
                error = kind(*args)
            except Exception:
                error = kind.__new__(kind)
            raise error
        error = kind.__new__(kind)
        error.args = tuple(args)
        instance = Handle(self, described["number"])
        error.__dict__.update(_text=str(described["text"]), _instance=instance)
        raise error

    def serve(self, message: dict[str, Any]) -> Any:
        """Run a callback, the only request that the code under test may make."""
        if message["op"] != "call_back":
            raise PipeError(f"the code under test may not ask for {message['op']}")
        function = self._functions[message["number"]]
        args, kwargs = self.pipe.unpack(message["args"]), self.pipe.unpack(message["kwargs"])
        return function(*args, **kwargs)


def tests_of(name: str) -> Iterator[unittest.TestCase]:
    """Yield the test methods of a module, and its test functions without parameters."""
    module = importlib.import_module(name)
    for found in unittest.defaultTestLoader.loadTestsFromModule(module):
        yield from found  # type: ignore[misc]
    for key, value in sorted(vars(module).items()):
        is_test = key.startswith("test") and inspect.isfunction(value)
        if is_test and not inspect.signature(value).parameters:
            yield unittest.FunctionTestCase(value, description=f"{name}.{key}")


def _label(test: unittest.TestCase) -> str:
    is_function = isinstance(test, unittest.FunctionTestCase)
    return (test.shortDescription() or "") if is_function else test.id()


def run_tests(modules: list[str]) -> list[str]:
    """Return a line per test: its name, and passed or failed."""
    lines: list[str] = []
    for name in modules:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                for test in tests_of(name):
                    outcome = unittest.TestResult()
                    test.run(outcome)
                    is_good = outcome.wasSuccessful() and not outcome.skipped
                    lines.append(f"{_label(test)} {'passed' if is_good else 'failed'}")
            except BaseException:
                lines.append(f"{name} failed")
    return lines


def _line(peer: list[str]) -> Any:
    # Outside of Penstock's machines nobody opened the socket: start the other side here.
    with contextlib.suppress(OSError):
        return socket.socket(fileno=3).makefile("rwb")
    ours, theirs = socket.socketpair()
    start = ["sh", "-c", f'exec "$@" 3<&{theirs.fileno()}', "peer", *peer]
    other = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    subprocess.Popen(start, cwd="/work", pass_fds=[theirs.fileno()], **other)
    theirs.close()
    return ours.makefile("rwb")


def main() -> None:
    """Run the tests that `tests.json` next to this file names, and print their results."""
    here = Path(__file__).resolve().parent
    asked = json.loads((here / "tests.json").read_text())
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(here / "tree"), str(here / "tree" / "src")]
    side = TestsSide(_line(asked["peer"]), asked["names"], asked["local"], here / "tree")
    sys.meta_path.insert(0, side)
    lines = run_tests(asked["modules"])
    if asked["wanted"]:
        found = dict(line.rsplit(" ", 1) for line in lines)
        lines = [f"{name} {found.get(name, 'failed')}" for name in asked["wanted"]]
    sys.__stdout__.write("\n".join(lines) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
    os._exit(0)


if __name__ == "__main__":
    main()
