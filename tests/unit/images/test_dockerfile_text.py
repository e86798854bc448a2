"""Dockerfiles and ignore files as texts."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.microvm.oci.dockerfile import (
    DockerfileError,
    expand,
    pairs,
    parse_dockerfile,
    words,
)
from penstock.envs.microvm.oci.ignore import IgnoreError, ignored, matching


def names(text):
    return [(one.line, one.name, one.text) for one in parse_dockerfile(text.encode())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\r\nRUN b \\\r\n  c\r\n", [(1, "FROM", "a"), (2, "RUN", "b   c")]),
        ("\ufefffrom a", [(1, "FROM", "a")]),
        ("# x\n\nFROM a\nRUN b \\\n# no\n\n  && c", [(3, "FROM", "a"), (4, "RUN", "b   && c")]),
        ("# escape=`\nFROM a\nRUN c:\\ `\n d", [(2, "FROM", "a"), (3, "RUN", "c:\\  d")]),
        ("ARG V=1\nFROM a:$V", [(1, "ARG", "V=1"), (2, "FROM", "a:$V")]),
        ("FROM a\nRUN b # no comment", [(1, "FROM", "a"), (2, "RUN", "b # no comment")]),
    ],
)
def test_instructions_have_their_lines(text, expected):
    assert names(text) == expected


def test_documents_belong_to_their_instruction():
    run, copy, last = parse_dockerfile(
        b"FROM a\nRUN <<-EOF cat\n\tone\n\tEOF\nCOPY <<'A' <<B /x/\n$no\nA\n$yes\nB\nRUN c"
    )[1:]
    assert [(d.name, d.content, d.is_expanded) for d in run.heredocs] == [("EOF", "one\n", True)]
    assert [(d.name, d.content, d.is_expanded) for d in copy.heredocs] == [
        ("A", "$no\n", False), ("B", "$yes\n", True),
    ]  # fmt: skip
    assert (last.line, last.text) == (10, "c")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected FROM"),
        ("RUN a", "line 1: expected FROM"),
        ("FROM a\nRUM b", "line 2: 'RUM': expected an instruction"),
        ("FROM a\n\nRUN", "line 3: RUN: expected arguments"),
        ("FROM a\nRUN <<EOF\nx", "line 2: RUN: no end of <<EOF"),
        ("# escape=x\nFROM a", "escape"),
        ("FROM a\n" * 1001, "instructions"),
    ],
)
def test_a_malformed_text_is_refused_with_its_line(text, error):
    with pytest.raises(DockerfileError, match=error):
        parse_dockerfile(text.encode())


ENV = {"A": "1", "EMPTY": "", "SPACE": "x y"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A-${A}", "1-1"),
        ("${B:-d}${EMPTY:-d}${EMPTY-d}", "dd"),
        ("${A:+s}${B+s}", "s"),
        ("${B:-$A}", "1"),
        (r"\$A", r"\$A"),
        ("'$A' \"$A\"", "'$A' \"1\""),
        ("$$ $", "$$ $"),
    ],
)
def test_variables(text, expected):
    assert expand(parse_dockerfile(b"FROM a")[0], text, ENV) == expected


@pytest.mark.parametrize("text", ["${B:?wanted}", "${A/x/y}", "${A#x}"])
def test_a_form_that_is_not_built_is_refused(text):
    with pytest.raises(DockerfileError, match="line 1"):
        expand(parse_dockerfile(b"FROM a")[0], text, ENV)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("K=v L='a b' M=\"$A\"", {"K": "v", "L": "a b", "M": "1"}),
        ("K=$SPACE", {"K": "x y"}),
        ("K a  b $A", {"K": "a  b 1"}),
        (r"K=a\ b", {"K": "a b"}),
        ("K=", {"K": ""}),
        ("P=/x:$PATH", {"P": "/x:"}),
    ],
)
def test_pairs(text, expected):
    one = parse_dockerfile(f"FROM a\nENV {text}".encode())[1]
    assert pairs(one, ENV) == expected


@given(st.text(alphabet="FROM RUN\n\\#<'\"${}[]=-:aé\t\r`", max_size=200))
def test_any_text_is_read_or_refused(text):
    try:
        for one in parse_dockerfile(f"FROM a\nENV {text}".encode()):
            words(one, expand(one, one.text, ENV))
            pairs(one, ENV)
    except DockerfileError:
        pass


@pytest.mark.parametrize(
    ("text", "paths", "left"),
    [
        ("*.md\n!README.md", "a.md README.md d/a.md", "README.md d/a.md"),
        ("**/*.md", "a.md d/e/a.md b", "b"),
        ("node_modules", "node_modules/x a/node_modules/x", "a/node_modules/x"),
        ("**/node_modules/**", "node_modules/x a/node_modules/x y", "y"),
        ("d\n!d/keep", "d/x d/keep", "d/keep"),
        ("# c\n\n /a/ \nb?[0-9]", "a/x bx1 bxa", "bxa"),
        ("*", "a b/c", ""),
        ("**\n!src/**", "a src/b", "src/b"),
        ("a/../b", "a b", "a"),
        ("temp*/**/x", "temp1/x temp2/a/b/x temp1/y", "temp1/y"),
        ("\\#a", "#a b", "b"),
    ],
)
def test_ignore_files(text, paths, left):
    is_ignored = ignored(text)
    assert [path for path in paths.split() if not is_ignored(path)] == left.split()


def test_wildcards_of_sources():
    assert matching("*.t?t", ["a.txt", "d/b.txt", "c.md"]) == ["a.txt"]


def test_a_pattern_of_stars_takes_no_time():
    is_ignored = ignored("/".join(["**", "*a" * 40 + "b"] * 5))
    started = time.process_time()
    assert not is_ignored("/".join(["a" * 250] * 60))
    assert time.process_time() - started < 60


def test_too_many_patterns_are_refused():
    with pytest.raises(IgnoreError, match="patterns"):
        ignored("a\n" * 6000)
