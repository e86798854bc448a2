"""Texts of a policy that would hold up everybody: time grows with their length, not its square.

Each text is measured against one of an eighth of its size in the same thread: linear work takes
about 8 times as much of the processor's time, quadratic work 64 times. The best of several runs
counts, so that a busy host proves nothing.
"""

import time

import pytest

from penstock.actors.judge.audit import signs_of
from penstock.envs.egress.proxy import requested_target
from penstock.envs.egress.rules import EgressDeniedError
from penstock.envs.harness.files import changed_lines
from penstock.envs.harness.retrieval.index import cut
from penstock.envs.harness.retrieval.ranking import words
from penstock.envs.harness.tool_calls import InvalidCallError, checked_path
from penstock.envs.python_source import PythonSourceError, parse_python

FACTOR, GROWTH_MAX, RUNS = 8, 40.0, 3


def seconds(work, text):
    best = float("inf")
    for _ in range(RUNS):
        started = time.thread_time()
        work(text)
        best = min(best, time.thread_time() - started)
    return best


def growth(work, make, size):
    """Return how many times longer a text of 8 times the size takes."""
    return seconds(work, make(FACTOR * size)) / seconds(work, make(size))


def commands(text):
    list(signs_of(text))


def target(text):
    try:
        requested_target("GET", text)
    except EgressDeniedError:
        return


def path(text):
    try:
        checked_path(text)
    except InvalidCallError:
        return


def source(text):
    try:
        parse_python(text)
    except PythonSourceError:
        return


PIECES = {
    "git": (commands, "git "), "kill": (commands, "kill "), "cp": (commands, "cp x "),
    "while": (commands, "while true "), "yes": (commands, "yes "), "find": (commands, "find  "),
    "pip": (commands, "pip  "), "proc": (commands, "/proc/1"), "spaces": (commands, " "),
    "braces": (commands, ":() "), "lines": (commands, "git\n"), "moves": (commands, "mv\t"),
    "address": (target, "http://a/?"), "labels": (target, "a."), "dashes": (target, "a-"),
    "hashes": (target, "#"), "slashes": (path, "a/"), "dots": (path, "../"),
    "keywords": (lambda text: cut("a.py", text), "export "),
    "indents": (lambda text: cut("a.py", text), "\t "),
    "definitions": (lambda text: cut("a.py", text), "def f():\n"),
    "comments": (lambda text: cut("a.py", text), "# x\n"),
    "capitals": (words, "A"), "digits": (words, "1a"),
    "statements": (source, "x = 1\n"), "brackets": (source, "["), "decorators": (source, "@a\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_time_grows_with_the_length_of_a_text(name):
    work, piece = PIECES[name]
    size = 4_000 // len(piece)
    assert growth(work, lambda num: piece * num, size) < GROWTH_MAX


def test_what_an_edit_changed_is_found_in_linear_time():
    """A file of many alike lines, each too rare to be passed over, is the worst for a diff."""

    def edited(num):
        lines = [f"{number % 128}" for number in range(num)]
        return "\n".join([*lines, "old", *lines])

    def work(text):
        assert changed_lines(text, text.replace("old", "new")) == "-old\n+new"

    assert growth(work, edited, 2_000) < GROWTH_MAX
