"""Templates on text, after `fnmatch`, `posixpath`, `shlex`, `string`, `textwrap`."""

from .template import Template

_START_END = (
    {"word": "starts", "side": "start", "fn": "startswith", "strip": "lstrip"},
    {"word": "ends", "side": "end", "fn": "endswith", "strip": "rstrip"},
)
_ONE = {"s": "text"}

TEXT = (
    Template(
        "indent",
        ("indent", "nest", "push"),
        {"s": "text", "n": "small"},
        '"""Indent $s by $n spaces."""\nreturn " " * $n + $s',
    ),
    Template(
        "shorten",
        ("shorten", "truncate", "clip"),
        {"s": "text", "n": "width"},
        '"""Cut $s to $n characters, the last three being dots."""\n'
        'if len($s) <= $n:\n    return $s\nreturn $s[:$n - 3] + "..."',
    ),
    Template(
        "pad",
        ("pad", "align", "justify"),
        {"s": "word", "n": "width"},
        '"""Fill $s on the $word to $n characters."""\nreturn $s.$fn($n)',
        ({"word": "left", "fn": "rjust"}, {"word": "right", "fn": "ljust"}),
    ),
    Template(
        "case",
        ("case", "letters", "fold"),
        _ONE,
        '"""Return $s in $word letters."""\nreturn $s.$fn()',
        ({"word": "capital", "fn": "upper"}, {"word": "small", "fn": "lower"}),
    ),
    Template(
        "affix",
        ("matches", "has", "accepts"),
        {"s": "word", "p": "letters"},
        '"""Tell whether $s $word with $p."""\nreturn $s.$fn($p)',
        _START_END,
    ),
    Template(
        "strip",
        ("strip", "trim", "clean"),
        _ONE,
        '"""Remove spaces at the $side of $s."""\nreturn $s.$strip()',
        _START_END,
    ),
    Template(
        "words",
        ("words", "wordcount", "terms"),
        {"s": "text", "n": "small"},
        '"""Count the words of $s, plus $n."""\nreturn len($s.split()) + $n',
    ),
    Template(
        "before",
        ("part", "cut", "section"),
        {"s": "dotted"},
        '"""Return what stands $word the first dot of $s."""\nreturn $s.partition(".")[$n]',
        ({"word": "before", "n": "0"}, {"word": "after", "n": "2"}),
    ),
    Template(
        "stem",
        ("stem", "basename", "suffix"),
        {"s": "dotted"},
        '"""Return what stands $word the last dot of $s."""\nreturn $s.rpartition(".")[$n]',
        ({"word": "before", "n": "0"}, {"word": "after", "n": "2"}),
    ),
    Template(
        "join",
        ("join", "glue", "concat"),
        {"ws": "words", "p": "dash"},
        '"""Join $ws with $p."""\nreturn $p.join($ws)',
    ),
    Template(
        "unprefix",
        ("unprefix", "peel", "drop"),
        {"s": "word", "p": "letters"},
        '"""Remove $p from the start of $s."""\n'
        "if $s.startswith($p):\n    return $s[len($p):]\nreturn $s",
    ),
    Template(
        "replace",
        ("replace", "swap", "substitute"),
        {"s": "text", "a": "letters", "b": "letters"},
        '"""Put $b for each $a in $s."""\nreturn $s.replace($a, $b)',
    ),
    Template(
        "palindrome",
        ("palindrome", "mirror", "symmetric"),
        {"s": "word"},
        '"""Tell whether $s reads the same backwards."""\nreturn $s == $s[::-1]',
    ),
    Template(
        "capwords",
        ("capwords", "headline", "title"),
        _ONE,
        '"""Capitalize each word of $s."""\n'
        'return " ".join([$w.capitalize() for $w in $s.split()])',
        local_slots=("w",),
    ),
    Template(
        "by_length",
        ("widest", "bylength", "extent"),
        {"ws": "words"},
        '"""Return the $word of $ws."""\nreturn $fn($ws, key=len)',
        ({"word": "longest", "fn": "max"}, {"word": "shortest", "fn": "min"}),
    ),
    Template(
        "blank",
        ("blank", "empty", "void"),
        _ONE,
        '"""Tell whether $s has only spaces."""\nreturn len($s.strip()) == 0',
    ),
    Template(
        "quote",
        ("quote", "wrap", "bracket"),
        {"s": "word", "p": "letters"},
        '"""Put $p before and after $s."""\nreturn $p + $s + $p',
    ),
    Template(
        "fnfilter",
        ("fnfilter", "matching", "choose"),
        {"ws": "words", "p": "letters"},
        '"""Keep the $ws whose $side is $p."""\nreturn [$w for $w in $ws if $w.$fn($p)]',
        _START_END,
        ("w",),
    ),
    Template(
        "occurrences",
        ("occurrences", "frequency", "hits"),
        {"s": "text", "p": "letters"},
        '"""Count how often $p is in $s."""\nreturn $s.count($p)',
    ),
    Template(
        "zfill",
        ("digits", "zeros", "serial"),
        {"n": "natural", "m": "width"},
        '"""Write $n with zeros to $m digits."""\nreturn str($n).zfill($m)',
    ),
    Template(
        "nth_word",
        ("nth", "field", "column"),
        {"s": "text", "n": "small"},
        '"""Return word $n of $s, counted from 1, or nothing."""\n'
        'if $n > len($s.split()):\n    return ""\nreturn $s.split()[$n - 1]',
    ),
    Template(
        "lengths",
        ("lengths", "widths", "sizes"),
        {"ws": "words", "n": "small"},
        '"""Return the length of each of $ws, plus $n."""\nreturn [len($w) + $n for $w in $ws]',
        local_slots=("w",),
    ),
)
