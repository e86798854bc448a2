"""The AsyncAPI document names every message once, and every reference leads somewhere."""

import importlib
import json
import pkgutil

from penstock import messages
from penstock.messages.base import Event, Message, Stream
from penstock.messages.codec import MESSAGES
from penstock.messages.reading.asyncapi import document


def references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def kinds(base):
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_message_is_one_that_the_codec_decodes():
    for module in pkgutil.walk_packages(messages.__path__, f"{messages.__name__}."):
        importlib.import_module(module.name)
    product = {kind for kind in kinds(Message) if kind.__module__.startswith("penstock.")}
    assert product - {Event} == set(MESSAGES)


def test_every_message_is_on_one_channel():
    channels = document()["channels"]
    named = [name for channel in channels.values() for name in channel["messages"]]
    assert sorted(named) == sorted(kind.__name__ for kind in MESSAGES)
    assert channels.keys() == {*Stream, "rpc"}


def test_every_reference_resolves():
    full = json.loads(json.dumps(document()))
    for reference in references(full):
        node = full
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
        assert node
