"""User code that settings name as `module:name`, imported when it is first used.

The module must be installed, on PYTHONPATH, or in the current folder.
"""

import importlib
import logging
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import REFERENCE

T = TypeVar("T")
log = logging.getLogger(__name__)

_REFERENCE = re.compile(REFERENCE)
_PATH = re.compile(r" - at `\$([^`]*)`$")


def is_reference(text: str) -> bool:
    """Return whether a setting refers to user code rather than naming a built-in part."""
    return _REFERENCE.fullmatch(text) is not None


@cache
def load_reference(reference: str, field: str) -> object:
    """Import and return the object that a reference names.

    Args:
        reference: `module:name`.
        field: Name of the setting, for the error text.

    Raises:
        ConfigError: The module cannot be found or imported, or has no such name.

    """
    module, _, name = reference.partition(":")
    folder = str(Path.cwd())
    # Last, so that a user's file cannot shadow an installed module.
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        loaded = importlib.import_module(module)
        value = getattr(loaded, name)
    except Exception as error:  # A user's module may raise anything on import.
        text = f"expected a name in a module that can be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {reference!r}: {text}") from error
    # Name the file: another module of the same name may be installed. Built-in ones have none.
    log.info("%s: using %s from %s", field, reference, getattr(loaded, "__file__", module))
    return value


def read_settings(given: Mapping[str, Any], kind: type[T], field: str) -> T:
    """Return the settings of own code as a struct of that code's.

    Args:
        given: The table, as the configuration has it.
        kind: A `msgspec.Struct`; a `ConfigError` of its `__post_init__` begins with the key.
        field: Where the table stands, for errors.

    Raises:
        ConfigError: A key is unknown or its value wrong; the text names it below `field`.

    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        where = field + (found[1] if found else "")
        says_key = isinstance(error.__cause__, ConfigError)
        text = f"{where}{'.' if says_key else ': '}{_PATH.sub('', text)}"
        raise ConfigError(text) from error
