"""Which hosts a task's programs may reach. Pure: text in, a decision out.

A rule is `name:port`, or `*.name:port` for whatever lies below a name, or `name:port@address` for a
host of a private network. Names are compared as they are written, in lower case: an address in any
notation, a user, a trailing dot or a letter outside of ASCII is refused rather than understood.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import msgspec

from penstock.messages.errors import PenstockError

RULES_MAX = 64
NAME_CHARACTERS_MAX = 253
OPT_IN = "sandbox_host.egress_addresses = true (penstock tasks: --egress-addresses)"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")
"""The last label begins with a letter: no notation of an IPv4 address does."""
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
"""This network, private, carriers', own, link, protocols' (192.0.0.192 is Oracle's metadata),
documentation, relays', benchmarks', groups', reserved; the last one is Azure's host."""
_GLOBAL_V6 = IPv6Network("2000::/3")
"""All that is anyone's: so no unique local, link, group, mapped or metadata address."""
_REFUSED_V6 = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
"""Protocols' (Teredo among them), documentation, 6to4: the latter lead to an IPv4 address."""


class EgressRuleError(PenstockError, ValueError):
    """A rule of an allow-list is malformed; the text names it."""


class EgressDeniedError(PenstockError, PermissionError):
    """A host may not be reached; the text says why."""


class EgressRule(msgspec.Struct, frozen=True):
    """One entry of an allow-list."""

    name: str
    """Without `*.`."""
    port: int
    is_below: bool = False
    """Names below `name`, and not itself."""
    address: str = ""
    """Its address; empty: resolved by the host, and public."""

    def fits(self, name: str, port: int) -> bool:
        """Return whether a target is meant."""
        is_named = name.endswith(f".{self.name}") if self.is_below else name == self.name
        return is_named and port == self.port


def parse_rules(texts: Iterable[str], *, allows_addresses: bool = False) -> tuple[EgressRule, ...]:
    """Return the rules of an allow-list.

    Args:
        texts: One rule each.
        allows_addresses: Whether a rule may name an address, which then is not checked: the word
            of the hosts' operator, never of a task.

    Raises:
        EgressRuleError: One is malformed or not allowed, or they are too many.

    """
    rules = tuple(_parse_rule(text) for text in texts)
    for rule in rules:
        if rule.address and not allows_addresses:
            raise EgressRuleError(
                f"egress rule '{rule.name}:{rule.port}@{rule.address}': expected no address: "
                f"{OPT_IN} allows them"
            )
    if len(rules) > RULES_MAX:
        raise EgressRuleError(f"expected at most {RULES_MAX} rules, got {len(rules)}")
    return rules


def parse_target(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Split a requested `name:port`.

    Raises:
        EgressDeniedError: It is no name and port that a rule could mean.

    """
    name, colon, port = text.lower().partition(":")
    if not colon and default_port is not None:
        port = str(default_port)
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise EgressDeniedError("expected a host's name, not an address or a malformed name")
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        raise EgressDeniedError("expected a port from 1 to 65535")
    return name, int(port)


def find_rule(rules: Iterable[EgressRule], name: str, port: int) -> EgressRule:
    """Return the first rule that allows a target.

    Raises:
        EgressDeniedError: None does.

    """
    for rule in rules:
        if rule.fits(name, port):
            return rule
    raise EgressDeniedError("not on the allow-list")


def check_addresses(addresses: Iterable[str]) -> None:
    """Check that all addresses of a name are public: it may lead to the host itself.

    Raises:
        EgressDeniedError: An address is private, local, reserved or of a group.

    """
    for text in addresses:
        if not _is_public(ip_address(text)):
            raise EgressDeniedError("the name leads to an address that is not public")


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
        raise EgressRuleError(f"egress rule {text!r}: one address stands for one name")
    return EgressRule(name, port, is_below, address)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address, or the one that a gateway would take out of it, is anyone's."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address in _NAT64:
        return _is_public(IPv4Address(address.packed[-4:]))
    if address.ipv4_mapped is not None:
        return _is_public(address.ipv4_mapped)
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)
