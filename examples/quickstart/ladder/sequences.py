"""Templates on lists, after `bisect`, `collections`, `heapq`, `itertools`, `statistics`."""

from .template import Template

_COMPARED = (
    {"word": "at least", "op": ">="},
    {"word": "at most", "op": "<="},
    {"word": "above", "op": ">"},
    {"word": "below", "op": "<"},
)
_LARGE_SMALL = (
    {"word": "largest", "fn": "max", "flag": "True", "op": ">"},
    {"word": "smallest", "fn": "min", "flag": "False", "op": "<"},
)
_ONE = {"xs": "ints", "a": "int"}

SEQUENCES = (
    Template(
        "bisect",
        ("bisect", "locate", "search"),
        {"xs": "sorted", "a": "natural"},
        '"""Return the first index of sorted $xs with an item $word $a."""\n'
        "for $i in range(len($xs)):\n    if $xs[$i] $op $a:\n        return $i\nreturn len($xs)",
        ({"word": "at least", "op": ">="}, {"word": "above", "op": ">"}),
        ("i",),
    ),
    Template(
        "index",
        ("index", "find", "position"),
        _ONE,
        '"""Return the index of $a in $xs, or -1."""\n'
        "for $i in range(len($xs)):\n    if $xs[$i] == $a:\n        return $i\nreturn -1",
        local_slots=("i",),
    ),
    Template(
        "count",
        ("count", "number", "tally"),
        _ONE,
        '"""Count the $xs that are $word $a."""\nreturn len([$x for $x in $xs if $x $op $a])',
        _COMPARED,
        ("x",),
    ),
    Template(
        "keep",
        ("keep", "filter", "select"),
        _ONE,
        '"""Keep the $xs that are $word $a."""\nreturn [$x for $x in $xs if $x $op $a]',
        _COMPARED,
        ("x",),
    ),
    Template(
        "without",
        ("without", "remove", "discard"),
        _ONE,
        '"""Return $xs without $a."""\nreturn [$x for $x in $xs if $x != $a]',
        local_slots=("x",),
    ),
    Template(
        "mean",
        ("mean", "average", "center"),
        {"xs": "ints"},
        '"""Return the mean of $xs, 0 if there are none."""\n'
        "if len($xs) == 0:\n    return 0\nreturn sum($xs) / len($xs)",
    ),
    Template(
        "median",
        ("median", "middle", "typical"),
        {"xs": "some"},
        '"""Return the upper median of $xs."""\nreturn sorted($xs)[len($xs) // 2]',
    ),
    Template(
        "spread",
        ("spread", "range", "extent"),
        {"xs": "some"},
        '"""Return the largest minus the smallest of $xs."""\nreturn max($xs) - min($xs)',
    ),
    Template(
        "reduce",
        ("fold", "reduce", "combine"),
        {"xs": "ints"},
        '"""$word all of $xs."""\n$t = $n\nfor $x in $xs:\n    $t = $t $op $x\nreturn $t',
        ({"word": "Add", "n": "0", "op": "+"}, {"word": "Multiply", "n": "1", "op": "*"}),
        ("x", "t"),
    ),
    Template(
        "chunks",
        ("chunks", "pieces", "batch"),
        {"xs": "ints", "n": "small"},
        '"""Cut $xs into pieces of $n."""\n'
        "return [$xs[$i:$i + $n] for $i in range(0, len($xs), $n)]",
        local_slots=("i",),
    ),
    Template(
        "pairs",
        ("pairs", "pairwise", "links"),
        {"xs": "ints"},
        '"""Pair each of $xs with the next."""\nreturn list(zip($xs, $xs[1:]))',
    ),
    Template(
        "steps",
        ("steps", "deltas", "changes"),
        {"xs": "ints"},
        '"""Return by how much each of $xs exceeds the one before."""\n'
        "return [$b - $a for $a, $b in zip($xs, $xs[1:])]",
        local_slots=("a", "b"),
    ),
    Template(
        "rotate",
        ("rotate", "shift", "turn"),
        {"xs": "ints", "n": "small"},
        '"""Rotate $xs left by $n."""\nreturn $xs[$n:] + $xs[:$n]',
    ),
    Template(
        "totals",
        ("totals", "accumulate", "running"),
        {"xs": "ints"},
        '"""Return the running totals of $xs."""\n$t = 0\n$r = []\nfor $x in $xs:\n'
        "    $t = $t + $x\n    $r.append($t)\nreturn $r",
        local_slots=("x", "t", "r"),
    ),
    Template(
        "top",
        ("top", "nlargest", "rank"),
        {"xs": "ints", "n": "small"},
        '"""Return the $n $word of $xs."""\nreturn sorted($xs, reverse=$flag)[:$n]',
        _LARGE_SMALL,
    ),
    Template(
        "extreme_of",
        ("peak", "extreme", "record"),
        {"xs": "some"},
        '"""Return the $word of $xs."""\n$t = $xs[0]\nfor $x in $xs:\n    if $x $op $t:\n'
        "        $t = $x\nreturn $t",
        _LARGE_SMALL,
        ("x", "t"),
    ),
    Template(
        "unique",
        ("unique", "distinct", "dedupe"),
        {"xs": "ints"},
        '"""Return $xs without repeats, in order."""\n$r = []\nfor $x in $xs:\n'
        "    if $x not in $r:\n        $r.append($x)\nreturn $r",
        local_slots=("x", "r"),
    ),
    Template(
        "is_sorted",
        ("ordered", "sorted", "monotone"),
        {"xs": "ints"},
        '"""Tell whether $xs never $word."""\n'
        "return all([$a $op $b for $a, $b in zip($xs, $xs[1:])])",
        ({"word": "fall", "op": "<="}, {"word": "rise", "op": ">="}),
        ("a", "b"),
    ),
    Template(
        "dot",
        ("dot", "product", "weigh"),
        {"xs": "ints", "ys": "ints"},
        '"""Add the products of $xs and $ys."""\nreturn sum([$a * $b for $a, $b in zip($xs, $ys)])',
        local_slots=("a", "b"),
    ),
    Template(
        "end_or",
        ("end", "edge", "border"),
        _ONE,
        '"""Return the $word of $xs, or $a if there are none."""\nreturn $xs[$n] if $xs else $a',
        ({"word": "first", "n": "0"}, {"word": "last", "n": "-1"}),
    ),
    Template(
        "stride",
        ("stride", "every", "sample"),
        {"xs": "ints", "n": "small"},
        '"""Return every item of $xs that is $n after the last, from the $word."""\n'
        "return $xs[$i::$n]",
        ({"word": "first", "i": "0"}, {"word": "second", "i": "1"}),
    ),
    Template(
        "pick_each",
        ("merge", "envelope", "overlay"),
        {"xs": "ints", "ys": "ints"},
        '"""Return the $word of each of $xs and $ys."""\n'
        "return [$fn($a, $b) for $a, $b in zip($xs, $ys)]",
        _LARGE_SMALL,
        ("a", "b"),
    ),
    Template(
        "histogram",
        ("histogram", "counts", "counter"),
        {"xs": "ints"},
        '"""Count how often each of $xs occurs."""\n$r = {}\nfor $x in $xs:\n'
        "    $r[$x] = $r.get($x, 0) + 1\nreturn $r",
        local_slots=("x", "r"),
    ),
    Template(
        "scale",
        ("scale", "stretch", "convert"),
        {"xs": "ints", "a": "int", "b": "int"},
        '"""Multiply each of $xs by $a and add $b."""\nreturn [$x * $a + $b for $x in $xs]',
        local_slots=("x",),
    ),
)
