import asyncio

import pytest

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.session import CALLS_MAX, ToolSession
from penstock.envs.harness.tools import TOOLS_1, tool_schemas
from penstock.envs.sandbox import SandboxDied, SandboxFileError
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import ToolCall
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import Limits

LIMITS = Limits(tool_s_max=2.0, output_bytes_max=64)


class MemorySandbox:
    """Files in memory; exec answers from a table and notes what it was asked."""

    def __init__(self, files=None, answers=None):
        self.files = {path: text.encode() for path, text in (files or {}).items()}
        self.answers = answers or {}
        self.asked = []
        self.delay_s = 0.0
        self.running = self.running_max = 0

    async def exec(self, argv, *, timeout_s, output_bytes_max=65536, **_):
        self.asked.append((list(argv), timeout_s, output_bytes_max))
        if argv[0] == "rm":
            del self.files[argv[-1]]
            return ExecResult(exit_code=0)
        answer = self.answers[argv[-1] if argv[0] == "sh" else argv[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def read_file(self, path, bytes_max):
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        if path not in self.files:
            raise SandboxFileError(path)
        return self.files[path][:bytes_max]

    async def write_files(self, files, *, keeps_modes=True):
        await asyncio.sleep(self.delay_s)
        self.files |= files

    async def list_files(self, root):
        return sorted(self.files)


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


async def run_calls(sandbox, calls, limits):
    return await ToolSession("1", sandbox, limits).run(calls)


async def one(sandbox, name, **arguments):
    (result,) = await run_calls(sandbox, [call(name, **arguments)], LIMITS)
    return result


async def test_edit_replaces_the_one_place_and_shows_the_lines():
    sandbox = MemorySandbox({"a.py": "x = 1\nif x < 2:\n    y = 3\n"})
    result = await one(sandbox, "edit_file", path="a.py", old="x < 2", new="x <= 2")
    assert result.text == "-if x < 2:\n+if x <= 2:"
    assert result.is_valid and not result.is_finish
    assert sandbox.files["a.py"] == b"x = 1\nif x <= 2:\n    y = 3\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "a.py", "old": "zz", "new": "y"}, "old is not in the file"),
        ({"path": "a.py", "old": "x", "new": "y"}, "old is there 2x"),
        ({"path": "a.py", "old": "", "new": "y"}, "old is empty"),
        ({"path": "a.py", "old": "x", "new": "x"}, "the same"),
        ({"path": "b.py", "old": "x", "new": "y"}, "no file b.py"),
        ({"path": "a.py", "old": "x"}, "edit_file needs new"),
        ({"path": "a.py", "old": "x", "new": "y", "mode": "z"}, "takes no mode"),
        ({"path": "../a.py", "old": "x", "new": "y"}, "must not hold .."),
        ({"path": "/etc/passwd", "old": "x", "new": "y"}, "outside /work"),
        ({"path": "a\0.py", "old": "x", "new": "y"}, "printable"),
        ({"path": "", "old": "x", "new": "y"}, "printable"),
    ],
)
async def test_a_wrong_edit_says_what_is_wrong_and_changes_nothing(arguments, words):
    sandbox = MemorySandbox({"a.py": "x = x"})
    result = await one(sandbox, "edit_file", **arguments)
    assert words in result.text and result.text.startswith("error: ")
    assert not result.is_valid
    assert sandbox.files == {"a.py": b"x = x"}


async def test_files_are_read_written_deleted_and_listed():
    sandbox = MemorySandbox({"a.py": "one", "lib/b.py": "two", "lib/deep/c.txt": "three"})
    assert (await one(sandbox, "read_file", path="/work/lib/../lib/b.py")).is_valid is False
    assert (await one(sandbox, "read_file", path="/work/lib/b.py")).text == "two"
    assert (await one(sandbox, "list_dir")).text == "a.py\nlib/"
    assert (await one(sandbox, "list_dir", path="lib")).text == "b.py\ndeep/"
    assert (await one(sandbox, "glob", pattern="*.py")).text == "a.py\nlib/b.py"
    assert (await one(sandbox, "write_file", path="new/d.py", content="four")).is_valid
    assert sandbox.files["new/d.py"] == b"four"
    assert (await one(sandbox, "delete_file", path="a.py")).text == "deleted a.py"
    assert "a.py" not in sandbox.files
    assert not (await one(sandbox, "delete_file", path="a.py")).is_valid
    assert not (await one(sandbox, "list_dir", path="nowhere")).is_valid


async def test_grep_runs_in_the_machine_with_the_pattern_as_data():
    found = ExecResult(exit_code=0, stdout=b"./b.py:def f():\n./a.py:f()\n")
    sandbox = MemorySandbox({}, {"grep": found})
    assert (await one(sandbox, "grep", pattern="-f")).text == "a.py:f()\nb.py:def f():"
    argv, timeout_s, num_bytes = sandbox.asked[0]
    assert argv == ["grep", "-rIE", "-e", "-f", "--", "."]
    assert (timeout_s, num_bytes) == (2.0, 64)
    sandbox.answers["grep"] = ExecResult(exit_code=1)
    assert (await one(sandbox, "grep", pattern="x")).text == "no match"
    sandbox.answers["grep"] = ExecResult(exit_code=2, stderr=b"grep: Unmatched (\n")
    result = await one(sandbox, "grep", pattern="(")
    assert not result.is_valid and "Unmatched" in result.text


