"""Which targets an allow-list lets through, and the ways to disguise one."""

import pytest

from penstock.envs.egress.proxy import requested_target
from penstock.envs.egress.rules import (
    EgressDeniedError,
    EgressRule,
    EgressRuleError,
    check_addresses,
    find_rule,
    parse_rules,
    parse_target,
)

RULES = parse_rules(
    ["pypi.test:443", "*.files.test:80", "mirror.test:8080@10.0.0.5"], allows_addresses=True
)


def test_rules_say_name_port_and_place():
    assert (
        EgressRule("pypi.test", 443),
        EgressRule("files.test", 80, is_below=True),
        EgressRule("mirror.test", 8080, address="10.0.0.5"),
    ) == RULES


@pytest.mark.parametrize(
    "text",
    ["", "pypi.test", "pypi.test:0", "pypi.test:99999", "1.2.3.4:80", "[::1]:80", "*:443",
     "a..b:80", "x.test:80@name", "*.x.test:80@10.0.0.1", "http://x.test:80", "ü.test:80"],
)  # fmt: skip
def test_a_malformed_rule_is_named(text):
    with pytest.raises(EgressRuleError, match="egress rule"):
        parse_rules([text], allows_addresses=True)


@pytest.mark.parametrize("address", ["169.254.169.254", "127.0.0.1", "10.0.0.1", "93.184.215.14"])
def test_an_address_is_the_operators_to_allow(address):
    with pytest.raises(
        EgressRuleError, match=rf"x.test:80@{address}.*sandbox_host.egress_addresses"
    ):
        parse_rules([f"x.test:80@{address}"])


def test_rules_are_bounded():
    with pytest.raises(EgressRuleError, match="at most 256"):
        parse_rules(f"h{number}.test:443" for number in range(257))


@pytest.mark.parametrize(
    ("name", "port"),
    [("pypi.test", 443), ("a.files.test", 80), ("a.b.files.test", 80), ("mirror.test", 8080)],
)
def test_what_a_rule_names_is_let_through(name, port):
    assert find_rule(RULES, name, port) in RULES


@pytest.mark.parametrize(
    ("name", "port"),
    [("pypi.test", 80), ("evil.test", 443), ("notpypi.test", 443), ("pypi.test.evil.test", 443),
     ("a.pypi.test", 443), ("files.test", 80), ("evilfiles.test", 80)],
)  # fmt: skip
def test_what_no_rule_names_is_denied(name, port):
    with pytest.raises(EgressDeniedError, match="not on the allow-list"):
        find_rule(RULES, name, port)


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:443", "2130706433:443", "0x7f000001:443", "0x7f.1:443", "0177.0.0.1:443",
     "127.1:443", "[::1]:443", "::1:443", "[::ffff:127.0.0.1]:443", "pypi.test.:443",
     "pypi.test:443:80", "user@pypi.test:443", "pypi.test\u3002evil:443", "pypi%2etest:443",
     "pypi.test:+443", "pypi.test:0443", "pypi.test:443\r\nx: y", " pypi.test:443", "",
     ":443", "a" * 300 + ":443", "\u0440ypi.test:443"],
)  # fmt: skip
def test_a_disguised_target_is_refused_and_not_understood(text):
    with pytest.raises(EgressDeniedError):
        requested_target("CONNECT", text)


@pytest.mark.parametrize(
    "text",
    ["http://pypi.test@evil.test/", "http://evil.test\\@pypi.test/", "http://127.0.0.1:80/",
     "http://[::1]/", "https://pypi.test/", "ftp://pypi.test/", "file:///etc/passwd", "/etc/passwd",
     "//pypi.test/", "*", "http://[bad/", "http://pypi.test:80:80/"],
)  # fmt: skip
def test_a_disguised_address_is_refused(text):
    with pytest.raises(EgressDeniedError):
        requested_target("GET", text)


def test_an_address_is_split_into_host_and_path():
    assert requested_target("GET", "http://A.files.test/x/y?q=1#f") == (
        "a.files.test",
        80,
        "/x/y?q=1",
    )
    assert requested_target("POST", "http://mirror.test:8080") == ("mirror.test", 8080, "/")
    assert requested_target("GET", "HTTP://a.test/a?") == ("a.test", 80, "/a?")
    assert requested_target("GET", "http://a.test?q=1") == ("a.test", 80, "/?q=1")
    assert parse_target("PyPI.test:443") == ("pypi.test", 443)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1",
     "fd00::1", "::ffff:127.0.0.1", "224.0.0.1", "100.64.0.1", "64:ff9b::a9fe:a9fe",
     "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "::127.0.0.1", "::", "fec0::1",
     "fe80::1%eth0", "2001:0:7f00:1::", "240.0.0.1", "ff0e::1"],
)  # fmt: skip
def test_a_name_that_leads_inside_is_denied(address):
    with pytest.raises(EgressDeniedError, match="not public"):
        check_addresses(["93.184.215.14", address])


def test_a_name_that_leads_outside_passes():
    check_addresses(["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
    check_addresses(["64:ff9b::5db8:d70e"])  # where names are translated for hosts without IPv4
