"""Syntax of object keys, the same in every store."""

import re

from penstock.messages.errors import ConfigError

_KEY = re.compile(r"(?!\.)[A-Za-z0-9._=+\-]+(/(?!\.)[A-Za-z0-9._=+\-]+)*")


def is_key(key: str) -> bool:
    """Return whether a name is a valid object key."""
    # Names with a leading dot are not: `..` would escape the folder, and temporary files have one.
    return _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` after checking that it is a valid object key.

    Raises:
        ConfigError: The key is not valid.

    """
    if not is_key(key):
        raise ConfigError(
            f"object key: expected names of letters, digits, '._=+-' joined by '/', got {key!r}"
        )
    return key
