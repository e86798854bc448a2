"""Who may label an episode, from where, and with what."""

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.e2e.gateway.conftest import OPERATOR, SECRET
from tests.unit.monitor.episode_story import HOSTILE, episode, with_objects

from penstock.gateway.errors import ApiError
from penstock.gateway.page.labels import read_label
from penstock.messages.signals.episode_labels import EpisodeLabeled

BODY = {"value": 1.0, "labeler": "ann", "comment": HOSTILE}
KEY = {"Authorization": f"Bearer {OPERATOR}"}
URL = "/v1/monitor/episodes/h0-m0/labels"


@pytest.fixture
async def http(site):
    await site.bus.publish([*episode("h0-m0", "h0")])
    await with_objects(site.store)
    async with aiohttp.ClientSession(site.url) as session:
        yield session


async def test_an_operator_s_label_is_an_event_and_in_the_view(http, site):
    async with http.post(URL, json=BODY, headers=KEY) as reply:
        assert reply.status == 200, await reply.text()
    [event] = await site.events(EpisodeLabeled)
    assert (event.labeler, event.value, event.comment) == ("ann", 1.0, HOSTILE)
    assert (event.rollout_id, event.group_id) == ("h0-m0", "h0")
    for _ in range(200):
        async with http.get("/v1/monitor/episodes/h0-m0", headers=KEY) as reply:
            view = await reply.json()
        if view.get("labels"):
            break
    assert view["labels"] == [{"labeler": "ann", "value": 1.0, "comment": HOSTILE}]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer no-key"}, 401),
        ({"Authorization": f"Bearer {SECRET}"}, 403),
        (KEY | {"Sec-Fetch-Site": "cross-site"}, 403),
        (KEY | {"Sec-Fetch-Site": "same-site"}, 403),
        (KEY | {"Content-Type": "text/plain"}, 415),
        (KEY | {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_others_and_other_sites_store_nothing(http, site, headers, status):
    headers = {"Content-Type": "application/json"} | headers
    async with http.post(URL, data=b'{"value": 1}', headers=headers) as reply:
        assert reply.status == status
        assert "WWW-Authenticate" not in reply.headers  # The page asks for the key itself.
    assert await site.events(EpisodeLabeled) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 400),
        (b'{"value": 2}', 400),
        (b'{"value": "good"}', 400),
        (b'{"value": 1, "labeler": ""}', 400),
        (b'{"value": 1, "labeler": "a\\u202eb"}', 400),
        (b'{"value": 1, "comment": "' + b"x" * 2001 + b'"}', 400),
        (b'{"value": 1, "comment": "' + b"x" * 20_000 + b'"}', 413),
        (b'{"value": 1, "other": 1}', 400),
        (b"[" * 15_000, 400),
    ],
)
async def test_another_body_is_the_sender_s_error(http, site, body, status):
    headers = KEY | {"Content-Type": "application/json"}
    async with http.post(URL, data=body, headers=headers) as reply:
        assert reply.status == status, await reply.text()
    assert await site.events(EpisodeLabeled) == []


@pytest.mark.parametrize("name", ["nobody", "*", "%3E", "a%20b", "..", "%00", "x" * 3000])
async def test_no_episode_of_that_id_is_not_found(http, name):
    url = f"/v1/monitor/episodes/{name}/labels"
    async with http.post(url, json=BODY, headers=KEY) as reply:
        assert 400 <= reply.status < 500


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.binary(max_size=80) | st.text(max_size=40).map(lambda text: f'{{"value": {text}}}'.encode())
)
def test_any_bytes_are_a_label_or_a_typed_error(data):
    try:
        assert read_label(data).value is None or 0 <= read_label(data).value <= 1
    except ApiError as error:
        assert error.status == 400
