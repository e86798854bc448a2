"""Opens the egress proxy of one machine, at most once, and gives access to its record."""

import asyncio
import logging
from collections.abc import Sequence

from penstock.envs.egress.account import EgressLimits
from penstock.envs.egress.proxy import EgressProxy, Resolve
from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.egress.streams import GuestLine, GuestStreams
from penstock.envs.microvm.protocol import GuestRequest
from penstock.envs.sandbox import SandboxRequestError
from penstock.messages.rollout import EgressAttempt

log = logging.getLogger(__name__)

PORT = 3128
"""Port in the guest on which programs reach the proxy; 3128 is the custom for HTTP proxies."""
OPEN_S_MAX = 10.0
_URL = f"http://127.0.0.1:{PORT}"
_LOCAL = "localhost,127.0.0.1"
ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _LOCAL),
}
"""Proxy variables set for programs whose task may reach hosts; most programs respect them."""


class EgressOutlet:
    """Network access of one machine, closed until `open` is called.

    Args:
        line: Connection to the guest agent.
        limits: Limits of the machine; defaults to `EgressLimits()`.
        resolve: Resolver from name and port to addresses; defaults to the host's resolver.

    """

    def __init__(
        self,
        line: GuestLine,
        limits: EgressLimits | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._line = line
        self._limits, self._resolve = limits or EgressLimits(), resolve
        self._rules: list[str] = []
        self._opening = asyncio.Lock()
        self._proxy: EgressProxy | None = None
        self._streams: GuestStreams | None = None

    async def open(self, rules: Sequence[str], *, allows_addresses: bool = False) -> None:
        """Let programs reach some hosts; a repeated call with the same rules does nothing.

        Args:
            rules: Allow-list in the format of `Task.egress`.
            allows_addresses: Whether rules may name an address; see `parse_rules`.

        Raises:
            SandboxRequestError: A rule is malformed or not allowed, other rules were set before, or
                the guest cannot listen.
            SandboxError: The machine failed.

        """
        # Requests may be delivered twice: the second one waits and then finds the proxy open.
        async with self._opening:
            if self._proxy is not None and self._rules == list(rules):
                return
            try:
                parsed = parse_rules(rules, allows_addresses=allows_addresses)
            except EgressRuleError as error:
                raise SandboxRequestError(str(error)) from error
            if self._proxy is not None:
                raise SandboxRequestError(f"the machine's allow-list is set already: {self._rules}")
            self._proxy = await self._listen(EgressProxy(parsed, self._limits, self._resolve))
            self._rules = list(rules)
            log.debug("egress opened to %s", ", ".join(self._rules))

    async def _listen(self, proxy: EgressProxy) -> EgressProxy:
        """Make the guest agent listen for a proxy; on failure the outlet stays closed."""
        streams = GuestStreams(self._line, proxy.serve)
        # Before the request: a program may connect before the agent's answer arrives.
        self._line.on_piece = streams.take
        try:
            await self._line.call(GuestRequest(op="listen", target=PORT), timeout_s=OPEN_S_MAX)
        except BaseException:
            self._line.on_piece = None
            await streams.close()
            raise
        self._streams = streams
        return proxy

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which programs find the proxy; empty while it is closed."""
        return ENVIRONMENT if self._proxy is not None else {}

    @property
    def attempts(self) -> list[EgressAttempt]:
        """Attempts of programs to reach hosts, allowed or not."""
        return self._proxy.account.attempts if self._proxy is not None else []

    async def close(self) -> None:
        """End every connection."""
        if self._streams is not None:
            await self._streams.close()
