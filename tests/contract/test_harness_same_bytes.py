"""Every tool says the same bytes in a training machine and on a checkout of production."""

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.harness.session import ToolSession
from penstock.envs.harness.tools import TOOLS_2
from penstock.envs.sandbox import BackendUnavailable, SandboxError
from penstock.infra.agent.checkout import open_checkout
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

pytestmark = [pytest.mark.vm, pytest.mark.timeout(120)]
LIMITS = Limits(tool_s_max=10.0, output_bytes_max=400)
FILES = {
    "pkg/area.py": "import os\n\n\ndef area(width, height):\n    return width * height\n",
    "pkg/mail.py": 'def parse(text):\n    """Split a mail address."""\n    return text.split()\n',
    "notes.md": "".join(f"line {number} of the notes\n" for number in range(1, 60)),
    "cafe.txt": "caf\xe9\n",
}


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


TURNS = [
    [
        call("list_dir", depth="2"),
        call("glob", pattern="*.py"),
        call("read_file", path="cafe.txt"),
    ],
    [call("read_file", path="notes.md"), call("read_file", path="notes.md", offset="9", limit="2")],
    [call("grep", pattern="def |RETURN", ignore_case="true"), call("grep", pattern="[")],
    [call("grep", pattern="parse", context="1"), call("grep", pattern="nowhere")],
    [call("codebase_search", query="split an address"), call("read_lints")],
    [
        call("edit_file", path="pkg/area.py", old="import os\n\n\n", new=""),
        call("edit_file", path="pkg/area.py", old="width * height", new="width + height"),
        call("edit_file", path="pkg/area.py", old="width", new="w"),
        call("write_file", path="new/deep.txt", content="\xe9\n"),
    ],
    [
        call("read_lints", path="pkg/area.py"),
        call("write_file", path="bad.py", content="f(:\n"),
    ],
    [call("read_lints", path="bad.py"), call("delete_file", path="notes.md")],
    [call("delete_file", path="notes.md"), call("read_file", path="../etc/passwd")],
    [call("run_terminal", command="cd pkg && export WHO='a b'; pwd; ls; id -u")],
    [call("run_terminal", command='echo "$WHO"; pwd; cat missing; exit 3')],
    [call("run_terminal", command="env | sort | grep -v -E '^(_|SHLVL|OLDPWD)='")],
    [call("run_terminal", command="python3 -c 'import area; print(area.area(2, 3))'")],
    [call("run_terminal", command="python3 -c 'raise ValueError(1)'")],
    [call("run_terminal", command="seq 1000"), call("run_terminal", command="kill -9 $$")],
    [call("run_terminal", command="echo go; read it; echo got $it", background="true")],
    [call("terminal_io", job="1", wait_s="5"), call("terminal_io", job="4")],
    [call("terminal_io", job="1", input="this\n", wait_s="5")],
    [call("run_terminal", command="sleep 60", background="true")],
    [call("terminal_io", job="2", stop="true"), call("nothing"), call("grep")],
    [call("read_file", path="pkg/area.py", limit="none"), call("finish", answer="done")],
]


async def said(sandbox) -> list[list[tuple[str, str, bool, bool]]]:
    session = ToolSession("2", sandbox, LIMITS)
    turns = [await session.run(turn) for turn in TURNS]
    return [[(one.name, one.text, one.is_valid, one.is_finish) for one in turn] for turn in turns]


async def test_a_machine_and_a_checkout_say_the_same(tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    try:
        machine = await open_backend("uml").start(timeout_s=60.0)
    except (BackendUnavailable, SandboxError) as missing:
        pytest.skip(str(missing))
    try:
        await machine.write_files({path: text.encode() for path, text in FILES.items()})
        async with open_checkout(tmp_path, print) as checkout:
            in_machine, on_checkout = await said(machine), await said(checkout)
    finally:
        await machine.close()
    assert {one.name for turn in TURNS for one in turn} >= set(TOOLS_2)
    for turn, trained, served in zip(TURNS, in_machine, on_checkout, strict=True):
        assert trained == served, turn
    assert sum(not valid for turn in in_machine for _, _, valid, _ in turn) == 8
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {"pkg/__pycache__/area.cpython-311.pyc"} == {
        "pkg/area.py", "pkg/mail.py", "cafe.txt", "new/deep.txt", "bad.py",
    }  # fmt: skip