async def test_terminal_tells_exit_codes_timeouts_and_cut_output():
    answers = {
        "good": ExecResult(exit_code=0, stdout=b"ok\n"),
        "bad": ExecResult(exit_code=3, stdout=b"out\n", stderr=b"err\n"),
        "slow": ExecResult(exit_code=-9, stdout=b"part", timed_out=True),
        "mute": ExecResult(exit_code=0),
        "loud": ExecResult(exit_code=0, stdout=b"x" * 100),
    }
    sandbox = MemorySandbox({}, answers)
    assert (await one(sandbox, "run_terminal", command="good")).text == "ok"
    assert (await one(sandbox, "run_terminal", command="bad")).text == "out\nerr\n[exit 3]"
    assert (await one(sandbox, "run_terminal", command="slow")).text == "part\n[stopped after 2 s]"
    assert (await one(sandbox, "run_terminal", command="mute")).text == "[no output]"
    loud = (await one(sandbox, "run_terminal", command="loud")).text
    assert loud == "x" * 64 + "\n[cut, 100 bytes in all]"
    assert not (await one(sandbox, "run_terminal", command=" ")).is_valid


async def test_calls_of_one_turn_overlap_but_writes_to_one_path_keep_their_order():
    sandbox = MemorySandbox({"a.py": "0", "b.py": "0"})
    sandbox.delay_s = 0.005
    reads = [call("read_file", path="a.py")] * 4
    await run_calls(sandbox, reads, LIMITS)
    assert sandbox.running_max == 4
    edits = [call("edit_file", path="a.py", old=str(i), new=str(i + 1)) for i in range(6)]
    results = await run_calls(sandbox, edits, LIMITS)
    assert [result.text for result in results] == [f"-{i}\n+{i + 1}" for i in range(6)]
    assert sandbox.files["a.py"] == b"6"


async def test_unknown_tools_and_too_many_calls_are_outcomes():
    sandbox = MemorySandbox({"a.py": "0"})
    calls = [call("read_file", path="a.py")] * CALLS_MAX + [call("finish"), call("sudo")]
    results = await run_calls(sandbox, calls, LIMITS)
    assert [result.is_valid for result in results] == [True] * CALLS_MAX + [False, False]
    assert not any(result.is_finish for result in results)
    assert (await one(sandbox, "sudo")).text == "error: no tool sudo"


async def test_finish_ends():
    assert (await one(MemorySandbox(), "finish")).is_finish
    assert (await one(MemorySandbox(), "finish", answer="all done")).is_finish


async def test_a_lost_machine_is_no_observation():
    sandbox = MemorySandbox({"a.py": "0"}, {"true": SandboxDied("gone")})
    calls = [call("read_file", path="a.py"), call("run_terminal", command="true")]
    with pytest.raises(SandboxDied, match="gone"):
        await run_calls(sandbox, calls, LIMITS)


async def test_a_silent_machine_is_a_missed_deadline(monkeypatch):
    monkeypatch.setattr("penstock.envs.harness.session._GRACE_S", -1.98)
    sandbox = MemorySandbox({"a.py": "0"})
    sandbox.delay_s = 30.0
    with pytest.raises(DeadlineError, match="read_file"):
        await one(sandbox, "read_file", path="a.py")


async def test_binary_and_large_files_are_refused():
    sandbox = MemorySandbox({"big": "x" * (256 * 1024 + 1)})
    sandbox.files["binary"] = b"\xff\xfe"
    assert "exceeds" in (await one(sandbox, "read_file", path="big")).text
    assert "UTF-8" in (await one(sandbox, "read_file", path="binary")).text


def test_schemas_name_every_tool_and_argument():
    schemas = {schema["function"]["name"]: schema["function"] for schema in tool_schemas("1")}
    assert set(schemas) == set(TOOLS_1)
    assert schemas["edit_file"]["parameters"]["required"] == ["path", "old", "new"]
    assert schemas["list_dir"]["parameters"]["required"] == []
    assert HARNESS_VERSION == "1"


async def test_a_slow_task_s_machine_sleeps_before_each_call_but_the_last():
    sandbox = MemorySandbox({"a.py": "x\n"}, {"sleep": ExecResult(exit_code=0)})
    session = ToolSession("1", sandbox, LIMITS, sleep_s=(0.5, 0.7))
    read = [call("read_file", path="a.py"), call("finish", answer="")]
    results = await session.run([read[0], read[0], read[1]])
    assert [result.text for result in results] == ["x\n", "x\n", "done"]
    slept = [float(argv[1]) for argv, _, _ in sandbox.asked if argv[0] == "sleep"]
    assert len(slept) == 2 and all(0.5 <= seconds <= 0.7 for seconds in slept)
