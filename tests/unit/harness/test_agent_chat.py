"""`penstock chat` and the conversation under it: streams, several instructions, what is shown."""

import asyncio
import io
import json
import os

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.sandbox import BackendUnavailable
from penstock.infra.agent import chat
from penstock.infra.agent.checkout import CheckoutBackend
from penstock.infra.agent.display import Display
from penstock.infra.agent.loop import Dialogue
from penstock.infra.agent.model import Model
from penstock.infra.cli import main
from penstock.messages.errors import ConfigError

HOSTILE = "\x1b[2J\x9b31m\u202egpj\u061c\rX\x07"


def says(*texts):
    return [{"choices": [{"delta": {"content": text}}]} for text in texts]


def calls(name, **arguments):
    """A call whose arguments come in two parts."""
    written = json.dumps(arguments)
    parts = [{"index": 0, "id": "c1", "function": {"name": name, "arguments": written[:3]}},
             {"index": 0, "function": {"arguments": written[3:]}}]  # fmt: skip
    return [{"choices": [{"delta": {"tool_calls": [part]}}]} for part in parts]


class Service:
    """Streams one list of events per request; None ends a stream without its marker."""

    def __init__(self, *replies):
        self._replies = list(replies)
        self.asked = []
        self.hangs = asyncio.Event()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("/v1"))
        return self

    async def __aexit__(self, *exc):
        await self._server.close()

    async def _complete(self, request):
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._replies.pop(0):
            if event == "hang":
                self.hangs.set()
                await asyncio.sleep(60)
            if event is None:
                return response
            for piece in (b"data: ", json.dumps(event).encode(), b"\n\n"):
                await response.write(piece)
        await response.write(b"data: [DONE]\n\n")
        return response


class Tools:
    """Return what they are asked for; `finish` finishes."""

    async def run(self, requested):
        return [
            ToolResult(name=one.name, text=f"did {one.arguments}", is_finish=one.name == "finish")
            for one in requested
        ]


def conversation(service, shown):
    return Dialogue(Model(service.url, "", "m", "1", stores=False), Tools(), Display(shown, 99))


async def test_text_is_shown_as_it_comes_and_the_next_instruction_knows_what_was_said():
    shown = []
    asked_for = calls("list_dir", path="a")
    async with Service(says("I ", "look.") + asked_for, says("Done."), says("Yes.")) as service:
        talk = conversation(service, shown.append)
        report = await talk.ask("Look", 5)
        assert (report.end, report.answer, report.num_turns) == ("answered", "Done.", 2)
        await talk.ask("Sure?", 5)
    assert "".join(shown).startswith("  I look.\n> 'list_dir' 'path'='a'\n  did {'path': 'a'}\n")
    roles = [message["role"] for message in service.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    call = service.asked[1]["messages"][1]["tool_calls"][0]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("c1", {"path": "a"})
    assert all(body["stream"] and body["store"] is False for body in service.asked)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([*says("I am"), None], "broke off"),
        ([*says("I am"), {"error": {"message": "no generator"}}], "no generator"),
        ([{"choices": "none"}], "choices"),
    ],
)
async def test_a_reply_that_breaks_off_fails_and_is_not_part_of_what_was_said(events, text):
    async with Service(events, says("Here.")) as service:
        talk = conversation(service, lambda _text: None)
        report = await talk.ask("First", 5)
        assert report.end == "failed" and text in report.error
        assert (await talk.ask("Second", 5)).end == "answered"
    assert [one["content"] for one in service.asked[-1]["messages"]] == ["Second"]


async def test_an_interrupted_instruction_leaves_whole_turns():
    async with Service(calls("list_dir"), [*says("Now I"), "hang"], says("Here.")) as service:
        talk = conversation(service, lambda _text: None)
        asking = asyncio.create_task(talk.ask("First", 5))
        await service.hangs.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await talk.ask("Second", 5)
    roles = [message["role"] for message in service.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]


def test_nothing_of_a_model_reaches_the_terminal_or_passes_for_ours():
    shown = []
    display = Display(shown.append, 60)
    display.hear("x")
    for piece in (HOSTILE, "\n> 'finish' ''\nyou> y", "z" * 99, "more" * 99):
        display.hear(piece)
    display.say("ours\x1b\nnot a line of its own")
    text = "".join(shown)
    assert text.replace("\n", "").isprintable()
    assert "\n  > 'finish' ''\n  you> y" in text
    assert text.endswith("z...\nours\\u001b not a line of its own\n")
    assert "more" not in text


