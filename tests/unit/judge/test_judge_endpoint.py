"""A judge's endpoint over HTTP: what is sent, what is tried again, and where the key goes."""

import codecs
import logging
import sys
import zlib
from base64 import b32encode, b64encode
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import web
from tests.judge_service import JudgeService, make_rubric
from tests.unit.judge.test_judge_attacks import CONFIG

from penstock.actors.judge.rubric.config import EndpointConfig
from penstock.actors.judge.rubric.endpoint import (
    REPLY_BYTES_MAX,
    Endpoint,
)
from penstock.actors.judge.rubric.judge import DOWN_AFTER, RubricJudge
from penstock.actors.judge.submission import Submission
from penstock.infra.config.file import load_config
from penstock.infra.judge.asking import LocalWaits
from penstock.infra.run.hosts import check_judge_keys
from penstock.messages.errors import ConfigError
from penstock.messages.reward import JudgeScore

WORK = Submission(sample_id="r", task="Fix m.py", diff="+x = 1", final="Fixed x in m.py.")
KEY = "sk-very-secret"


def make_judge(url: str, **changes) -> RubricJudge:
    config = make_rubric(url, **changes)
    assert config.endpoint is not None
    return RubricJudge(config, Endpoint(config.endpoint, {"JUDGE_KEY": KEY}), LocalWaits())


async def score_by(replies, **changes) -> tuple[JudgeScore, JudgeService]:
    """Have a service give these replies in turn, the last one for ever."""
    left = list(replies)
    service = JudgeService(lambda _body: left.pop(0) if len(left) > 1 else left[0])
    async with service.serving():
        [found] = await make_judge(service.url, **changes).score(WORK)
    return found, service


async def test_a_letter_becomes_a_score_with_its_cost_and_version() -> None:
    found, service = await score_by(["A"], endpoint={"key_env": "JUDGE_KEY"})
    assert (found.score, found.repeats, found.disagreement) == (1.0, 1, 0.0)
    assert (found.num_prompt_tokens, found.num_reply_tokens) == (100, 1)
    assert found.version.endswith("/m-2026")
    assert service.headers[0]["Authorization"] == f"Bearer {KEY}"
    [body] = service.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 16)
    assert [one["role"] for one in body["messages"]] == ["system", "user"]


