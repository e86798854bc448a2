"""Templates on numbers, after `bisect`, `calendar`, `colorsys`, `fractions` and `math`."""

from .template import Template

_COMPARED = (
    {"word": "at least", "op": ">="},
    {"word": "at most", "op": "<="},
    {"word": "above", "op": ">"},
    {"word": "below", "op": "<"},
)
_TWO = {"a": "int", "b": "int"}

NUMBERS = (
    Template(
        "clamp",
        ("clamp", "limit", "bound"),
        {"x": "int", "a": "int", "b": "int"},
        '"""Return $x, but at least $a and at most $b."""\nreturn max($a, min($x, $b))',
    ),
    Template(
        "inside",
        ("inside", "within", "between"),
        {"x": "int", "a": "int", "b": "int"},
        '"""Tell whether $x lies from $a to $b, both $word."""\nreturn $a $op $x $op $b',
        ({"word": "included", "op": "<="}, {"word": "excluded", "op": "<"}),
    ),
    Template(
        "compare",
        ("is", "check", "test"),
        _TWO,
        '"""Tell whether $a is $word $b."""\nreturn $a $op $b',
        _COMPARED,
    ),
    Template(
        "ceil_div",
        ("ceil", "divide", "pages"),
        {"a": "natural", "b": "small"},
        '"""Divide $a by $b, rounding up."""\nreturn ($a + $b - 1) // $b',
    ),
    Template(
        "ring",
        ("step", "advance", "wrap"),
        {"x": "natural", "a": "small", "b": "width"},
        '"""Move $x on by $a in a ring of $b."""\nreturn ($x + $a) % $b',
    ),
    Template(
        "lerp",
        ("blend", "mix", "lerp"),
        {"a": "int", "b": "int", "x": "int"},
        '"""Go from $a to $b by the share $x."""\nreturn $a + ($b - $a) * $x',
    ),
    Template(
        "percent",
        ("percent", "share", "ratio"),
        {"a": "natural", "b": "width"},
        '"""Return which percentage of $b is $a."""\nreturn 100 * $a // $b',
    ),
    Template(
        "multiple",
        ("divides", "fits", "multiple"),
        {"a": "natural", "b": "small"},
        '"""Tell whether $a is a multiple of $b."""\nreturn $a % $b == 0',
    ),
    Template(
        "gcd",
        ("gcd", "common", "divisor"),
        {"a": "natural", "b": "natural"},
        '"""Return the greatest common divisor of $a and $b."""\n'
        "while $b != 0:\n    $a, $b = ($b, $a % $b)\nreturn $a",
    ),
    Template(
        "sign",
        ("sign", "side", "direction"),
        {"x": "int"},
        '"""Return 1, 0 or -1, as $x is positive, zero or negative."""\nreturn ($x > 0) - ($x < 0)',
    ),
    Template(
        "distance",
        ("distance", "gap", "apart"),
        _TWO,
        '"""Return how far $a is from $b."""\nreturn abs($a - $b)',
    ),
    Template(
        "luma",
        ("luma", "gray", "light"),
        {"r": "channel", "g": "channel", "b": "channel"},
        '"""Return 30, 59 and 11 percent of $r, $g and $b."""\n'
        "return (30 * $r + 59 * $g + 11 * $b) // 100",
    ),
    Template(
        "invert",
        ("invert", "negate", "flip"),
        {"x": "channel"},
        '"""Invert the color channel $x, which ends at 255."""\nreturn 255 - $x',
    ),
    Template(
        "seconds",
        ("seconds", "duration", "time"),
        {"a": "natural", "b": "natural"},
        '"""Return $a hours and $b minutes in seconds."""\nreturn $a * 3600 + $b * 60',
    ),
    Template(
        "leap",
        ("leap", "isleap", "long"),
        {"a": "year"},
        '"""Tell whether $a is a leap year."""\n'
        "return $a % 4 == 0 and ($a % 100 != 0 or $a % 400 == 0)",
    ),
    Template(
        "extreme",
        ("pick", "choose", "best"),
        _TWO,
        '"""Return the $word of $a and $b."""\nreturn $a if $a $op $b else $b',
        ({"word": "larger", "op": ">"}, {"word": "smaller", "op": "<"}),
    ),
    Template(
        "parent",
        ("parent", "above", "up"),
        {"i": "natural"},
        '"""Return the heap index of the parent of $i."""\nreturn ($i - 1) // 2',
    ),
    Template(
        "child",
        ("child", "down", "below"),
        {"i": "natural"},
        '"""Return the heap index of the $word child of $i."""\nreturn 2 * $i + $n',
        ({"word": "left", "n": "1"}, {"word": "right", "n": "2"}),
    ),
    Template(
        "area",
        ("area", "cells", "surface"),
        {"a": "natural", "b": "natural", "x": "small"},
        '"""Return the area of $a by $b, without a rim of $x."""\n'
        "return ($a - 2 * $x) * ($b - 2 * $x)",
    ),
    Template(
        "square",
        ("square", "power", "cube"),
        {"a": "int", "x": "int"},
        '"""Return the $word of $a, plus $x."""\nreturn $a ** $n + $x',
        ({"word": "square", "n": "2"}, {"word": "cube", "n": "3"}),
    ),
)
