"""Random ids of requests, and pseudonyms of end users and sessions: no name is ever stored."""

import re
import secrets
from typing import Any, NamedTuple

from blake3 import blake3

from penstock.actors.runtime.vault import pseudonym_key
from penstock.gateway.errors import invalid
from penstock.gateway.keys import KeySpec
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

NAME_CHARS_MAX = 512
"""Maximum length of a user or session name that a client gives."""


def random_id(prefix: str) -> str:
    """Return an unguessable id.

    Feedback names requests by id, so knowing the id is evidence of having seen the reply.
    """
    return f"{prefix}-{secrets.token_hex(16)}"


_NUM_HEX_DIGITS = 32
"""Length of a pseudonym: 128 bits in hex."""
# Older releases of Claude Code join the parts with underscores; newer ones send a JSON object.
_JOINED_ID = re.compile(r"(user_.+?_account_.*?)_session_(.+)", re.DOTALL)


class ClientUser(NamedTuple):
    """End user and session in the user id of a client that sends both in one field."""

    user: str
    session: str = ""
    """Name of the session; empty if the id names none."""


def client_user(user_id: str) -> ClientUser:
    """Return user and session of a client's user id.

    Coding agents put the session into the user id. Taken whole, each of their sessions would count
    as another user, and caps, arms and erasure go by user.
    """
    # Before the pattern, whose time grows with the square of the length.
    if len(user_id) > NAME_CHARS_MAX:
        return ClientUser(user_id)
    if found := _JOINED_ID.fullmatch(user_id):
        return ClientUser(*found.groups())
    if not user_id.startswith("{"):
        return ClientUser(user_id)
    try:
        fields = parse_json(user_id, dict[str, Any], "user id")
    except CodecError:
        return ClientUser(user_id)
    session = fields.pop("session_id", "")
    # An account may have several devices; a device without an account stands for its user.
    names = [fields.get(name) for name in ("account_uuid", "user_id", "device_id")]
    user = next((name for name in names if isinstance(name, str) and name), "")
    if not user:
        return ClientUser(user_id)
    return ClientUser(user, session if isinstance(session, str) else "")


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
    return _pseudonym(secret, "user", tenant, client_user(name).user)


def _pseudonym(secret: bytes, kind: str, tenant: str, name: str) -> str:
    # JSON may contain lone surrogates, which strict UTF-8 refuses.
    text = "\0".join((kind, tenant, name)).encode("utf-8", "surrogatepass")
    return f"{kind[0]}-{blake3(text, key=pseudonym_key(secret)).hexdigest()[:_NUM_HEX_DIGITS]}"


def _check(name: str, kind: str) -> None:
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"expected at most {NAME_CHARS_MAX} characters", kind)
