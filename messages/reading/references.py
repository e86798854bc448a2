"""Own code that settings name as `module:name`: found where it is used, registered nowhere.

The module is imported from where Python finds it: installed, on PYTHONPATH, or in the folder that
the command runs in.
"""

import importlib
import re
import sys
from functools import cache
from pathlib import Path

from penstock.messages.errors import ConfigError
from penstock.messages.settings import REFERENCE

_REFERENCE = re.compile(REFERENCE)


def is_reference(text: str) -> bool:
    """Return whether a setting names own code rather than a part by its name."""
    return _REFERENCE.fullmatch(text) is not None


@cache
def load_reference(reference: str, field: str) -> object:
    """Return what a reference names.

    Args:
        reference: `module:name`.
        field: The setting, for the error.

    Raises:
        ConfigError: The module is not found, fails as it is imported, or has no such name.

    """
    module, _, name = reference.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # Whatever the module does as it is imported.
        text = f"expected a name of a module that can be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {reference!r}: {text}") from error
