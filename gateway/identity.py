"""Random ids of requests, and pseudonyms of end users and sessions: no name is ever stored."""

import secrets

from blake3 import blake3

from penstock.gateway.errors import invalid
from penstock.gateway.keys import KeySpec

NAME_CHARS_MAX = 512
"""Maximum length of a user or session name that a client gives."""
_NUM_HEX_DIGITS = 32
"""Length of a pseudonym: 128 bits in hex."""


def random_id(prefix: str) -> str:
    """Return an unguessable id.

    Feedback names requests by id, so knowing the id is evidence of having seen the reply.
    """
    return f"{prefix}-{secrets.token_hex(16)}"


class Pseudonyms:
    """Keyed hashes of names: equal for the same tenant and name, otherwise unrelated."""

    def __init__(self, secret: bytes) -> None:
        """Use the master key of the service, 32 bytes; all of its gateways share it."""
        self._secret = secret

    def user(self, key: KeySpec, name: str) -> str:
        """Return the pseudonym of an end user; without a name, the key counts as the user.

        Raises:
            ApiError: 400, the name is too long.

        """
        if not name:
            return f"k-{key.key_id}"
        _check(name, "user")
        return user_pseudonym(self._secret, key.tenant, name)

    def session(self, key: KeySpec, name: str) -> str:
        """Return the pseudonym of a session.

        Raises:
            ApiError: 400, the name is too long.

        """
        _check(name, "session")
        return _pseudonym(self._secret, "session", key.tenant, name)


def user_pseudonym(secret: bytes, tenant: str, name: str) -> str:
    """Return the pseudonym of an end user of a tenant."""
    return _pseudonym(secret, "user", tenant, name)


def _pseudonym(secret: bytes, kind: str, tenant: str, name: str) -> str:
    # JSON may contain lone surrogates, which strict UTF-8 refuses.
    text = "\0".join((kind, tenant, name)).encode("utf-8", "surrogatepass")
    return f"{kind[0]}-{blake3(text, key=secret).hexdigest()[:_NUM_HEX_DIGITS]}"


def _check(name: str, kind: str) -> None:
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"expected at most {NAME_CHARS_MAX} characters", kind)
