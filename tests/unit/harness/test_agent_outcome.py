"""`penstock agent`: the run's own tools, exit codes, and what it reports to the service."""

import asyncio
import json
import subprocess

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.envs.harness.tools import tool_schemas
from penstock.envs.sandbox import BackendUnavailable
from penstock.infra.agent.checkout import CheckoutBackend
from penstock.infra.agent.endpoint import model_of_run, model_of_url
from penstock.infra.agent.loop import AgentReport, End
from penstock.infra.agent.model import Model
from penstock.infra.agent.outcome import Checkout, KeptError, exit_code, report_outcome, watched
from penstock.infra.cli import main, make_parser
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError
from penstock.messages.signals.declaration import by_name
from penstock.messages.signals.defaults import DEFAULT_SIGNALS


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("one\ntwo\nthree\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def need_checkouts(folder):
    try:
        CheckoutBackend(folder, folder)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def arguments(runs, *given):
    return make_parser().parse_args(["--runs-dir", str(runs), "agent", "Mend it.", *given])


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_run_s_policy_is_offered_the_tools_that_it_learned(version, tmp_path):
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "config.toml").write_text(f'[pacer]\nharness = "{version}"\n')
    (folder / "gateway_key").write_text("psk-x\n")
    (folder / "gateway_url").write_text("http://127.0.0.1:9")
    model = model_of_run(find_run("r1", tmp_path), arguments(tmp_path))
    assert model.harness == version
    assert model._body["tools"] == tool_schemas(version)
    told = arguments(tmp_path, "--harness", "2")
    assert model_of_run(find_run("r1", tmp_path), told).harness == "2"


def test_an_endpoint_without_a_run_needs_the_harness(tmp_path):
    with pytest.raises(ConfigError, match="--harness: expected 1 or 2"):
        model_of_url(arguments(tmp_path, "--url", "http://127.0.0.1:9/v1"))


@pytest.mark.parametrize(
    ("end", "tests", "code"),
    [
        (End.FINISHED, None, 0),
        (End.FINISHED, True, 0),
        (End.TURN_LIMIT, None, 1),
        (End.ANSWERED, True, 3),
        (End.FAILED, None, 4),
        (End.FINISHED, False, 5),
    ],
)
def test_the_exit_code_says_how_the_work_ended(end, tests, code):
    assert exit_code(AgentReport(end=end, tests_passed=tests)) == code


async def test_what_is_kept_is_counted_in_lines_of_the_change(checkout, tmp_path):
    (tmp_path / "scratch").mkdir()
    seen = Checkout(checkout, tmp_path / "scratch")
    commands = [("ls-files", "--stage", "--debug"), ("count-objects", "-v")]
    untouched = [git(checkout, *command) for command in commands]
    (checkout / "mine.txt").write_text("the user's own, before\n")
    before = await seen.snapshot()
    (checkout / "a.py").write_text("one\n2\nthree\n")
    (checkout / "new.py").write_text("x\ny\n")
    after = await seen.snapshot()
    assert await seen.kept(before, after, after) == 1.0
    assert await seen.kept(before, before, after) is None
    (checkout / "mine.txt").write_text("changed by the user\n")
    (checkout / "new.py").write_text("x\nz\n")
    assert await seen.kept(before, after, await seen.snapshot()) == 0.75
    assert [git(checkout, *command) for command in commands] == untouched
    git(checkout, "stash", "--include-untracked")
    assert await seen.kept(before, after, await seen.snapshot()) == 0.0


async def test_a_folder_that_is_no_repository_has_no_kept_share(tmp_path):
    (tmp_path / "scratch").mkdir()
    with pytest.raises(KeptError, match="git rev-parse"):
        await Checkout(tmp_path, tmp_path / "scratch").snapshot()


