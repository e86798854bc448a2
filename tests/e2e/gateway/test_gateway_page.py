"""The live page and the report in a real browser."""

import shutil

import pytest
from tests.unit.monitor.episode_story import HOSTILE, episode, with_objects
from tests.unit.monitor.gate_story import decided, gate_story
from tests.unit.monitor.story import finished, report, story

from penstock.actors.monitor.episodes.collecting import EpisodeCollector
from penstock.actors.monitor.log_folds import fold_log
from penstock.infra.run.closing import write_report
from penstock.infra.run.runs import RunDir
from penstock.messages.reading.trajectories import last_of
from penstock.messages.telemetry import Wait

from .browser import chromium
from .conftest import OPERATOR

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine"),
]
CHARTS = ("reward", "midtrain", "staleness", "mismatch", "deltas", "lag", "steptime")
SIZES = [(1280, 800), (390, 844)]


def charted(page_id: str) -> str:
    return f"document.querySelectorAll('#{page_id} svg[role=img] :is(path, rect, circle)').length"


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_the_live_page_follows_the_run(site, tmp_path, width, height):
    wait = Wait(target="sandbox", reason="a machine", since=1.0, deadline_s=1.0)
    await site.bus.publish([*story(), report("judge-0", "judge", 9e9, 1.0, wait)])
    async with chromium(CHROMIUM, tmp_path / "profile") as page:
        await page.open(site.page_url, width=width, height=height)
        await page.until("document.getElementById('link').textContent === 'live'")
        await page.until("document.getElementById('run-id').textContent === 'r1'")
        for name in CHARTS:
            assert await page.evaluate(charted(name)) > 0, name
        assert "75%" in await page.evaluate("document.getElementById('tiles').textContent")
        assert "balanced" in await page.evaluate("document.getElementById('ledger').textContent")
        assert "a machine" in await page.evaluate("document.getElementById('actors').textContent")
        await site.bus.publish([finished()])
        await page.until("document.getElementById('phase').textContent === 'finished'")
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(overflow) == 0
        assert page.problems == []


async def test_the_report_needs_no_server(bus, tmp_path):
    await bus.publish([*story(), finished()])
    run = RunDir(tmp_path / "r1")
    write_report(run, await fold_log(bus), (b"[]", b"{}"))
    async with chromium(CHROMIUM, tmp_path / "profile") as page:
        await page.open(run.report.as_uri(), width=1280, height=800)
        await page.until("document.getElementById('phase')?.textContent === 'finished'")
        for name in CHARTS:
            assert await page.evaluate(charted(name)) > 0, name
        assert page.problems == []


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_the_page_shows_the_candidate_its_gates_and_its_end(site, tmp_path, width, height):
    await site.bus.publish([*story(), *gate_story()])
    text = "document.getElementById('gates').innerText"
    async with chromium(CHROMIUM, tmp_path / "profile") as page:
        await page.open(site.page_url, width=width, height=height)
        await page.until(f"{text}.includes('blocked by reply_length')")
        assert "24,311 more rated sessions per arm" in await page.evaluate(text)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(overflow) == 0
        await site.bus.publish([decided()])
        await page.until(f"{text}.includes('rolled back')")
        assert page.problems == []


@pytest.mark.parametrize("is_report", [False, True])
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_a_hostile_episode_is_shown_as_text(site, tmp_path, width, height, is_report):
    await site.bus.publish([*story(), *episode("h0-m0", "h0"), *episode("h0-m1", "h0")])
    await with_objects(site.store)
    run, episodes = RunDir(tmp_path / "r1"), EpisodeCollector()
    state = await fold_log(site.bus, episodes)
    write_report(run, state, await episodes.packed(site.store, last_of(site.bus)))
    url = run.report.as_uri() if is_report else site.url
    text = "document.getElementById('episodes').innerText"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    async with chromium(CHROMIUM, tmp_path / "profile") as page:
        if not is_report:
            await page.open(site.page_url, width=width, height=height)
        await page.open(f"{url}#episodes", width=width, height=height)
        await page.until(f"{text}.includes('h0-m0')")
        await page.evaluate("location.hash = '#episode/h0-m0'")
        await page.until(f"{text}.includes('Episodes of the group')")
        assert HOSTILE[:30] in await page.evaluate(text)
        await page.evaluate("[...document.querySelectorAll('button')].at(-1).click()")
        await page.until("document.querySelectorAll('.side').length === 2")
        assert await page.evaluate(overflow) == 0
        assert await page.evaluate("document.querySelectorAll('#episodes script').length") == 0
        assert page.problems == []


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_an_episode_is_labeled_on_the_page(site, tmp_path, width, height):
    await site.bus.publish([*story(), *episode("h0-m0", "h0")])
    await with_objects(site.store)
    text = "document.getElementById('episodes').innerText"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    async with chromium(CHROMIUM, tmp_path / "profile") as page:
        await page.open(site.page_url, width=width, height=height)
        await page.open(f"{site.url}#episode/h0-m0", width=width, height=height)
        await page.until(f"{text}.includes('There are no labels yet.')")
        await page.evaluate("document.querySelector('.labeling button').click()")
        comment = f"document.querySelector('.labeling textarea').value = {HOSTILE!r}"
        await page.evaluate(f"{comment}; document.querySelector('.labeling').requestSubmit()")
        await page.until(f"{text}.includes('expected an operator')")
        key = f"document.querySelector('.labeling input[type=password]').value = {OPERATOR!r}"
        await page.evaluate(f"{key}; document.querySelector('.labeling').requestSubmit()")
        await page.until(f"{text}.includes('operator · 1.00')")
        assert HOSTILE[:30] in await page.evaluate("document.querySelector('.label').innerText")
        assert await page.evaluate(overflow) == 0
        assert await page.evaluate("document.querySelectorAll('#episodes script').length") == 0
