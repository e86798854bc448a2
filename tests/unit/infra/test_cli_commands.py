"""The command line names functions as text: every one of them exists."""

import argparse
import importlib

import pytest

from penstock.infra import cli


def commands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return `penstock ...` -> the function that it names, of all subcommands."""
    found = {}
    if command := parser.get_default("command"):
        found[parser.prog] = command
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= commands(child)
    return found


COMMANDS = commands(cli.make_parser())


def test_the_known_commands_are_found():
    assert {"penstock run", "penstock log", "penstock weights", "penstock tasks"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_function(name):
    module, _, function = COMMANDS[name].partition(":")
    assert callable(getattr(importlib.import_module(f"penstock.infra.{module}"), function))