def test_a_folder_is_copied_and_its_links_are_not_followed(tmp_path):
    mine, secret = tmp_path / "mine", tmp_path / "secret"
    mine.mkdir()
    secret.write_text("not yours")
    (mine / "a.py").write_text("x = 1\n")
    os.mkfifo(mine / "pipe")
    with chat.opened(mine, {}, in_place=False) as place:
        comparison = chat.Comparison(place)
        (place / "a.py").write_text("x = 2\n")
        (place / "b.py").symlink_to(secret)
        os.mkfifo(place / "trap")
        diff = comparison.diff()
    assert "-x = 1\n+x = 2" in diff and "not yours" not in diff
    assert (mine / "a.py").read_text() == "x = 1\n"
    assert not place.exists()


def test_too_much_to_copy_is_refused_and_works_in_place(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")
    monkeypatch.setattr(chat, "BYTES_MAX", 3)
    with (
        pytest.raises(ConfigError, match="--in-place"),
        chat.opened(tmp_path, {}, in_place=False),
    ):
        pass
    with chat.opened(tmp_path, {}, in_place=True) as place:
        assert place == tmp_path


def test_the_history_of_a_repository_is_not_copied(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "pack").write_bytes(b"history")
    (tmp_path / "a").write_text("text")
    with chat.opened(tmp_path, {}, in_place=False) as place:
        assert [path.name for path in place.iterdir()] == ["a"]


def test_only_what_is_gone_is_shown_as_deleted(tmp_path):
    files = {"data.bin": b"\xff\0", "grown": b"x\n", "gone": b"y\n"}
    with chat.opened(None, files, in_place=False) as place:
        comparison = chat.Comparison(place)
        assert comparison.diff() == ""
        assert (place / "data.bin").read_bytes() == b"\xff\0"
        (place / "grown").write_bytes(b"x" * (chat.FILE_BYTES_MAX + 1))
        (place / "gone").unlink()
        diff = comparison.diff()
    assert diff.splitlines()[:2] == ["--- gone", "+++ /dev/null"] and "--- grown" not in diff
    assert diff.endswith("\ngrown: not compared: too large, too many, or no file")


def test_a_task_s_files_stay_in_its_folder():
    with (
        pytest.raises(ConfigError, match=r"\.\./x: expected a path within"),
        chat.opened(None, {"../x": b""}, in_place=False),
    ):
        pass


@pytest.mark.vm
@pytest.mark.parametrize("in_place", [False, True])
async def test_the_command_talks_over_a_pipe_and_ends_with_the_diff(
    tmp_path, capsys, monkeypatch, in_place
):
    (tmp_path / "a.py").write_text("x = 1\n")
    try:
        CheckoutBackend(tmp_path, tmp_path)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr("sys.stdin", io.StringIO("Mend it\n\nThanks\n"))
    edit = calls("edit_file", path="a.py", old="x = 1", new=f"x = 2  # {HOSTILE}")
    async with Service(edit, says("Done."), says("Welcome.")) as service:
        where = ["--url", service.url, "--harness", "1", "--workspace", str(tmp_path)]
        options = ["--in-place"] if in_place else []
        assert await asyncio.to_thread(main, ["chat", *where, *options]) == 0
    said = capsys.readouterr().out
    assert said.index("  Done.") < said.index("  Welcome.") < said.index("changes:")
    assert "-x = 1\n+x = 2" in said
    assert said.replace("\n", "").isprintable()
    assert ("x = 2" in (tmp_path / "a.py").read_text()) == in_place


def test_an_endpoint_that_is_down_ends_with_a_code_of_its_own(tmp_path, capsys, monkeypatch):
    try:
        CheckoutBackend(tmp_path, tmp_path)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr("sys.stdin", io.StringIO("Mend it\n"))
    where = ["--url", "http://127.0.0.1:9/v1", "--harness", "1"]
    assert main(["chat", *where]) == 4
    assert "failed: http://127.0.0.1:9/v1" in capsys.readouterr().out
