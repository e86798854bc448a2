"""Tests that import the code under test, and find stand-ins: what works, and what is left out."""

import pytest
from tests.unit.tasks.host_pair import suite_lines

CODE = """\
import enum
from decimal import Decimal


class PlainError(ValueError):
    code = 7


class Odd(PlainError):
    def __init__(self, value, why):
        super().__init__(f"{value} {why}")
        self.value = value


class Color(enum.Enum):
    RED = 1


class Box:
    kind = "box"

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]

    def __iter__(self):
        return iter(self.items)

    def __add__(self, other):
        return Box(self.items + other.items)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.items.clear()


limit = 3


def half(n):
    if n % 2:
        raise Odd(n, "is odd")
    return n // 2


def apply(function, values):
    return [function(value) for value in values]


def pairs(values):
    yield from enumerate(values)


def price():
    return {"total": Decimal("1.10"), "parts": ({1, 2}, b"x", None)}


def bounded(n):
    return min(n, limit)
"""
TESTS = """\
import unittest
import m
from m import half, Box
from pkg.deep import tool


class Test(unittest.TestCase):
    def test_values(self):
        from decimal import Decimal
        self.assertEqual(half(4), 2)
        self.assertEqual(m.price(), {"total": Decimal("1.10"), "parts": ({1, 2}, b"x", None)})
        self.assertEqual(list(m.pairs("ab")), [(0, "a"), (1, "b")])

    def test_errors(self):
        with self.assertRaises(ValueError):
            half(3)
        with self.assertRaises(m.Odd) as caught:
            half(3)
        self.assertEqual((str(caught.exception), caught.exception.value), ("3 is odd", 3))
        self.assertEqual((caught.exception.code, m.PlainError.code), (7, 7))
        try:
            half(5)
        except m.PlainError:
            return
        self.fail()

    def test_builtin_errors(self):
        with self.assertRaisesRegex(ZeroDivisionError, "division"):
            tool.divide(1, 0)
        with self.assertRaises(AttributeError):
            m.absent

    def test_objects(self):
        box = Box([1, 2])
        self.assertIsInstance(box, Box)
        self.assertNotIsInstance(5, Box)
        self.assertEqual((len(box), box[1], list(box), box.kind), (2, 2, [1, 2], "box"))
        self.assertIn(2, box)
        self.assertEqual((box + Box([3])).items, [1, 2, 3])
        with box:
            box.items = [9]
        self.assertFalse(len(box))

    def test_functions_of_the_tests(self):
        self.assertEqual(m.apply(lambda x: x + 1, [1, 2]), [2, 3])

    def test_a_patched_module(self):
        m.limit = 5
        self.assertEqual(m.bounded(9), 5)

    def test_same_objects(self):
        self.assertIs(m.Color.RED, m.Color.RED)

    def test_compares_objects(self):
        self.assertNotEqual(Box([1]), Box([1]))

    @unittest.skip("later")
    def test_skipped(self):
        pass


def test_plain():
    assert half(8) == 4
"""
LEFT_OUT = {"test_compares_objects", "test_skipped"}
"""Only the code under test could say whether two of its objects are equal; a skip is no pass."""


def test_most_of_what_tests_do_works_through_the_socket(tmp_path):
    code = {"m.py": CODE, "pkg/__init__.py": "", "pkg/deep/__init__.py": "",
            "pkg/deep/tool.py": "def divide(a, b):\n    return a / b\n"}  # fmt: skip
    lines = suite_lines(tmp_path, code, {"tests/test_m.py": TESTS})
    failed = {name.rpartition(".")[2] for name, word in lines.items() if word == "failed"}
    assert len(lines) == 10
    assert failed == LEFT_OUT


@pytest.mark.parametrize("place", ["tests", "pkg/tests", "src/pkg/tests"])
def test_helpers_of_the_tests_are_the_tests_own(tmp_path, place):
    root = "src/" if place.startswith("src") else ""
    code = {
        f"{root}pkg/__init__.py": "",
        f"{root}pkg/m.py": "def one():\n    return 1\n",
    }
    name = place.removeprefix("src/").replace("/", ".")
    test = (
        f"from {name}.helper import wanted\nfrom pkg.m import one\n\n\n"
        "def test_one():\n    assert one() == wanted()\n"
    )
    tests = {
        f"{place}/__init__.py": "",
        f"{place}/helper.py": "def wanted():\n    return 1\n",
        f"{place}/test_one.py": test,
    }
    lie = {f"{place}/helper.py": "def wanted():\n    return 2\n"}
    assert list(suite_lines(tmp_path / "a", code, tests).values()) == ["passed"]
    assert list(suite_lines(tmp_path / "b", code | lie, tests).values()) == ["passed"]
