"""All that commands print goes through one function, which a terminal does not obey."""

import ast
import io
from pathlib import Path

from penstock.infra.output import print_line, write_to

INFRA = Path(__file__).parents[2] / "infra"
EXCEPTIONS = {"output.py", "agent/chat.py"}
"""The function itself; a chat, which styles what `printable` has passed."""


def test_no_command_writes_to_the_terminal_on_its_own():
    found = []
    for path in INFRA.rglob("*.py"):
        name = str(path.relative_to(INFRA))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name not in EXCEPTIONS:
                called = ast.unparse(node.func)
                if called in {"print", "sys.stdout.write", "sys.stderr.write"}:
                    found.append(f"{name}:{node.lineno}: {called}")
    assert not found


def test_controls_are_shown_and_not_sent():
    out = io.StringIO()
    print_line("a\x1b]52;c;x\x07", "\u202eb", file=out)
    write_to(out, "\x9b31m\tc\n")
    assert out.getvalue() == "a\\u001b]52;c;x\\u0007 \\u202eb\n\\u009b31m\tc\n"
