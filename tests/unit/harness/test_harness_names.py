"""File names that are not UTF-8 or not printable are shown, and can be read back as shown."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.harness.session import ToolSession
from penstock.envs.harness.tool_calls import InvalidCallError, checked_path, shown_path
from penstock.infra.agent.checkout import open_checkout
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: not {0, 47} & set(name) and name.strip() == name and name.strip(b".") == name
)


@given(NAMES)
def test_a_name_of_any_bytes_is_read_back_as_it_was(name):
    path = os.fsdecode(name)
    shown = shown_path(path)
    assert shown.isprintable()
    shown.encode()
    if shown.strip() == shown:
        assert checked_path(shown) == path


@pytest.mark.parametrize("path", [r"a\x2fb", r"a\x00b", "a\nb", r"..\x2f..", "../x"])
def test_an_escape_leads_nowhere_else(path):
    try:
        assert "/" not in checked_path(path)
    except InvalidCallError:
        return


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_session_goes_on_with_a_name_that_is_not_utf8(tmp_path, version):
    (tmp_path / "a.py").write_text("def parse(text): ...\n")
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("def brew(): return 1\n")
    async with open_checkout(tmp_path, print) as sandbox:
        session = ToolSession(version, sandbox, Limits(tool_s_max=20.0, output_bytes_max=4000))

        async def say(name, **arguments):
            (result,) = await session.run([ToolCall(name=name, arguments=arguments)])
            result.text.encode()
            return result

        shown = r"caf\xe9.py"
        assert shown in (await say("list_dir", path=".")).text
        assert shown in (await say("glob", pattern="*.py")).text
        assert f"{shown}:" in (await say("grep", pattern="brew", path=".")).text
        assert "brew" in (await say("read_file", path=shown)).text
        assert (await say("edit_file", path=shown, old="1", new="2")).is_valid
        assert (await say("read_file", path=r"gon\xe9.py")).text == r"error: no file gon\xe9.py"
        assert (await say("delete_file", path=shown)).text == f"deleted {shown}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
