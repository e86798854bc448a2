"""The entry of the laboratory: its list, its programs, what it refuses."""

import inspect
import re

import pytest
from tests.lab.__main__ import PROGRAMS, load_program, main, make_parser


def test_without_a_name_every_program_is_listed_with_a_line(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROGRAMS)
    assert all(re.match(r"\S+ {2,}\S", line) for line in lines)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_a_function_and_a_parser(name):
    module = load_program(name)
    assert list(inspect.signature(module.run).parameters) in (["arguments"], ["_arguments"])
    assert make_parser(name, module).prog == f"python -m tests.lab {name}"


def test_an_unknown_program_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["wizardry"])
    assert "simulate-weights" in capsys.readouterr().err
