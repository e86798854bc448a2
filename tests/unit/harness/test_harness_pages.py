"""Pages: what `read_file` shows once, and nothing else shows at all."""

import pytest
from tests.unit.harness.test_harness_tools import MemorySandbox, call

from penstock.envs.harness.session import ToolSession
from penstock.messages.base import Array
from penstock.messages.rollout import StopReason, Turn
from penstock.messages.task import Limits

PAGES = {"b4/1": "number 47 next d2", "d2/1": "end"}
LIMITS = Limits()


def session(version="1", sandbox=None):
    return ToolSession(version, sandbox or MemorySandbox({"a.py": "x = 1"}), LIMITS, pages=PAGES)


def turn(*calls):
    ids = Array(dtype="int32", shape=[1], data=b"\0\0\0\0")
    return Turn(
        context_ids=ids,
        token_ids=ids,
        behavior_logprobs=Array(dtype="float32", shape=[1], data=b"\0\0\0\0"),
        version_spans=[],
        stop_reason=StopReason.STOP,
        calls=list(calls),
    )


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_page_is_shown_once(version):
    tools = session(version)
    first, file = await tools.run([call("read_file", path="b4/1"), call("read_file", path="a.py")])
    (again,) = await tools.run([call("read_file", path="./b4/1")])
    assert first.is_valid and "number 47 next d2" in first.text
    assert file.is_valid and "x = 1" in file.text
    assert not again.is_valid and again.text == "error: b4/1 cannot be read again"


async def test_of_two_calls_in_a_turn_one_gets_the_page():
    results = await session().run([call("read_file", path="d2/1"), call("read_file", path="d2/1")])
    assert sorted(result.is_valid for result in results) == [False, True]


async def test_no_other_tool_sees_a_page():
    sandbox = MemorySandbox({"a.py": "x = 1"})
    tools = session(sandbox=sandbox)
    listed, found, edited = await tools.run(
        [
            call("list_dir"),
            call("glob", pattern="*"),
            call("edit_file", path="b4/1", old="47", new="48"),
        ]
    )
    assert listed.text == found.text == "a.py"
    assert edited.text == "error: no file b4/1"
    assert list(sandbox.files) == ["a.py"]


async def test_an_episode_that_is_resumed_has_the_same_pages_left():
    tools = session()
    stored = [turn(call("read_file", path="b4/1")), turn(call("finish"), call("read_file"))]
    tools.resume([*stored, turn(call("read_file", path="../x"))])
    read, fresh = await tools.run([call("read_file", path="b4/1"), call("read_file", path="d2/1")])
    assert read.text == "error: b4/1 cannot be read again"
    assert fresh.text == "end"


async def test_a_call_beyond_the_turns_maximum_took_no_page():
    tools = session()
    tools.resume([turn(*[call("finish")] * 8, call("read_file", path="b4/1"))])
    (read,) = await tools.run([call("read_file", path="b4/1")])
    assert read.is_valid
