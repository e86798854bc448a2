"""Decides which hosts a task's programs may reach. Pure.

A rule is `name:port`, `*.name:port` for all subdomains of a name, or `name:port@address` for a host
of a private network. Names are compared as lower-case text without further interpretation: an IP
address in any notation, user information, a trailing dot and letters outside of ASCII are refused.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import msgspec

from penstock.messages.errors import PenstockError

RULES_MAX = 256
NAME_CHARACTERS_MAX = 253
OPT_IN = "sandbox_host.egress_addresses = true (penstock tasks: --egress-addresses)"
"""Setting that permits rules with an address, for error texts."""
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")
"""The last label must begin with a letter, which excludes every notation of an IPv4 address."""
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_NAT64 = IPv6Network("64:ff9b::/96")
_REFUSED_V4 = tuple(
    IPv4Network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",
    )
)
"""IPv4 networks that are not public: "this network", private, carrier-grade NAT, loopback,
link-local, protocol assignments (192.0.0.192 is Oracle's metadata service), documentation, 6to4
relays, benchmarking, multicast, reserved; the last one is Azure's host endpoint."""
_GLOBAL_V6 = IPv6Network("2000::/3")
"""Global unicast: excludes unique local, link-local, multicast, mapped and metadata addresses."""
_REFUSED_V6 = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
"""IPv6 networks within 2000::/3 that are not public: protocol assignments with Teredo,
documentation, and 6to4. Teredo and 6to4 lead to an embedded IPv4 address."""


class EgressRuleError(PenstockError, ValueError):
    """A rule of an allow-list is malformed; the error names it."""


class EgressDeniedError(PenstockError, PermissionError):
    """A host may not be reached; the error says why."""


class EgressRule(msgspec.Struct, frozen=True):
    """Entry of an allow-list."""

    name: str
    """Host name, without the `*.` of a wildcard."""
    port: int
    is_below: bool = False
    """Whether the rule means the subdomains of `name` instead of `name` itself."""
    address: str = ""
    """Fixed address of the host; empty: the name is resolved and must lead to a public address."""

    def fits(self, name: str, port: int) -> bool:
        """Return whether the rule allows a target."""
        is_named = name.endswith(f".{self.name}") if self.is_below else name == self.name
        return is_named and port == self.port


def parse_rules(texts: Iterable[str], *, allows_addresses: bool = False) -> tuple[EgressRule, ...]:
    """Return the rules of an allow-list.

    Args:
        texts: Rules, one per item.
        allows_addresses: Whether a rule may name an address, which is then not checked to be
            public. Only the operator of the hosts may permit this, never a task.

    Raises:
        EgressRuleError: A rule is malformed or not allowed, or there are too many rules.

    """
    rules = tuple(_parse_rule(text) for text in texts)
    for rule in rules:
        if rule.address and not allows_addresses:
            raise EgressRuleError(
                f"egress rule '{rule.name}:{rule.port}@{rule.address}': expected no address; "
                f"{OPT_IN} permits addresses"
            )
    if len(rules) > RULES_MAX:
        raise EgressRuleError(f"expected at most {RULES_MAX} egress rules, got {len(rules)}")
    return rules


def parse_target(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Split a requested `name:port` into lower-case name and port.

    Raises:
        EgressDeniedError: The text is not a name and port that a rule could allow.

    """
    name, colon, port = text.lower().partition(":")
    if not colon and default_port is not None:
        port = str(default_port)
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise EgressDeniedError("expected a host name, not an address or a malformed name")
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        raise EgressDeniedError("expected a port from 1 to 65535")
    return name, int(port)


def find_rule(rules: Iterable[EgressRule], name: str, port: int) -> EgressRule:
    """Return the first rule that allows a target.

    Raises:
        EgressDeniedError: No rule allows it.

    """
    for rule in rules:
        if rule.fits(name, port):
            return rule
    raise EgressDeniedError("not on the allow-list")


def check_addresses(addresses: Iterable[str]) -> None:
    """Check that all addresses of a name are public.

    Raises:
        EgressDeniedError: An address is private, local, reserved or multicast.

    """
    # The owner of an allowed name could point it at this host, its network or a metadata service.
    for text in addresses:
        if not _is_public(ip_address(text)):
            raise EgressDeniedError("the name resolves to an address that is not public")


def _parse_rule(text: str) -> EgressRule:
    target, at, address = text.partition("@")
    is_below = target.startswith("*.")
    try:
        name, port = parse_target(target[2:] if is_below else target)
        if at:
            ip_address(address)
    except ValueError as error:
        raise EgressRuleError(f"egress rule {text!r}: {error}") from error
    except EgressDeniedError as error:
        expected = "expected name:port, *.name:port or name:port@address"
        raise EgressRuleError(f"egress rule {text!r}: {expected}: {error}") from error
    if is_below and address:
        raise EgressRuleError(f"egress rule {text!r}: a wildcard cannot have an address")
    return EgressRule(name, port, is_below, address)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address, or the IPv4 address that it embeds, is public."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address in _NAT64:
        return _is_public(IPv4Address(address.packed[-4:]))
    if address.ipv4_mapped is not None:
        return _is_public(address.ipv4_mapped)
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)