async def test_a_structured_answer_is_asked_for_by_its_schema() -> None:
    found, service = await score_by(['{"choice": "B"}'], endpoint={"structured": True})
    assert found.score == 0.0 and not found.detail
    schema = service.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == ["A", "B"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_service_is_asked_again(status: int) -> None:
    found, service = await score_by([status, status, "A"])
    assert (found.score, len(service.bodies)) == (1.0, 3)


@pytest.mark.parametrize("status", [301, 401, 403, 404])
async def test_a_service_that_refuses_us_is_not_asked_again(status: int) -> None:
    found, service = await score_by([status])
    assert found.score is None and f"status {status}" in found.detail
    assert len(service.bodies) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_text_that_is_refused_gets_the_lowest_score(status: int) -> None:
    found, service = await score_by([status])
    assert found.score == 0.0 and f"status {status}" in found.detail
    assert len(service.bodies) == 1


@pytest.mark.parametrize("reply", ["", "The answer is A", "AB", "C", "a", '{"choice": "A"}'])
async def test_a_reply_that_is_no_letter_gets_the_lowest_score_after_some_tries(reply: str) -> None:
    found, service = await score_by([reply])
    assert found.score == 0.0 and "no letter alone" in found.detail
    assert (len(service.bodies), found.num_reply_tokens) == (3, 3)


@pytest.mark.parametrize(
    "response",
    [
        {"text": "no JSON"},
        {"text": '{"choices": []}'},
        {"text": '{"choices": [{"message": {"content": 5}}]}'},
        {"body": b" " * (REPLY_BYTES_MAX + 1)},
        {"body": b"\xff\xfe"},
        {"body": zlib.compress(bytes(64 << 20)), "headers": {"Content-Encoding": "deflate"}},
    ],
)
async def test_a_broken_reply_is_the_services_failure(response: dict) -> None:
    service = JudgeService(lambda _body: web.Response(**response))
    async with service.serving():
        [found] = await make_judge(service.url, num_attempts_max=2).score(WORK)
    assert found.score is None and len(service.bodies) == 2


@pytest.mark.parametrize("count", [-1, 1 << 64, 10**30])
async def test_what_a_service_says_of_itself_fits_a_verdict(count: int) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": 1}
    choices = [{"message": {"content": "A"}}]
    body = {"model": "m" * 100_000, "choices": choices, "usage": usage}
    found, _ = await score_by([web.json_response(body)])
    assert found.score == 1.0 and found.num_prompt_tokens == 0
    assert len(msgspec.msgpack.encode(found)) < 1000


async def test_a_redirect_is_not_followed_and_takes_no_key_along() -> None:
    other = JudgeService(lambda _body: "A")
    async with other.serving():
        moved = web.Response(status=307, headers={"Location": f"{other.url}/chat/completions"})
        found, service = await score_by([moved], endpoint={"key_env": "JUDGE_KEY"})
    assert found.score is None and other.bodies == []
    assert len(service.bodies) == 1


async def test_a_dead_endpoint_is_left_alone_for_a_while_and_says_so() -> None:
    judge = make_judge("http://127.0.0.1:9/v1", num_attempts_max=1)
    for _ in range(DOWN_AFTER):
        [found] = await judge.score(WORK)
        assert found.score is None and "ClientConnectorError" in found.detail
    [found] = await judge.score(WORK)
    assert found.score is None and found.detail.startswith("down, not asked: http://127.0.0.1:9")


async def test_a_silent_service_ends_with_the_deadline() -> None:
    async def silent(reader, writer) -> None:
        await reader.read()
        writer.close()

    import asyncio

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        judge = make_judge(f"http://127.0.0.1:{port}/v1", deadline_s=0.05)
        [found] = await judge.score(WORK)
    assert found.score is None and found.detail == "no answer in 0.05 s"


async def test_the_key_is_in_no_error_and_no_log(caplog) -> None:
    with caplog.at_level(logging.DEBUG):
        found, _ = await score_by([401], endpoint={"key_env": "JUDGE_KEY"})
    assert KEY not in caplog.text and KEY not in repr(found)


@pytest.mark.parametrize(
    "response",
    [
        {"status": 401, "text": f"no such key: {KEY}"},
        {"text": f'{{"model": "{KEY}", "choices": [{{"message": {{"content": "{KEY}"}}}}]}}'},
    ],
)
async def test_a_service_that_repeats_our_key_does_not_get_it_into_the_log(response) -> None:
    judge = {"endpoint": {"key_env": "JUDGE_KEY"}, "num_attempts_max": 1}
    found, _ = await score_by([web.Response(**response)], **judge)
    assert "[key]" in found.detail and KEY not in repr(found)


@pytest.mark.parametrize("write", [
    quote, lambda key: quote(quote(key)), lambda key: key[::-1], lambda key: key.encode().hex(),
    lambda key: b64encode(key.encode()).decode(), " ".join,
    lambda key: b64encode(b"x:" + key.encode()).decode(),
    lambda key: b32encode(key.encode()).decode(),
    lambda key: "".join(f"\\u{ord(each):04x}" for each in key),
    lambda key: "".join(f"&#{ord(each)};" for each in key),
    lambda key: codecs.encode(key, "rot13"),
])  # fmt: skip
async def test_nor_does_one_that_encodes_it(write, monkeypatch) -> None:
    key = "sk-a1/b2+C3d4XYZ987"
    monkeypatch.setattr(sys.modules[__name__], "KEY", key)
    judge = {"endpoint": {"key_env": "JUDGE_KEY"}, "num_attempts_max": 1}
    found, _ = await score_by(
        [web.Response(status=500, text=f"bad key {write(key)} here")], **judge
    )
    assert found.detail.endswith((": bad key [hidden] here", ": [hidden]"))


async def test_keys_and_episodes_leave_this_machine_over_tls_alone() -> None:
    for url in ("http://judge.example/v1", "http://169.254.169.254/v1", "http://[::2]/v1"):
        with pytest.raises(ConfigError, match=r"judge.judges.endpoint.url: expected TLS"):
            EndpointConfig(url=url, model="m").check_encrypted()
    for url in ("https://judge.example/v1", "http://127.0.0.1:1/v1", "http://localhost/v1"):
        EndpointConfig(url=url, model="m").check_encrypted()
    allowed = ["judge.example"]
    named = EndpointConfig(url="http://judge.example/v1", model="m", allow_plain_text=allowed)
    named.check_encrypted()


async def test_a_host_that_no_name_can_be_is_a_failure_of_the_service() -> None:
    judge = make_judge(f"https://{'a' * 64}/v1", num_attempts_max=1)
    [found] = await judge.score(WORK)
    assert found.score is None and "UnicodeError" in found.detail


def test_a_key_comes_from_the_environment_or_a_file(tmp_path) -> None:
    def open_with(**fields) -> Endpoint:
        config = EndpointConfig(url="https://judge.example/v1", model="m", **fields)
        return Endpoint(config, {"EMPTY": "", "SPACED": "a b", "LINE": "a\r\nHost: b"})

    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    open_with(key_file=str(file))
    for name in ("ABSENT", "EMPTY", "SPACED", "LINE"):
        with pytest.raises(ConfigError, match=rf"key_env {name}: expected a key"):
            open_with(key_env=name)
    with pytest.raises(ConfigError, match=r"key_file .*none: No such file"):
        open_with(key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"key_file .*: expected a path"):
        open_with(key_file="/a\0b")
    with pytest.raises(ConfigError, match="key_env or key_file, got both"):
        open_with(key_env="A", key_file="/b")


def test_a_judges_key_is_missed_before_a_run_starts(tmp_path, monkeypatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace("URL", "https://judge.example/v1") + 'key_env = "ABSENT_KEY"\n')
    config = load_config(path)
    with pytest.raises(ConfigError, match=r"key_env ABSENT_KEY: .*; it is not set"):
        check_judge_keys(config, list(config.processes))
    check_judge_keys(config, ["trainer"])
    monkeypatch.setenv("ABSENT_KEY", KEY)
    check_judge_keys(config, list(config.processes))
