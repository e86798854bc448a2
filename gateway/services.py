"""State that all endpoints share: configuration, keys, limits, metrics and recent requests."""

import base64
import hmac
import ipaddress
import re
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from aiohttp import HttpVersion11, web

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.fair_table import FairTable
from penstock.actors.runtime.vault import Vault
from penstock.gateway.answering import EXTRA_HEADERS, GatewayMetrics
from penstock.gateway.arms import Arms
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.kept_responses import KeptResponses
from penstock.gateway.exchange.plan import Planner
from penstock.gateway.exchange.recorder import Recorder
from penstock.gateway.exchange.sessions import Sessions, Thread
from penstock.gateway.exchange.summaries import Summaries
from penstock.gateway.fates import FeedbackFates
from penstock.gateway.identity import Pseudonyms
from penstock.gateway.keys import KeyRing, KeySpec
from penstock.gateway.limits import KeyLimits, LocalLimits, SharedLimits
from penstock.gateway.record import RecordTerms
from penstock.messages.errors import PenstockError
from penstock.messages.feedback import InferenceCounted, InferenceRecorded, owner_of
from penstock.messages.signals.declaration import SignalSpec, by_name
from penstock.messages.task import Purpose

PAGE_COOKIE = "penstock_page"
_NUM_BROWSERS_MAX = 64
NUM_REQUESTS_KNOWN_MAX = 100_000
"""Maximum recent requests, and sessions, whose owner is kept in memory."""
_LOCAL_HOST = re.compile(
    r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII
)
"""`Host` headers of clients that address this host by a loopback name."""
_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
THREAD = web.RequestKey("thread", Thread)


def is_same_host(request: web.Request) -> bool:
    """Return whether a request comes directly from this host and addresses it as loopback.

    Behind a proxy every client has a loopback address. A page of another site may reach this host
    through DNS, but its requests carry the name of that site.
    """
    # Browsers do not speak HTTP/1.0, but nginx does by default, and without any proxy header.
    if request.version < HttpVersion11 or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    try:
        is_loopback = ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        return False
    name = _LOCAL_HOST.fullmatch(request.headers.get("Host", ""))
    return is_loopback and name is not None


class PageDoor:
    """Browsers that came with the code of a link to the page; a code opens it once."""

    def __init__(self, on_code: Callable[[str], None]) -> None:
        self._on_code, self._code = on_code, ""
        self._browsers: deque[str] = deque(maxlen=_NUM_BROWSERS_MAX)

    def renew(self) -> None:
        """Make the code of the next link."""
        self._code = secrets.token_hex(16)
        self._on_code(self._code)

    def enter(self, code: str) -> str:
        """Return the cookie of a browser with a code that is valid; empty for another."""
        if not self._code or not hmac.compare_digest(code.encode(), self._code.encode()):
            return ""
        self._browsers.append(secrets.token_hex(16))
        self.renew()
        return self._browsers[-1]

    def knows(self, cookie: str) -> bool:
        """Return whether a browser entered."""
        return any(hmac.compare_digest(cookie.encode(), one.encode()) for one in self._browsers)


def _password(encoded: str) -> str:
    """Return the password of HTTP basic credentials; "" if they are malformed."""
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a request."""

    tenant: str
    user: str
    """Pseudonym of the end user."""
    is_stored: bool = True
    """Whether the content of the request is stored, and not only counts."""


class RequestIndex:
    """Owners of recent requests and the last request of each session, from the log."""

    def __init__(self, num_max: int = NUM_REQUESTS_KNOWN_MAX) -> None:
        self._owners: FairTable[str, Owner] = FairTable(num_max, lambda _, owner: owner.tenant)
        self._last: FairTable[tuple[str, str, str], str] = FairTable(num_max, lambda key, _: key[0])
        """Last request by tenant, user and session."""
        self._users: FairTable[tuple[str, str], str] = FairTable(num_max, lambda key, _: key[0])
        """The user of a session by tenant and session; "" if several users have one of the name."""

    def add(self, event: InferenceRecorded) -> None:
        """Add a request from the log."""
        self.put(event.request_id, _owner(event), event.session_id)

    def put(self, request_id: str, owner: Owner, session_id: str) -> None:
        """Add a request and make it the last one of its session."""
        self._owners[request_id] = owner
        self._last[owner.tenant, owner.user, session_id] = request_id
        name = (owner.tenant, session_id)
        self._users[name] = owner.user if self._users.get(name, owner.user) == owner.user else ""

    def add_counted(self, event: InferenceCounted) -> None:
        """Add a request from the log of which only counts are stored: no user, no session."""
        # The gateway that served the request knows its user: keep what it has.
        if event.request_id not in self._owners:
            self._owners[event.request_id] = _owner(event)

    def know(self, event: InferenceRecorded | InferenceCounted) -> Owner:
        """Add a request that was looked up on the log; return its owner."""
        # Not the last request of its session: later ones may be on the log.
        owner = _owner(event)
        self._owners[event.request_id] = owner
        return owner

    def owner_of(self, request_id: str) -> Owner | None:
        """Return who made a request; None if it is not known yet or was forgotten."""
        return self._owners.get(request_id)

    def last_of(self, tenant: str, user: str, session_id: str) -> str | None:
        """Return the id of the last request in a user's session; None if none is known."""
        return self._last.get((tenant, user, session_id))

    def user_of(self, tenant: str, session_id: str) -> str | None:
        """Return whose session it is; "" if several users have one, None if nobody is known to."""
        return self._users.get((tenant, session_id))

    def forget(self, tenant: str, user: str) -> None:
        """Forget the sessions of a user."""
        for key in [key for key in self._last if key[:2] == (tenant, user)]:
            del self._last[key]
        for name in [name for name, one in self._users.items() if (name[0], one) == (tenant, user)]:
            del self._users[name]


