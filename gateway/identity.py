"""Random ids of requests, and pseudonyms of end users and sessions: no name is ever stored."""

import secrets

from blake3 import blake3

from penstock.actors.runtime.vault import pseudonym_key
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
        """Use the master key of the service; all of its gateways share it."""
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

    def feedback(self, key: KeySpec, feedback_id: str) -> str:
        """Return the name on the log of a piece of feedback that its sender gave an id."""
        return _pseudonym(self._secret, "feedback", key.tenant, feedback_id)

    def import_id(self, key: KeySpec, user: str, session_id: str) -> str:
        """Return the id of a session that is imported: the same for every import of it."""
        return f"ses-{_pseudonym(self._secret, 'import', key.tenant, f'{user} {session_id}')}"

    def tool(self, tenant: str, name: str) -> str:
        """Return the name on the log of a tool that the client invented."""
        return _pseudonym(self._secret, "tool", tenant, name)

    def digest(self, *parts: bytes) -> str:
        """Return a keyed digest of a request."""
        digest = blake3(key=pseudonym_key(self._secret))
        for part in parts:
            # With its length: ("ab", "c") must differ from ("a", "bc").
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:_NUM_HEX_DIGITS]


def user_pseudonym(secret: bytes, tenant: str, name: str) -> str:
    """Return the pseudonym of an end user of a tenant."""
    return _pseudonym(secret, "user", tenant, name)


def _pseudonym(secret: bytes, kind: str, tenant: str, name: str) -> str:
    # JSON may contain lone surrogates, which strict UTF-8 refuses.
    text = "\0".join((kind, tenant, name)).encode("utf-8", "surrogatepass")
    return f"{kind[0]}-{blake3(text, key=pseudonym_key(secret)).hexdigest()[:_NUM_HEX_DIGITS]}"


def _check(name: str, kind: str) -> None:
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"expected at most {NAME_CHARS_MAX} characters", kind)
