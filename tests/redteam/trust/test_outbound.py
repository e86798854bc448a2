"""Services that redirect, flood, repeat keys, or are reached in plain text, for every client."""

import gzip
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from penstock.envs.harness.retrieval.embeddings import EmbeddingError, HttpEmbedder
from penstock.gateway.config import GatewayConfig
from penstock.infra.agent.model import Model
from penstock.infra.agent.stream import AgentError
from penstock.infra.api.rollouts import RolloutClient, RolloutServiceError
from penstock.infra.bus.jetstream.access import open_access
from penstock.infra.bus.settings import BusSection
from penstock.infra.config.settings import RegionSection
from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.sink import SinkSettings
from penstock.infra.stores.settings import StoreSection
from penstock.messages.errors import ConfigError

KEY = "sk-of-this-client-0123456789"
FAR = "service.example"
FAILURES = (AgentError, EmbeddingError, RolloutServiceError, ValueError)


async def ask_agent(url: str) -> None:
    await Model(url, KEY, "m", "1").reply([], lambda text: None)


async def ask_embedder(url: str) -> None:
    await HttpEmbedder(url, "m", KEY).embed(["text"])


async def ask_rollouts(url: str) -> None:
    await RolloutClient(url, KEY).take(0.1)


async def ask_receiver(url: str) -> None:
    otel = pytest.importorskip("penstock.infra.sinks.otel", reason="pip install -e '.[otel]'",
                               exc_type=ImportError)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={KEY}")
        settings = SinkSettings(run_id="r", folder=Path(folder), endpoint=url)
        await otel.OtelSink(settings).write([Row(step=1, at=1.0, values={"reward": 1.0})], [], {})


CLIENTS = [ask_agent, ask_embedder, ask_rollouts, ask_receiver]


@asynccontextmanager
async def serving(answer):
    """Serve one answer at every path; yield the URL and the keys that came."""
    seen: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        return answer()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", seen
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("ask", CLIENTS)
async def test_no_redirect_takes_a_key_elsewhere(ask) -> None:
    async with serving(lambda: web.Response(status=204)) as (other, stolen):
        away = {"Location": f"{other}/v1/x"}
        async with serving(lambda: web.Response(status=307, headers=away)) as (url, seen):
            with pytest.raises(FAILURES):
                await ask(url)
    assert seen and not stolen


@pytest.mark.parametrize("ask", CLIENTS)
async def test_no_failure_repeats_a_key(ask) -> None:
    text = f"no such key: {KEY} {KEY[::-1]} {KEY.encode().hex()}"
    async with serving(lambda: web.Response(status=401, text=text)) as (url, _):
        with pytest.raises(FAILURES) as failure:
            await ask(url)
    said = str(failure.value)
    assert "401" in said
    assert not any(form in said for form in (KEY, KEY[::-1], KEY.encode().hex()))


@pytest.mark.parametrize("ask", CLIENTS)
async def test_no_reply_unpacks_to_more_than_it_sent(ask) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with serving(lambda: web.Response(body=bomb, headers=headers)) as (url, _):
        with pytest.raises((*FAILURES, Exception)) as failure:
            await ask(url)
    assert len(str(failure.value)) < 2000


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("url", [f"http://{FAR}/v1", "http://10.0.0.1/v1", "http://[fe80::1]/v1"])
async def test_no_client_speaks_plain_text_beyond_this_machine(ask, url) -> None:
    with pytest.raises(ConfigError, match="expected TLS for an address off this machine"):
        await ask(url)


@pytest.mark.parametrize("ask", CLIENTS)
async def test_no_address_holds_a_password(ask) -> None:
    with pytest.raises(ConfigError, match="expected no user and password") as failure:
        await ask("https://user:pass-word@service.example/v1")
    assert "pass-word" not in str(failure.value)


SECTIONS = [
    (BusSection, {"servers": [f"nats://{FAR}:4222"]}, open_access),
    (StoreSection, {"kind": "s3", "bucket": "b", "endpoint": f"http://{FAR}:9000"}, None),
    (
        RegionSection,
        {"name": "west", "serves": ["train"], "bucket": "b", "endpoint": f"http://{FAR}:9000"},
        RegionSection.store_section,
    ),
    (GatewayConfig, {"host": FAR}, GatewayConfig.check_encrypted),
]


@pytest.mark.parametrize(("kind", "fields", "use"), SECTIONS)
def test_no_section_lets_secrets_pass_in_plain_text_unless_it_names_the_host(
    kind, fields, use
) -> None:
    use = use or (lambda section: section)
    with pytest.raises((ConfigError, msgspec.ValidationError), match="expected TLS"):
        use(msgspec.convert(fields, kind))
    with pytest.raises((ConfigError, msgspec.ValidationError), match="expected TLS"):
        use(msgspec.convert(fields | {"allow_plain_text": ["other.example"]}, kind))
    use(msgspec.convert(fields | {"allow_plain_text": [FAR]}, kind))
