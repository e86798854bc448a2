"""Opens the proxy of one machine, once, and keeps its record."""

import asyncio
from collections.abc import Sequence

from penstock.envs.egress.account import EgressLimits
from penstock.envs.egress.proxy import EgressProxy, Resolve
from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.egress.streams import GuestLine, GuestStreams
from penstock.envs.microvm.protocol import GuestRequest
from penstock.envs.sandbox import SandboxRequestError
from penstock.messages.rollout import EgressAttempt

PORT = 3128
OPEN_S_MAX = 10.0
_URL = f"http://127.0.0.1:{PORT}"
_LOCAL = "localhost,127.0.0.1"
ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _LOCAL),
}
"""Environment of programs whose task may reach hosts; most programs respect it."""


class EgressOutlet:
    """A machine's network access; closed until `open`.

    Args:
        line: To the guest agent.
        limits: Of the machine.
        resolve: Name and port to addresses; the host's own resolver by default.

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
        """Let programs reach some hosts; repeating it with the same ones changes nothing.

        Args:
            rules: As `Task.egress`.
            allows_addresses: See `parse_rules`.

        Raises:
            SandboxRequestError: A rule is malformed or not allowed, or others were set before, or
                the guest cannot listen.
            SandboxError: The machine failed.

        """
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

    async def _listen(self, proxy: EgressProxy) -> EgressProxy:
        """Have the guest agent listen for a proxy; one that does not leaves the outlet closed."""
        streams = GuestStreams(self._line, proxy.serve)
        self._line.on_piece = streams.take  # a program may be faster than the agent's answer
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
        """Variables that programs need to find the proxy; none while it is closed."""
        return ENVIRONMENT if self._proxy is not None else {}

    @property
    def attempts(self) -> list[EgressAttempt]:
        """What programs tried."""
        return self._proxy.account.attempts if self._proxy is not None else []

    async def close(self) -> None:
        """End every connection."""
        if self._streams is not None:
            await self._streams.close()