def _owner(event: InferenceRecorded | InferenceCounted) -> Owner:
    if isinstance(event, InferenceCounted):
        return Owner(tenant=event.tenant, user=f"k-{event.key_id}", is_stored=False)
    return Owner(tenant=event.tenant, user=event.user)


class Services:
    """The parts of one gateway, passed to every endpoint."""

    saved = ("index", "fates", "arms")

    def __init__(  # noqa: PLR0913 - the same independent inputs as the actor's
        self,
        ctx: Context,
        config: GatewayConfig,
        chat_format: ChatFormat,
        keys: KeyRing,
        *,
        secret: bytes,
        spool: Path,
        signals: Sequence[SignalSpec],
        summary: SummaryConfig,
        public_tools: Collection[str],
        on_code: Callable[[str], None],
    ) -> None:
        self.ctx = ctx
        self.door = PageDoor(on_code)
        self.config = config
        self.chat_format = chat_format
        self.keys = keys
        self.pseudonyms = Pseudonyms(secret)
        self.vault = Vault(ctx.store, secret)
        terms = RecordTerms(self._key_of, self.pseudonyms, public_tools)
        self.recorder = Recorder(ctx, config, self.vault, spool, terms)
        self.limits: KeyLimits = (
            SharedLimits(ctx, config.request_s_max)
            if config.is_one_of_several
            else LocalLimits(ctx.monotonic)
        )
        self.metrics = GatewayMetrics()
        self.planner = Planner(config, chat_format)
        self.sessions = Sessions()
        self.summary = summary
        self.summaries = Summaries()
        self.responses = KeptResponses()
        self.index = RequestIndex()
        self.signals = by_name(signals)
        self.fates = FeedbackFates()
        self.replicas = ReplicaTable()
        self.arms = Arms(config.channel)
        self.num_chats = 0
        self.is_draining = False

    def _key_of(self, key_id: str) -> KeySpec | None:
        return self.keys.by_id.get(key_id)

    @property
    def policy_version(self) -> int:
        """Newest policy version that a replica serves to users; -1 if there is none."""
        ready = self.replicas.ready(Purpose.LIVE, self.config.channel)
        return max((replica.policy_version for replica in ready), default=-1)

    @property
    def not_ready(self) -> str:
        """Why chat requests cannot be answered; empty if they can."""
        if self.is_draining:
            return "the gateway is stopping"
        return "" if self.policy_version >= 0 else "no generator serves a policy yet"

    async def owner_of(self, request_id: str) -> Owner | None:
        """Return who made a request; None if it is not on the log.

        Raises:
            PenstockError: The log does not answer.

        """
        if (known := self.index.owner_of(request_id)) is not None:
            return known
        # The index forgets old requests, and after a restart it may not have read them yet.
        found = await self.ctx.last(InferenceRecorded, request_id)
        if found is None:
            found = await self.ctx.last(InferenceCounted, request_id)
        return self.index.know(found) if found is not None else None

    async def num_erasures(self, tenant: str, user: str) -> int:
        """Return how often a user was erased; the number known so far if the store is away."""
        owner = owner_of(tenant, user)
        try:
            return await self.vault.num_erasures(owner)
        except (PenstockError, OSError):
            return self.vault.num_erasures_known(owner)

    def forget(self, tenant: str, user: str) -> None:
        """Forget what this process has in memory of a user who is erased."""
        self.vault.forget(owner_of(tenant, user))
        self.planner.memory.forget((tenant, user))
        self.sessions.forget((tenant, user))
        self.summaries.forget((tenant, user))
        self.responses.forget((tenant, user))
        self.index.forget(tenant, user)

    def admit_viewer(self, request: web.Request) -> None:
        """Admit viewers of the run: by operator key, or on this host by the link that it prints.

        A browser asks for the key in its password dialog.

        Raises:
            ApiError: 401, there is no valid key; 403, the key is not an operator's.

        """
        cookie = request.cookies.get(PAGE_COOKIE, "")
        if self.config.is_local and is_same_host(request) and self.door.knows(cookie):
            return
        try:
            self.admit_operator(request)
        except ApiError as error:
            # This header makes a browser show its dialog.
            if error.status == 401:
                request[EXTRA_HEADERS] = {"WWW-Authenticate": 'Basic realm="penstock"'}
            raise

    def admit_operator(self, request: web.Request) -> KeySpec:
        """Return the operator key of a request; requests from this host need one as well.

        Raises:
            ApiError: 401, there is no valid key; 403, the key is not an operator's.

        """
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            key = self.keys.find(f"Bearer {_password(given)}")
        else:
            key = self.keys.find(f"{scheme} {given}")
        if key is None:
            text = "expected an operator key, as bearer token or as password of basic credentials"
            raise ApiError(401, "invalid_api_key", text)
        if not key.operator:
            text = "only operators may see all tenants: expected a key with operator = true"
            raise ApiError(403, "not_an_operator", text)
        return key

    def authenticate(self, request: web.Request) -> KeySpec:
        """Return the key of a request.

        Raises:
            ApiError: 401, there is no valid key.

        """
        given = request.headers.get("Authorization", "")
        # Anthropic's clients send the key in `x-api-key`.
        if not given and (secret := request.headers.get("x-api-key", "")):
            given = f"Bearer {secret}"
        key = self.keys.find(given)
        if key is None:
            text = "expected the header 'Authorization: Bearer <key>' with a key of this gateway"
            raise ApiError(401, "invalid_api_key", text)
        return key
