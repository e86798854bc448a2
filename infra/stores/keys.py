"""What an object's key looks like, in every store."""

import re

from penstock.messages.errors import ConfigError

_KEY = re.compile(r"(?!\.)[A-Za-z0-9._=+\-]+(/(?!\.)[A-Za-z0-9._=+\-]+)*")


def is_key(key: str) -> bool:
    """Return whether a name is one; names with a leading dot are not: `..`, temporary files."""
    return _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` if it is one.

    Raises:
        ConfigError: It is not.

    """
    if not is_key(key):
        raise ConfigError(
            f"object key: expected names of letters, digits, '._=+-' joined by '/', got {key!r}"
        )
    return key
