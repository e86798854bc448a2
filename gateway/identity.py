"""Who asks, without names: random ids of requests, pseudonyms of end users and sessions."""

import secrets

from blake3 import blake3

from penstock.gateway.errors import invalid
from penstock.gateway.keys import KeySpec

NAME_CHARS_MAX = 512
_DIGITS = 32
"""Of a pseudonym, in hex: 128 bits."""


def random_id(prefix: str) -> str:
    """Return an id that nobody can guess: who knows a request's id has seen its reply."""
    return f"{prefix}-{secrets.token_hex(16)}"


class Pseudonyms:
    """Names that clients give, as keyed hashes: equal where tenant and name are, else unrelated."""

    def __init__(self, secret: bytes) -> None:
        """Take the service's secret, 32 bytes; all of its gateways have the same."""
        self._secret = secret

    def user(self, key: KeySpec, name: str) -> str:
        """Return the pseudonym of an end user, or of the key itself where none is named.

        Raises:
            ApiError: 400, the name is too long.

        """
        if not name:
            return f"k-{key.key_id}"
        _check(name, "user")
        return user_pseudonym(self._secret, key.tenant, name)

    def session(self, key: KeySpec, name: str) -> str:
        """Return the pseudonym of a session; raises as `user` does."""
        _check(name, "session")
        return _pseudonym(self._secret, "session", key.tenant, name)


def user_pseudonym(secret: bytes, tenant: str, name: str) -> str:
    """Return the pseudonym of a tenant's user."""
    return _pseudonym(secret, "user", tenant, name)


def _pseudonym(secret: bytes, what: str, tenant: str, name: str) -> str:
    text = "\0".join((what, tenant, name)).encode("utf-8", "surrogatepass")
    return f"{what[0]}-{blake3(text, key=secret).hexdigest()[:_DIGITS]}"


def _check(name: str, what: str) -> None:
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"expected at most {NAME_CHARS_MAX} characters", what)
