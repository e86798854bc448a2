"""Attacks on the gateway meet the site of its own tests."""

from tests.e2e.gateway.conftest import bus, site, tokenizer

__all__ = ["bus", "site", "tokenizer"]
