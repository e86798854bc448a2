import asyncio
import json
import subprocess

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.envs.harness.session import ToolSession
from penstock.envs.sandbox import BackendUnavailable, SandboxError
from penstock.infra.agent.checkout import CheckoutBackend, open_checkout
from penstock.infra.agent.display import Display
from penstock.infra.agent.loop import Dialogue, to_call
from penstock.infra.agent.model import Model
from penstock.infra.agent.stream import AgentError, ReplyCall, ReplyFunction
from penstock.messages.errors import NotFoundError
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

LIMITS = Limits(tool_s_max=10.0, output_bytes_max=4096)


def asked(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None,
            "tool_calls": [{"id": name, "type": "function", "function": function}]}  # fmt: skip


async def served(replies, seen):
    async def complete(request):
        body = await request.json()
        seen.append(body)
        reply = replies[len(seen) - 1]
        if isinstance(reply, int):
            return web.Response(status=reply, text="refused")
        return web.json_response({"choices": [{"message": reply}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    server = TestServer(app)
    await server.start_server()
    return server


async def on_checkout(folder, replies, turns=8):
    seen = []
    server = await served(replies, seen)
    try:
        async with open_checkout(folder, print) as sandbox, asyncio.timeout(50):
            model = Model(str(server.make_url("/v1")), "k", "policy", "2")
            session = ToolSession("2", sandbox, LIMITS)
            conversation = Dialogue(model, session, Display(lambda text: None, 400))
            report = await conversation.ask("Mend it", turns)
    except (BackendUnavailable, SandboxError) as missing:
        pytest.skip(str(missing))
    finally:
        await server.close()
    return report, seen


@pytest.mark.vm
async def test_the_agent_edits_the_checkout_and_finishes(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    replies = [
        asked("run_terminal", command="pwd; cat a.py; git status --short"),
        asked("edit_file", path="a.py", old="x = 1", new="x = 2"),
        asked("read_file", path="/etc/shadow"),
        asked("finish", answer="done"),
    ]
    report, seen = await on_checkout(tmp_path, replies)
    assert (report.end, report.num_turns, report.num_invalid_calls) == ("finished", 4, 1)
    assert (tmp_path / "a.py").read_text() == "x = 2\n"
    observed = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert observed[0] == "/work\nx = 1\n?? a.py"
    assert observed[1] == "-x = 1\n+x = 2"
    assert observed[2].startswith("error: path is outside /work")
    assert {tool["function"]["name"] for tool in seen[0]["tools"]} >= {"codebase_search", "finish"}


@pytest.mark.vm
async def test_an_answer_without_a_call_ends_the_work(tmp_path):
    report, _ = await on_checkout(tmp_path, [{"role": "assistant", "content": "nothing to do"}])
    assert (report.end, report.answer) == ("answered", "nothing to do")


async def test_a_refusing_endpoint_is_named():
    server = await served([503], [])
    try:
        with pytest.raises(AgentError, match="status 503: refused"):
            await Model(str(server.make_url("/v1")), "", "m", "1").reply([], print)
    finally:
        await server.close()
    with pytest.raises(AgentError, match=r"127\.0\.0\.1"):
        await Model("http://127.0.0.1:9/v1", "", "m", "1").reply([], print)


def test_values_that_are_no_text_are_written_as_json():
    given = '{"path": "a", "limit": 3, "f": true}'
    assert to_call(requested(given)) == ToolCall(
        name="read_file", arguments={"path": "a", "limit": "3", "f": "true"}
    )
    assert to_call(requested("no json")).arguments.keys() == {"arguments"}


def requested(arguments):
    return ReplyCall(function=ReplyFunction(name="read_file", arguments=arguments))


def test_a_checkout_must_be_a_folder(tmp_path):
    with pytest.raises(NotFoundError, match="expected a folder"):
        CheckoutBackend(tmp_path / "absent", tmp_path / "absent")


def test_an_unknown_harness_version_lists_the_choices():
    with pytest.raises(NotFoundError, match="expected one of 1, 2"):
        ToolSession("9", None, LIMITS)