async def test_no_program_that_the_model_names_runs_in_a_snapshot(checkout, tmp_path):
    (tmp_path / "scratch").mkdir()
    (checkout / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
    proof = tmp_path / "owned"
    (checkout / ".gitconfig").write_text(f'[filter "evil"]\nclean = touch {proof}\n')
    git(checkout, "config", "core.fsmonitor", f"touch {proof}")
    git(checkout, "config", "diff.evil.textconv", f"touch {proof}; cat")
    seen = Checkout(checkout, tmp_path / "scratch")
    before = await seen.snapshot()
    (checkout / "a.py").write_text("1\n")
    after = await seen.snapshot()
    assert await seen.kept(before, after, after) == 1.0
    assert not proof.exists()


async def service(told, status=200, replies=()):
    waiting = list(replies)

    async def complete(request):
        call = {"name": waiting[0][0], "arguments": json.dumps(waiting.pop(0)[1])}
        message = {"content": None, "tool_calls": [{"id": "c", "function": call}]}
        return web.json_response({"choices": [{"message": message}]})

    async def take(request):
        told.append((request.headers["X-Session-Id"], await request.json()))
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_post("/v1/feedback", take)
    app.router.add_post("/v1/chat/completions", complete)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_the_service_is_told_of_outcome_tests_and_what_is_kept(checkout):
    told, slept = [], []
    server = await service(told)

    async def sleep(seconds):
        slept.append(seconds)
        (checkout / "a.py").write_text("one\nthree\n")

    model = Model(str(server.make_url("/v1")), "k", "policy", "1")
    report = AgentReport(end=End.FINISHED, tests_passed=False)
    async with watched(checkout, lambda text: None) as watch:
        (checkout / "a.py").write_text("one\n2\nthree\n")
        await watch.agent_done()
        await report_outcome(model, report)
        await watch.report_kept(model, report, 10.0, sleep)
    await server.close()
    assert slept == [600.0]
    assert report.diff_kept == 0.5
    expected = {"agent_finished": 1.0, "tests_passed": 0.0, "diff_kept": 0.5}
    assert report.feedback == expected
    assert {body["name"]: body["value"] for _, body in told} == expected
    declared = by_name(DEFAULT_SIGNALS)
    for session, body in told:
        assert session == body["session_id"] == model.session_id
        assert declared[body["name"]].expected(body["value"]) == ""


async def test_feedback_that_is_refused_is_said_and_changes_nothing_else():
    server = await service([], status=400)
    model = Model(str(server.make_url("/v1")), "k", "policy", "1")
    report = AgentReport(end=End.FINISHED)
    await report_outcome(model, report)
    await server.close()
    assert "status 400" in report.feedback_refused
    assert (report.feedback, exit_code(report)) == ({}, 0)


@pytest.mark.vm
@pytest.mark.parametrize(("tests", "code"), [("grep -q 2 a.py", 0), ("false", 5)])
async def test_the_whole_command_works_tests_and_reports(checkout, capsys, tests, code):
    need_checkouts(checkout)
    edit = {"path": "a.py", "old": "two", "new": "2\x1b[2J"}
    told = []
    replies = [("edit_file", edit), ("finish", {"answer": "done"})]
    server = await service(told, replies=replies)
    url = ("--url", str(server.make_url("/v1")), "--harness", "1", "--repo", str(checkout))
    options = ("--tests", tests, "--feedback", "--kept-minutes", "0.001", "--json")
    assert await asyncio.to_thread(main, ["agent", "Mend it.", *url, *options]) == code
    await server.close()
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["end"], report["diff_kept"]) == ("finished", 1.0)
    assert report["tests_passed"] is (code == 0)
    assert [body["name"] for _, body in told] == ["agent_finished", "tests_passed", "diff_kept"]
    assert "\x1b" not in said.err + said.out


@pytest.mark.vm
def test_an_endpoint_that_is_down_ends_with_a_code_of_its_own(checkout, capsys):
    need_checkouts(checkout)
    url = ("--url", "http://127.0.0.1:9/v1", "--harness", "1", "--repo", str(checkout), "--json")
    assert main(["agent", "Mend it.", *url]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["end"] == "failed"
    assert "127.0.0.1:9" in report["error"]
