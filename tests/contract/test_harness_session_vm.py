"""The tools of version 2 in a real machine."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.harness.session import ToolSession
from penstock.envs.sandbox import BackendUnavailable
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

pytestmark = pytest.mark.vm
LIMITS = Limits(tool_s_max=10.0, output_bytes_max=4096)
FILES = {
    "src/area.py": "import os\n\n\ndef area(width, height):\n    return width * height\n",
    "src/mail.py": 'def parse(text):\n    """Split a mail address."""\n    return text.split()\n',
    "README.md": "one\ntwo\nthree\n",
}


@asynccontextmanager
async def session(files=FILES, limits=LIMITS):
    try:
        machine = await open_backend("uml").start(timeout_s=60.0)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    try:
        await machine.write_files({path: text.encode() for path, text in files.items()})
        yield ToolSession("2", machine, limits)
    finally:
        await machine.close()


async def one(tools, name, **arguments):
    (result,) = await tools.run([ToolCall(name=name, arguments=arguments)])
    return result.text


async def test_the_terminal_remembers_its_directory_and_variables():
    async with session() as tools:
        assert await one(
            tools, "run_terminal", command="cd src && export COLOR='deep red'; pwd"
        ) == ("/work/src")
        assert await one(tools, "run_terminal", command='echo "$COLOR"; pwd; exit 3') == (
            "deep red\n/work/src\n[exit 3]"
        )
        assert await one(tools, "run_terminal", command="kill -9 $$") == "[exit -9]"
        assert await one(tools, "run_terminal", command="rmdir /work/src; cd ..; pwd") == (
            "/work\nrmdir: failed to remove '/work/src': Directory not empty"
        )
        assert await one(tools, "run_terminal", command="readlink /proc/self/fd/0") == "/dev/null"


async def test_a_background_job_is_read_fed_and_stopped():
    async with session() as tools:
        command = 'echo ready; while read line; do echo "got $line"; done'
        assert await one(tools, "run_terminal", command=command, background="true") == (
            "job 1 started"
        )
        assert await one(tools, "terminal_io", job="1", wait_s="9") == "ready\n[running]"
        said = await one(tools, "terminal_io", job="1", input="a\n", wait_s="9")
        assert said == "got a\n[running]"
        assert await one(tools, "terminal_io", job="1", stop="true") == "[stopped]"
        assert await one(tools, "run_terminal", command="exit 4", background="true")
        assert (await one(tools, "terminal_io", job="2", wait_s="9")).endswith("[exit 4]")
        assert await one(tools, "terminal_io", job="7") == "error: no job 7"


async def test_lookups_name_lines_and_stay_inside():
    async with session() as tools:
        read = await one(tools, "read_file", path="README.md", offset="2", limit="1")
        assert read == "     2\ttwo\n[1 more lines]"
        assert await one(tools, "list_dir", depth="2") == (
            "README.md\nsrc/\nsrc/area.py\nsrc/mail.py"
        )
        assert await one(tools, "glob", pattern="*.py") == "src/area.py\nsrc/mail.py"
        assert await one(tools, "grep", pattern="DEF ", ignore_case="true", include="a*.py") == (
            "src/area.py:4:def area(width, height):"
        )
        for path in ("../etc/passwd", "/etc/passwd", "src/../../etc"):
            assert (await one(tools, "read_file", path=path)).startswith("error: path")


async def test_lints_come_from_the_guest():
    async with session() as tools:
        said = await one(tools, "read_lints", path="src/area.py")
        assert said == "src/area.py:1:1: 'os' imported but unused"
        assert await one(tools, "read_lints", path="src/mail.py") == "no lints"
        await one(tools, "write_file", path="bad.py", content="def f(:\n")
        assert "bad.py:1" in await one(tools, "read_lints")


async def test_search_finds_by_words_and_follows_edits():
    async with session() as tools:
        best = (await one(tools, "codebase_search", query="split an email address")).splitlines()[0]
        assert best == "src/mail.py:1-3"
        await one(tools, "write_file", path="net.py", content="def open_socket(host):\n    pass\n")
        found = await one(tools, "codebase_search", query="socket host", num="1")
        assert found.startswith("net.py:1-2")
        await one(tools, "delete_file", path="net.py")
        assert await one(tools, "codebase_search", query="socket host") == "no match"


async def test_writes_to_one_path_take_turns_and_terminal_commands_too():
    async with session({"n.txt": "0"}) as tools:
        edits = [
            ToolCall(
                name="edit_file", arguments={"path": "n.txt", "old": str(i), "new": str(i + 1)}
            )
            for i in range(4)
        ]
        commands = [
            ToolCall(name="run_terminal", arguments={"command": f"export L=${{L}}{i}; echo $L"})
            for i in range(3)
        ]
        results = await asyncio.wait_for(tools.run([*edits, *commands]), 30)
        assert all(result.is_valid for result in results)
        assert [result.text for result in results[4:]] == ["0", "01", "012"]
        assert (await one(tools, "read_file", path="n.txt")).endswith("4")
