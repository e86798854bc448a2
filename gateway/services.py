"""What the endpoints share."""

from collections import OrderedDict

from aiohttp import web

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.runtime.context import Context
from penstock.gateway.chat.prompt import ReplyMemory
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeyRing, KeySpec
from penstock.gateway.limits import RateLimiter
from penstock.gateway.metrics import GatewayMetrics
from penstock.messages.feedback import InferenceRecorded

NUM_REQUESTS_KNOWN_MAX = 100_000
REQUEST_ID = web.RequestKey("request_id", str)
EXTRA_HEADERS = web.RequestKey("extra_headers", dict[str, str])
"""Sent with the reply, whether it is one or an error."""


class RequestIndex:
    """Whose each recent request is, and which was the last of each session. Follows the log."""

    def __init__(self, num_max: int = NUM_REQUESTS_KNOWN_MAX) -> None:
        self._num_max = num_max
        self._key_ids: OrderedDict[str, str] = OrderedDict()
        self._last: OrderedDict[tuple[str, str], str] = OrderedDict()

    def add(self, event: InferenceRecorded) -> None:
        """Note a request; the oldest is forgotten."""
        self._key_ids[event.request_id] = event.key_id
        self._last[event.key_id, event.session_id] = event.request_id
        self._last.move_to_end((event.key_id, event.session_id))
        for table in (self._key_ids, self._last):
            if len(table) > self._num_max:
                table.popitem(last=False)

    def key_id_of(self, request_id: str) -> str | None:
        """Return the key that made a request, or None where it is not known."""
        return self._key_ids.get(request_id)

    def last_of(self, key_id: str, session_id: str) -> str | None:
        """Return the last request of a key's session, or None."""
        return self._last.get((key_id, session_id))


class Services:
    """The gateway's parts, handed to every endpoint."""

    def __init__(
        self, ctx: Context, config: GatewayConfig, tokenizer: Tokenizer, keys: KeyRing
    ) -> None:
        self.ctx = ctx
        self.config = config
        self.tokenizer = tokenizer
        self.keys = keys
        self.limiter = RateLimiter()
        self.metrics = GatewayMetrics()
        self.memory = ReplyMemory()
        self.index = RequestIndex()
        self.policy_version = -1
        """Newest version that a generator serves; -1 while none does."""
        self.num_chats = 0
        self.is_draining = False

    def admit_viewer(self, request: web.Request) -> None:
        """Let anyone on this machine see the run; anyone else needs a key.

        Raises:
            ApiError: 401.

        """
        if not self.config.is_local:
            self.authenticate(request)

    def authenticate(self, request: web.Request) -> KeySpec:
        """Return the key of a request.

        Raises:
            ApiError: 401.

        """
        key = self.keys.find(request.headers.get("Authorization", ""))
        if key is None:
            text = "expected the header 'Authorization: Bearer <key>' with a key of this gateway"
            raise ApiError(401, "invalid_api_key", text)
        return key
